//! Options that raise or lower what a trace may ask for.

use clap::Args;
use ringfence_lab::ReplayLimits;
use ringfence_trace::TraceLimits;

/// Bounds on a trace. The defaults are those of [`TraceLimits`].
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TraceLimitArgs {
    /// Longest line, with K, M or G for 2^10, 2^20 and 2^30 bytes [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_line: Option<u64>,
    /// Text of a trace [default: of zstd and .dat 16M and 200 times the file; plain text any]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_text: Option<u64>,
    /// Bytes of one mapping [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_mapping: Option<u64>,
    /// Bytes mapped at once [default: 16G]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_live: Option<u64>,
    /// Bytes mapped in all [default: 64G and 2M a line]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_mapped: Option<u64>,
    /// Segments of the mappings alive at once [default: 64K and one for 8 bytes of the file]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_segments: Option<u64>,
    /// Segments of one mapping [default: 8K]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_list: Option<u64>,
    /// Rows and segments of a Parquet file [default: 128K and one a byte of the file]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_rows: Option<u64>,
    /// Bytes of marks, 96 a mark beside its text [default: 16M and 16 times the file]
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Limits")]
    pub max_marks: Option<u64>,
}

impl TraceLimitArgs {
    /// The defaults with what was given.
    pub(crate) fn limits(&self) -> TraceLimits {
        let mut limits = TraceLimits::default();
        if let Some(line) = self.max_line {
            limits.line = usize::try_from(line).unwrap_or(usize::MAX);
        }
        limits.mapping = self.max_mapping.unwrap_or(limits.mapping);
        limits.live = self.max_live.unwrap_or(limits.live);
        limits.text = self.max_text;
        limits.mapped = self.max_mapped;
        limits.segments = self.max_segments;
        limits.list = self.max_list.unwrap_or(limits.list);
        limits.rows = self.max_rows;
        limits.marks = self.max_marks;
        limits
    }
}

/// Bounds on a replay. The defaults are those of [`ReplayLimits`].
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplayLimitArgs {
    /// Devices that map memory [default: 256]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub max_devices: Option<usize>,
    /// Devices times processors that map memory [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub max_device_cpus: Option<usize>,
    /// Buffers alive on one page, in modes where buffers share pages [default: 4096]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub max_page_buffers: Option<usize>,
    /// Ranges that a mode's allocator searches [default: 256M and 4K a mapped range]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_search: Option<u64>,
    /// Mappings that a mode with a cache keeps behind their unmaps [default: 256K]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_kept: Option<u64>,
    /// Ends of cycles of all devices' caches in the gaps of the trace [default: 128M and 4K an
    /// operation]
    #[arg(long, value_name = "N", value_parser = size, help_heading = "Limits")]
    pub max_cycle_ends: Option<u64>,
    /// Bytes of standard input that are kept in a temporary file where a trace is read twice
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G", help_heading = "Limits")]
    pub max_spool: u64,
}

impl ReplayLimitArgs {
    /// Bytes of standard input that are kept.
    pub(crate) fn spool(&self) -> u64 {
        self.max_spool
    }

    /// The defaults with what was given.
    pub(crate) fn limits(&self) -> ReplayLimits {
        let mut limits = ReplayLimits::default();
        limits.devices = self.max_devices.unwrap_or(limits.devices);
        limits.device_cpus = self.max_device_cpus.unwrap_or(limits.device_cpus);
        let buffers = self.max_page_buffers;
        limits.buffers_on_a_page = buffers.unwrap_or(limits.buffers_on_a_page);
        limits.search = self.max_search;
        limits.cycle_ends = self.max_cycle_ends;
        if let Some(kept) = self.max_kept {
            limits.kept = usize::try_from(kept).unwrap_or(usize::MAX);
        }
        limits
    }
}

/// A number, with K, M, G or T for a power of 1024.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no number with K, M, G or T behind it, such as 64M");
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        Some((at, 'T' | 't')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let cases = [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("64K", Some(64 << 10)),
            ("3m", Some(3 << 20)),
            ("16G", Some(16 << 30)),
            ("1T", Some(1 << 40)),
            ("16777216T", None),
            ("", None),
            ("K", None),
            ("-1", None),
            ("1KB", None),
            ("1\u{e9}", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text).ok(), bytes, "{text}");
        }
    }
}
