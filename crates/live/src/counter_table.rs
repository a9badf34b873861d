//! The counters as a text table: totals, and rates since the last sample.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// Values of all counters at one time, by device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    devices: Vec<(String, Readings)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Readings {
    totals: BTreeMap<String, u64>,
    /// Histogram buckets: upper bound in seconds, and the number of requests within it.
    times: Vec<(f64, u64)>,
}

impl Readings {
    fn total(&self, name: &str) -> u64 {
        self.totals.get(name).copied().unwrap_or(0)
    }
}

impl Sample {
    /// Parses the output of [`prometheus`](crate::counters::prometheus) and skips lines of other
    /// metrics. `None` if no metric of this program was found.
    pub fn parse(text: &str) -> Option<Self> {
        let mut sample = Self::default();
        for line in text.lines() {
            sample.add(line);
        }
        (!sample.devices.is_empty()).then_some(sample)
    }

    fn add(&mut self, line: &str) -> Option<()> {
        let (name, rest) = line.strip_prefix("ringfence_")?.split_once('{')?;
        let (labels, value) = rest.split_once("} ")?;
        let label = |key: &str| {
            labels.split(',').find_map(|label| {
                let (name, value) = label.split_once('=')?;
                (name == key).then(|| value.trim_matches('"'))
            })
        };
        let device = label("device")?;
        let value = value.parse().ok();
        let readings = self.device(device);
        if let Some(name) = name.strip_suffix("_total") {
            readings.totals.insert(name.to_owned(), value?);
        } else if name == "service_seconds_bucket" {
            let bound = match label("le")? {
                "+Inf" => f64::INFINITY,
                bound => bound.parse().ok()?,
            };
            readings.times.push((bound, value?));
        }
        Some(())
    }

    fn device(&mut self, name: &str) -> &mut Readings {
        let known = self.devices.iter().position(|(other, _)| other == name);
        let at = known.unwrap_or_else(|| {
            self.devices.push((name.to_owned(), Readings::default()));
            self.devices.len() - 1
        });
        &mut self.devices[at].1
    }
}

/// The columns. Rates and service times cover the time since `before`. Without `before`, rates are
/// empty and service times cover all requests.
const TITLES: [&str; 11] = [
    "device",
    "requests/s",
    "to guest/s",
    "from guest/s",
    "half within",
    "99% within",
    "requests",
    "failed",
    "faults",
    "stale",
    "refused",
];

/// Formats `now` as a table. `before` is an earlier sample and its age.
pub fn table(now: &Sample, before: Option<(&Sample, Duration)>) -> String {
    let none = Readings::default();
    let mut rows = vec![TITLES.map(str::to_owned)];
    for (device, readings) in &now.devices {
        let earlier = before.map(|(sample, ago)| {
            let found = sample.devices.iter().find(|(other, _)| other == device);
            (found.map_or(&none, |(_, readings)| readings), ago)
        });
        let rate = |name: &str, unit: fn(f64) -> String| match earlier {
            // A restarted daemon counts from zero.
            Some((earlier, ago)) if !ago.is_zero() => {
                let more = readings.total(name).saturating_sub(earlier.total(name));
                unit(more as f64 / ago.as_secs_f64())
            }
            _ => "-".into(),
        };
        let since = earlier.map_or(&none, |(earlier, _)| earlier);
        let total = |name: &str| readings.total(name).to_string();
        rows.push([
            device.clone(),
            rate("requests", |rate| format!("{rate:.0}")),
            rate("bytes_read", bytes),
            rate("bytes_written", bytes),
            within(readings, since, 0.5),
            within(readings, since, 0.99),
            total("requests"),
            total("failed"),
            total("faults"),
            total("stale"),
            total("refused"),
        ]);
    }
    aligned(&rows)
}

/// Returns the bound within which the fraction `part` of the requests since `before` completed, or
/// `-` if no request did.
fn within(now: &Readings, before: &Readings, part: f64) -> String {
    let counts = now.times.iter().enumerate().map(|(at, (bound, count))| {
        let earlier = before.times.get(at).map_or(0, |(_, count)| *count);
        (*bound, count.saturating_sub(earlier))
    });
    let counts: Vec<(f64, u64)> = counts.collect();
    let all = counts.last().map_or(0, |(_, count)| *count);
    if all == 0 {
        return "-".into();
    }
    let wanted = all as f64 * part;
    let bound = counts.iter().find(|(_, count)| *count as f64 >= wanted);
    match bound.map(|(bound, _)| *bound) {
        Some(bound) if bound.is_finite() => time(bound),
        _ => "longer".into(),
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}

fn bytes(bytes: f64) -> String {
    match bytes {
        b if b < 1e3 => format!("{b:.0} B"),
        b if b < 1e6 => format!("{:.0} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} GB", b / 1e9),
    }
}

/// Aligns the first column left and the others right.
fn aligned(rows: &[[String; TITLES.len()]]) -> String {
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
            let _ = if column == 0 {
                write!(text, "{cell:<width$}")
            } else {
                write!(text, "  {cell:>width$}")
            };
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::{DeviceCounters, prometheus};

    fn cells(table: &str, row: usize) -> Vec<&str> {
        let row = table.lines().nth(row).unwrap();
        let cells = row.split("  ").map(str::trim);
        cells.filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let (disk, iommu) = (DeviceCounters::default(), DeviceCounters::default());
        let sample = || Sample::parse(&prometheus(&[("iommu", &iommu), ("blk", &disk)])).unwrap();
        disk.requests.add(1000);
        disk.service.record(Duration::from_secs(1));
        let before = sample();
        disk.requests.add(50);
        disk.bytes_read.add(4_000_000);
        iommu.stale.add(3);
        for _ in 0..98 {
            disk.service.record(Duration::from_micros(30));
        }
        for _ in 0..2 {
            disk.service.record(Duration::from_secs(7));
        }
        let text = table(&sample(), Some((&before, Duration::from_secs(2))));
        assert_eq!(
            cells(&text, 2),
            [
                "blk", "25", "2.0 MB", "0 B", "33 us", "longer", "1050", "0", "0", "0", "0"
            ]
        );
        assert_eq!(
            cells(&text, 1),
            [
                "iommu", "0", "0 B", "0 B", "-", "-", "0", "0", "0", "3", "0"
            ]
        );
        let first = table(&before, None);
        assert_eq!(
            cells(&first, 2)[..6],
            ["blk", "-", "-", "-", "1.1 s", "1.1 s"]
        );
        // The daemon has restarted in between.
        let text = table(&before, Some((&sample(), Duration::from_secs(1))));
        assert_eq!(cells(&text, 2)[1], "0");
    }

    #[test]
    fn foreign_counter_files_are_skipped() {
        assert_eq!(Sample::parse(""), None);
        for text in [
            "# HELP x",
            "process_cpu 3",
            "ringfence_x_total{} 3",
            "ringfence_x_total{device=\"blk\" 3",
        ] {
            assert_eq!(Sample::parse(text), None, "{text}");
        }
        let odd = "ringfence_x_total{device=\"blk\"} \
            -3\nringfence_service_seconds_bucket{device=\"blk\",le=\"many\"} 3\n";
        let text = table(&Sample::parse(odd).unwrap(), None);
        assert_eq!(cells(&text, 1)[6], "0");
    }
}
