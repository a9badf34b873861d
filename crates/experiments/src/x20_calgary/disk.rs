//! The disk workload of the slides, ffsb (CG16). They print no figure of it: "disk I/O [was]
//! comparable" to the network.
//!
//! Expected, written before the first run. "Comparable" is read as the printed limits of the
//! network from the sizes that the link limits: less than 5% of throughput lost, and up to 30%, 60%
//! and 40% more processor use on bare metal, in dom0 and behind a driver domain.
//!
//! A command reads or writes pages that are not adjacent, as the page cache has them, by a
//! scatterlist. The cycles of the layer are measured for lists of each length. The disks, and the
//! native work of a command, are assumed.

use ringfence_lab::{LabError, Profile};
use ringfence_trace::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Op, OpKind, SegmentSpan};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use super::machine::{CLOCK, COPY_PER_BYTE, Scenario};
use super::modes::{ModeCost, cost_of};
use super::{BARELY, NATIVE_FACTORS};
use crate::figure::{Figure, Series};
use crate::finding::{FindingRow, Findings, Measured, NullModel, Published};

/// Pages of a command: a block of ffsb, up to the largest request of Linux's SCSI layer.
const PAGES: [u64; 6] = [1, 2, 4, 8, 16, 32];
/// Pages of the commands with rows: random and sequential access.
const PRINTED: [u64; 2] = [1, 32];
const PAGE: u64 = 4096;
/// Commands that the controller holds. Assumed.
const DEPTH: u64 = 32;
/// Disks of the x366, each with 200 random commands and 70 MB in a second. Assumed.
const DISKS: f64 = 6.0;
const COMMANDS: f64 = 200.0;
const BYTES: f64 = 70e6;
/// Native cycles of a command without its copy: 20 us for file system, block layer, driver and
/// interrupt. Assumed.
const COMMAND_CYCLES: f64 = CLOCK * 20e-6;

/// Throughput and use of processors.
#[derive(Debug, Clone, Copy)]
struct DiskRate {
    megabytes: f64,
    busy: f64,
}

/// Returns the rate of commands of `pages` pages. A command takes `added` cycles in the DMA API of
/// the domain that drives the controller.
fn rate(scenario: Scenario, pages: u64, added: f64, native_factor: f64) -> DiskRate {
    let bytes = (pages * PAGE) as f64;
    let native = native_factor * (COMMAND_CYCLES + COPY_PER_BYTE * bytes);
    let [driver, guest] = scenario.work();
    let work = [driver * native + added, guest * native];
    // The disks seek for a single page, and stream larger commands.
    let disks = if pages == 1 {
        DISKS * COMMANDS
    } else {
        DISKS * BYTES / bytes
    };
    let commands = disks.min(CLOCK / work[0].max(work[1]));
    DiskRate {
        megabytes: commands * bytes / 1e6,
        busy: commands * (work[0] + work[1]) / CLOCK,
    }
}

/// Returns the loss of throughput and the additional processor use, in percent.
fn overhead(scenario: Scenario, pages: u64, added: f64, native_factor: f64) -> [f64; 2] {
    let off = rate(scenario, pages, 0.0, native_factor);
    let on = rate(scenario, pages, added, native_factor);
    [
        100.0 * (1.0 - on.megabytes / off.megabytes),
        100.0 * (on.busy / off.busy - 1.0),
    ]
}

/// Commands of `pages` pages each, half of them reads, with [`DEPTH`] in flight.
fn traffic(pages: u64, commands: u64) -> Result<Chunk, LabError> {
    let mut chunk = Chunk::default();
    for command in 0..commands + DEPTH {
        let id = MappingId((command % DEPTH) as u32);
        let op = |at: u64, kind| Op {
            time: Nanos(1_000_000 + command * 100_000 + at),
            device: DeviceIndex(0),
            cpu: 0,
            lines: 1,
            kind,
        };
        if command >= DEPTH {
            chunk.ops.push(op(0, OpKind::Unmap { id }));
        }
        let segments = SegmentSpan {
            first: chunk.segments.len() as u32,
            count: pages as u32,
        };
        // Neighbours of a list are two pages apart, and a command uses the pages of the one
        // `2 * DEPTH` before it.
        let begin = 512 + command % (2 * DEPTH) * 2 * pages;
        for page in 0..pages {
            let piece = PhysRange::new(PhysAddr::new((begin + 2 * page) * PAGE), PAGE);
            let piece = piece.ok_or(LabError::Internal("a buffer"))?;
            chunk.segments.push(piece);
        }
        let direction = match command % 2 {
            0 => Direction::FromDevice,
            _ => Direction::ToDevice,
        };
        let map = OpKind::Map {
            id,
            direction,
            class: MapClass::Sg,
            flags: MapFlags::NONE,
            segments,
        };
        chunk.ops.push(op(50_000, map));
    }
    Ok(chunk)
}

