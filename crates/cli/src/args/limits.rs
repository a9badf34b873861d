//! Options for the limits on a trace and on a replay.

use clap::Args;
use ringfence_lab::ReplayLimits;
use ringfence_trace::TraceLimits;

use crate::spool_limit::SpoolLimit;

/// Limits on a trace. The defaults are those of [`TraceLimits`].
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct TraceLimitArgs {
    /// Maximum length of a line, with K, M or G for 2^10, 2^20 and 2^30 bytes [default: 1M]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_line: Option<u64>,
    /// Maximum text of a trace [default: 16M plus 200 times the file for zstd and .dat, unlimited
    /// for plain text]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_text: Option<u64>,
    /// Maximum bytes of one mapping [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_mapping: Option<u64>,
    /// Maximum bytes mapped at once [default: 16G]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_live: Option<u64>,
    /// Maximum bytes mapped in total [default: 8G plus 2M per line]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_mapped: Option<u64>,
    /// Maximum segments of the mappings live at once [default: 64K plus one per 8 bytes of the
    /// file]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_segments: Option<u64>,
    /// Maximum segments of one mapping [default: 8K]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_list: Option<u64>,
    /// Maximum rows and segments of a Parquet file [default: 128K plus one per byte of the file]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_rows: Option<u64>,
    /// Maximum bytes of marks, including 96 per mark in addition to its text [default: 16M plus 16
    /// times the file]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_marks: Option<u64>,
}

impl TraceLimitArgs {
    /// Returns the default limits with the given options applied.
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

/// Limits on the devices of a trace and on their allocators. The defaults are those of
/// [`ReplayLimits`].
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct DeviceLimitArgs {
    /// Maximum number of devices that map memory [default: 256]
    #[arg(long, value_name = "N")]
    pub max_devices: Option<usize>,
    /// Maximum product of the numbers of devices and of CPUs that map memory [default: 4096]
    #[arg(long, value_name = "N")]
    pub max_device_cpus: Option<usize>,
    /// Maximum number of ranges that an allocator searches [default: 256M plus 4K per allocated
    /// range]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_search: Option<u64>,
}

impl DeviceLimitArgs {
    /// Returns the default limits with the given options applied.
    pub(crate) fn limits(&self) -> ReplayLimits {
        let mut limits = ReplayLimits::default();
        limits.devices = self.max_devices.unwrap_or(limits.devices);
        limits.device_cpus = self.max_device_cpus.unwrap_or(limits.device_cpus);
        limits.search = self.max_search;
        limits
    }
}

/// Limits on a replay. The defaults are those of [`ReplayLimits`].
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct ReplayLimitArgs {
    /// Limits on the devices and on their allocators.
    #[command(flatten)]
    pub devices: DeviceLimitArgs,
    /// Maximum number of live buffers on one page, in modes where buffers share pages [default:
    /// 4096]
    #[arg(long, value_name = "N")]
    pub max_page_buffers: Option<usize>,
    /// Maximum number of mappings that a mode with a cache keeps after their unmaps [default: 256K]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_kept: Option<u64>,
    /// Maximum number of ends of cycles of all devices' caches in the gaps of the trace [default:
    /// 128M plus 4K per operation]
    #[arg(long, value_name = "N", value_parser = size)]
    pub max_cycle_ends: Option<u64>,
    /// Maximum bytes of standard input, or of a FIFO, stored in a temporary file if a trace is read
    /// twice
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G")]
    pub max_spool: u64,
}

impl ReplayLimitArgs {
    /// Returns the limit on the stored bytes of standard input or a FIFO.
    pub(crate) fn spool(&self) -> SpoolLimit {
        SpoolLimit {
            bytes: self.max_spool,
            option: Some("--max-spool"),
        }
    }

    /// Returns the default limits with the given options applied.
    pub(crate) fn limits(&self) -> ReplayLimits {
        let mut limits = self.devices.limits();
        let buffers = self.max_page_buffers;
        limits.buffers_on_a_page = buffers.unwrap_or(limits.buffers_on_a_page);
        limits.cycle_ends = self.max_cycle_ends;
        if let Some(kept) = self.max_kept {
            limits.kept = usize::try_from(kept).unwrap_or(usize::MAX);
        }
        limits
    }
}

/// Parses a number, with K, M, G or T for a power of 1024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!("{text:?} is not a size; write a number, optionally with K, M, G or T, such as 64M")
    };
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
