//! The plots that only the page has: released bytes over time, and histograms.

use ringfence_experiments::{Figure, Series};
use ringfence_lab::row::Row;
use ringfence_trace::Histogram;

use crate::plot::{InlineSvg, histogram, inline_lines};

/// Most lines of the plot of released bytes.
pub(super) const MAX_LINES: usize = 7;

/// The plot of released bytes, with the modes of the most byte-seconds.
#[derive(Debug)]
pub(super) struct StaleBytesPlot {
    pub(super) svg: InlineSvg,
    /// Number of modes with protection that expose released bytes and have no line.
    pub(super) left_out: usize,
}

/// Returns the plot of the released bytes that a device still reaches, over time; `None` if no
/// mode with protection exposes any. Modes of safety `none` have no line.
pub(super) fn stale_bytes(rows: &[&Row]) -> Option<StaleBytesPlot> {
    let mut shown: Vec<&Row> = rows
        .iter()
        .copied()
        .filter(|row| row.safety != "none" && row.stale_byte_seconds > 0.0)
        .filter(|row| !row.stale_bytes.mean_bytes.is_empty())
        .collect();
    shown.sort_by(|a, b| b.stale_byte_seconds.total_cmp(&a.stale_byte_seconds));
    let left_out = shown.len().saturating_sub(MAX_LINES);
    shown.truncate(MAX_LINES);
    let all = shown.iter().flat_map(|row| &row.stale_bytes.mean_bytes);
    let most = all.copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let (unit, y) = match most {
        ..4096.0 => (1.0, "bytes"),
        ..4_194_304.0 => (1024.0, "KiB"),
        _ => (1_048_576.0, "MiB"),
    };
    let lengths = shown.iter().map(|row| row.stale_bytes.length_ns);
    let length = lengths.max().unwrap_or(0);
    let (second, x) = match length {
        ..10_000_000 => (1e3, "us since the first unmap"),
        10_000_000..10_000_000_000 => (1e6, "ms since the first unmap"),
        _ => (1e9, "s since the first unmap"),
    };
    let series = shown.iter().map(|row| {
        let bytes = &row.stale_bytes;
        let (width, end) = (bytes.bin_ns as f64, bytes.length_ns as f64);
        let points = bytes.mean_bytes.iter().enumerate().map(|(bin, mean)| {
            let start = bin as f64 * width;
            let middle = (start + (start + width).min(end)) / 2.0;
            (middle / second, mean / unit)
        });
        Series::line(row.mode.clone(), points.collect())
    });
    let svg = inline_lines(&Figure {
        title: "Released bytes that the device still reaches, over time".into(),
        x,
        y,
        log_x: false,
        series: series.collect(),
    });
    Some(StaleBytesPlot { svg, left_out })
}

/// Returns a histogram whose bar n counts the values from 2^n to 2^(n+1) - 1; `None` if all counts
/// are 0. The last bar has no upper end.
pub(super) fn powers_of_two(title: &str, x: &'static str, counts: &Histogram) -> Option<InlineSvg> {
    let used = counts.iter().rposition(|count| *count > 0)? + 1;
    let last = counts.len() - 1;
    let bars: Vec<(String, u64)> = counts
        .iter()
        .take(used)
        .enumerate()
        .map(|(bucket, count)| {
            let from = 1u64 << bucket;
            let label = match bucket {
                0 => "1".to_owned(),
                _ if bucket == last => format!("{from}+"),
                _ => format!("{from}-{}", 2 * from - 1),
            };
            (label, *count)
        })
        .collect();
    Some(histogram(title, x, &bars))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_lab::oracle::StaleBytes;

    fn row(mode: &str, safety: &str, byte_seconds: f64, stale_bytes: StaleBytes) -> Row {
        Row {
            mode: mode.into(),
            safety: safety.into(),
            stale_byte_seconds: byte_seconds,
            stale_bytes,
            ..Row::of_run(true, true)
        }
    }

    #[test]
    fn lines_are_those_of_the_protecting_modes_that_expose_most() {
        let bytes = || StaleBytes {
            bin_ns: 10,
            length_ns: 20,
            mean_bytes: vec![4096.0; 2],
        };
        let unsafe_rows = [
            row("as-published", "none", 99.0, bytes()),
            row("strict", "strict", 0.0, StaleBytes::default()),
        ];
        assert!(stale_bytes(&unsafe_rows.each_ref()).is_none());
        let lazy = (0..10).map(|n| row(&format!("lazy-{n}"), "bounded", f64::from(n + 1), bytes()));
        let rows: Vec<Row> = unsafe_rows.into_iter().chain(lazy).collect();
        for (count, left_out) in [(3, 0), (9, 0), (10, 1), (12, 3)] {
            let rows: Vec<&Row> = rows.iter().take(count).collect();
            let plot = stale_bytes(&rows).unwrap();
            assert_eq!(plot.left_out, left_out);
            let drawn = |row: &&&Row| plot.svg.markup().contains(&format!(">{}<", row.mode));
            let drawn: Vec<&str> = rows.iter().filter(drawn).map(|row| &*row.mode).collect();
            let expected: Vec<&str> = rows[2 + left_out..].iter().map(|row| &*row.mode).collect();
            assert_eq!(drawn, expected);
        }
    }

    /// The last part ends with the trace. The parts of a hostile trace span 2^64 ns.
    #[test]
    fn the_time_of_released_bytes_ends_with_the_trace() {
        for (bin_ns, length_ns, parts, end) in [
            // From 5 to 12 ms, the middles of the first part and of the last one.
            (10_000_000, 14_000_000, 2, ">12<"),
            (1 << 57, u64::MAX, 128, "s since the first unmap"),
        ] {
            let bytes = StaleBytes {
                bin_ns,
                length_ns,
                mean_bytes: vec![4096.0; parts],
            };
            let row = row("lazy", "bounded", 1.0, bytes);
            let plot = stale_bytes(&[&row]).unwrap();
            let drawn = plot.svg.markup();
            assert!(drawn.contains(end), "{drawn}");
        }
    }

    #[test]
    fn bars_name_their_ranges_and_end_at_the_last_count() {
        let mut counts = Histogram::default();
        assert!(powers_of_two("t", "x", &counts).is_none());
        counts[2] = 5;
        let plot = powers_of_two("t", "x", &counts).unwrap();
        for label in [">1<", ">2-3<", ">4-7<", ">5<"] {
            assert!(plot.markup().contains(label), "{label}: {}", plot.markup());
        }
        assert!(!plot.markup().contains("8-15"));
        counts[11] = 1;
        let plot = powers_of_two("t", "x", &counts).unwrap();
        assert!(plot.markup().contains(">2048+<"));
    }
}