/// Returns the cost of a command of each size in a mode. About `pages_in_all` pages move.
fn costs(
    mode: &str,
    profile: &Profile,
    pages_in_all: u64,
    repetitions: usize,
) -> Result<[ModeCost; PAGES.len()], LabError> {
    let mut costs = Vec::new();
    for pages in PAGES {
        let commands = (pages_in_all / pages).max(2 * DEPTH);
        let chunk = traffic(pages, commands)?;
        costs.push(cost_of(mode, profile, &chunk, repetitions)?);
    }
    let costs = costs.try_into();
    costs.map_err(|_| LabError::Internal("a cost for each size"))
}

/// The reading of "comparable", in percent.
fn comparable(value: f64) -> Published {
    let source =
        "slides, \"Performance Results\": disk I/O comparable; read as the network's limit";
    Published::new("comparable", value, source).rounded_by(0.0)
}

/// Adds the rows and the figures of the disk workload.
pub(super) fn add(
    found: &mut Findings,
    profile: &Profile,
    pages_in_all: u64,
    repetitions: usize,
) -> Result<(), LabError> {
    let of = |scenario: Scenario| costs(scenario.mode(), profile, pages_in_all, repetitions);
    let [native, dom0] = [of(Scenario::BareMetal)?, of(Scenario::DirectAccess)?];
    for scenario in Scenario::ALL {
        // dom0 drives the controller in both of Xen's scenarios.
        let costs = match scenario {
            Scenario::BareMetal => native,
            Scenario::DirectAccess | Scenario::DriverDomain => dom0,
        };
        let most_busy = match scenario {
            Scenario::BareMetal => 30.0,
            Scenario::DirectAccess => 60.0,
            Scenario::DriverDomain => 40.0,
        };
        let lines = |value: fn(DiskRate) -> f64| {
            let line = |name: &str, added: [f64; PAGES.len()]| {
                let points = PAGES.into_iter().zip(added);
                let points = points.map(|(pages, added)| {
                    (
                        (pages * PAGE) as f64,
                        value(rate(scenario, pages, added, 1.0)),
                    )
                });
                Series::line(name, points.collect())
            };
            let on = costs.map(|cost| cost.cycles());
            vec![line("IOMMU off", [0.0; PAGES.len()]), line("IOMMU on", on)]
        };
        let x = "bytes of a command";
        let name = scenario.name();
        let figure = |metric: &str, y, lines| {
            Figure::logarithmic(format!("disk, {name}: {metric}"), x, y, lines)
        };
        found
            .figures
            .push(figure("Throughput", "MB/s", lines(|rate| rate.megabytes)));
        let busy = lines(|rate| 100.0 * rate.busy);
        found
            .figures
            .push(figure("CPU use", "% of a processor", busy));
        for (pages, cost) in PAGES.into_iter().zip(costs) {
            if !PRINTED.contains(&pages) {
                continue;
            }
            let kind = match pages {
                1 => "random".to_owned(),
                _ => format!("sequential, {} KiB", pages * PAGE / 1024),
            };
            let row = |what: &str, unit: &'static str, value: Measured| {
                FindingRow::new(format!("disk, {name}, {kind}: {what}"), unit, value)
            };
            let crossings = Measured::counted(cost.crossed);
            found.push(row("crossings per command and direction", "", crossings));
            for factor in NATIVE_FACTORS {
                let [lost, more] = overhead(scenario, pages, cost.cycles(), factor);
                let spread = 100.0 * cost.spread / COMMAND_CYCLES;
                let value = |value| Measured::timed(value, 0.0).with_spread(spread);
                let (lost, more) = (value(lost), value(more));
                if factor == 1.0 {
                    let null = || NullModel::exactly(0.0);
                    let lost = row("throughput lost", "%", lost).at_most(comparable(BARELY));
                    found.push(lost.with_null_model(null()));
                    let more = row("more processor use", "%", more).at_most(comparable(most_busy));
                    found.push(more.with_null_model(null()));
                } else {
                    let with = format!("with native work x{factor}");
                    found.push(row(&format!("throughput lost, {with}"), "%", lost));
                    found.push(row(&format!("more processor use, {with}"), "%", more));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each entry of a list crosses to Xen by itself, and the unmap of a list flushes once.
    #[test]
    fn a_list_crosses_entry_by_entry_and_flushes_once() {
        let profile = Profile::r210_2015();
        for (pages, crossings) in [(1, 2.0), (32, 64.0)] {
            let chunk = traffic(pages, 128).unwrap();
            for (mode, crossed, flushed) in [("xen", crossings, 1.0), ("calgary-lazy", 0.0, 0.0)] {
                let cost = cost_of(mode, &profile, &chunk, 0).unwrap();
                assert_eq!((cost.crossed, cost.flushed), (crossed, flushed), "{mode}");
            }
        }
    }

    /// Rows and figures of each scenario are those of its mode: Linux as merged on bare metal, and
    /// the straightforward hypercalls of dom0 in both of Xen's scenarios.
    #[test]
    fn rows_and_plots_follow_from_the_mode_of_each_scenario() {
        use crate::finding::Requirement;
        let profile = crate::x20_calgary::machine::profile(&Profile::r210_2015());
        let mut found = Findings::with_method("test");
        add(&mut found, &profile, 512, 0).unwrap();
        let row = |what: &str| found.rows.iter().find(|row| row.quantity == what).unwrap();
        let mut figures = found.figures.iter();
        let sizes = [1, 2, 4, 8, 16, 32];
        for (scenario, mode, most_busy) in [
            (Scenario::BareMetal, "calgary-lazy", 30.0),
            (Scenario::DirectAccess, "xen", 60.0),
            (Scenario::DriverDomain, "xen", 40.0),
        ] {
            let costs = costs(mode, &profile, 512, 0).unwrap();
            let added = costs.map(|cost| cost.measured + cost.flushes + cost.crossings);
            let name = scenario.name();
            for (metric, y) in [("Throughput", "MB/s"), ("CPU use", "% of a processor")] {
                let line = |name: &str, added: [f64; 6]| {
                    let points = sizes.into_iter().zip(added).map(|(pages, added)| {
                        let rate = rate(scenario, pages, added, 1.0);
                        let value = match metric {
                            "Throughput" => rate.megabytes,
                            _ => 100.0 * rate.busy,
                        };
                        ((4096 * pages) as f64, value)
                    });
                    Series::line(name, points.collect())
                };
                let figure = figures.next().unwrap();
                assert_eq!(figure.title, format!("disk, {name}: {metric}"));
                assert_eq!(figure.y, y);
                let lines = [line("IOMMU off", [0.0; 6]), line("IOMMU on", added)];
                assert_eq!(figure.series, lines, "{}", figure.title);
            }
            for (kind, index) in [("random", 0), ("sequential, 128 KiB", 5)] {
                let of = format!("disk, {name}, {kind}: ");
                let crossed = row(&format!("{of}crossings per command and direction"));
                assert_eq!(crossed.measured.unwrap().median, costs[index].crossed);
                for (factor, with) in [(0.5, "0.5"), (1.0, ""), (2.0, "2")] {
                    let off = rate(scenario, sizes[index], 0.0, factor);
                    let on = rate(scenario, sizes[index], added[index], factor);
                    let lost = 100.0 * (1.0 - on.megabytes / off.megabytes);
                    let more = 100.0 * (on.busy / off.busy - 1.0);
                    for (what, value, limit) in [
                        ("throughput lost", lost, 5.0),
                        ("more processor use", more, most_busy),
                    ] {
                        let what = match with {
                            "" => format!("{of}{what}"),
                            _ => format!("{of}{what}, with native work x{with}"),
                        };
                        let row = row(&what);
                        let off = row.measured.unwrap().median - value;
                        assert!(off.abs() < 1e-9, "{row:?}, not {value}");
                        if with.is_empty() {
                            let printed = row.published.as_ref().unwrap().value;
                            let judged = (row.requirement, printed);
                            assert_eq!(judged, (Requirement::AtMost, limit), "{what}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_disks_limit_until_a_processor_does() {
        let bare = Scenario::BareMetal;
        // 1200 commands of a page, or 420 MB, in a second.
        assert!((rate(bare, 1, 0.0, 1.0).megabytes - 1200.0 * 4096e-6).abs() < 1e-9);
        assert!((rate(bare, 32, 0.0, 1.0).megabytes - 420.0).abs() < 1e-9);
        // The disks hide what the IOMMU costs; the processor does not.
        let [lost, more] = overhead(bare, 32, 50_000.0, 1.0);
        assert_eq!(lost, 0.0);
        // 50,000 cycles of 63,200 and a copy of 131,072.
        assert!((more - 100.0 * 50_000.0 / 194_272.0).abs() < 1e-6, "{more}");
        // A processor that is busy with other work limits, too.
        let [lost, _] = overhead(bare, 32, 1e6, 4.0);
        assert!(lost > 20.0, "{lost}");
    }
}
