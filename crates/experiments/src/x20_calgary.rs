//! X20: Calgary's cost on bare metal, in dom0 and behind a driver domain, and the remedies of the
//! slides (CG15 to CG17).
//!
//! Expected, written before the first run. The slides give ranges and words; the interpretation of
//! words is fixed here.
//!
//! | scenario | throughput | processor |
//! |---|---|---|
//! | bare metal | "barely affected": less than 5% | 15% to 30% more |
//! | direct access, below 1024 bytes | up to 45% less | |
//! | direct access, from 1024 bytes | "barely affected": less than 5% | 40% to 60% more |
//! | driver domain, below 512 bytes | up to 15% less | |
//! | driver domain, from 512 bytes | "barely affected": less than 5% | up to 40% more |
//!
//! Remedies: multicalls do not help (as many crossings). A whole-guest map costs nothing at run
//! time (less than 1%), and isolates guests and not the buffers of a guest. The straightforward
//! calls have the best isolation (no access outside live mappings). A cache of mappings "saves the
//! hypervisor crossing": at most one crossing of a pair remains, while the cache fills. Mappings
//! that are never freed cross as rarely and stay reachable. Persistent mappings cross only when the
//! driver opens the device. A batch API crosses less than once for each buffer.
//!
//! The disk workload has its expectations in `disk.rs`.
//!
//! Measured are the cycles of the DMA layer and of the hypervisor's checks and table. Modelled are
//! crossings, flushes, and the native work of a message ([`machine`]).

mod design_axes;
mod disk;
mod drivers;
mod emulation;
mod interfaces;
mod machine;
mod modes;
mod remedies;

use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published};
use super::published::Sheet;
use emulation::EXIT;
use machine::models::VirtualIo;
use machine::{MESSAGES, PAIRS_PER_FRAME, Scenario, profile, rate};
use modes::{ModeCost, costs};
use remedies::REMEDIES;
use ringfence_lab::LabError;
use ringfence_lab::Profile;

/// Interpretation of "barely affected" and "mostly the same", in percent.
const BARELY: f64 = 5.0;
/// Frames of an interrupt in the coalesced variant of the emulated adapter: `mlx4_en`'s target.
const COALESCED: u32 = 44;
/// Frames that the emulated adapter receives.
const EMULATED_FRAMES: u64 = 2000;
/// Multiples of the assumed native cost, to show how far the results depend on it.
const NATIVE_FACTORS: [f64; 3] = [0.5, 1.0, 2.0];

/// Loss of throughput and additional use of processors, in percent, of a scenario with the IOMMU.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Overhead {
    lost: f64,
    more: f64,
}

fn overhead(scenario: Scenario, message: u64, added: f64, factor: f64) -> Overhead {
    let off = rate(scenario, message, 0.0, factor);
    let on = rate(scenario, message, added, factor);
    Overhead {
        lost: 100.0 * (1.0 - on.mbps / off.mbps),
        more: 100.0 * (on.busy / off.busy - 1.0),
    }
}

/// Returns the largest value of `of` over the messages that `chosen` accepts.
fn most(chosen: impl Fn(u64) -> bool, of: impl Fn(u64) -> f64) -> f64 {
    let sizes = MESSAGES.into_iter().filter(|message| chosen(*message));
    sizes.map(of).fold(f64::NEG_INFINITY, f64::max)
}

/// Cycles that the DMA API adds to a frame. Behind a driver domain the crossings of grants exist
/// without an IOMMU too.
fn added(cost: &ModeCost, with_crossings: bool) -> f64 {
    let crossings = if with_crossings { cost.crossings } else { 0.0 };
    PAIRS_PER_FRAME * (cost.measured + cost.flushes + crossings)
}

/// A printed cell: scenario, messages and metric; the number that its words or its range stand for.
fn cell(sheet: &Sheet, of: [&str; 3], value: f64) -> Result<Published, LabError> {
    let wanted = [
        ("scenario", of[0]),
        ("message_size", of[1]),
        ("metric", of[2]),
    ];
    let text = sheet.text(&wanted, "value")?;
    let source = format!("calgary_results.csv: {}, {}, {}", of[0], of[1], of[2]);
    Ok(Published::new(text, value, source).rounded_by(0.0))
}

/// The quantity of a printed cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Metric {
    Throughput,
    Processor,
}

/// The relation of the measured value to the printed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    AtMost,
    AtLeast,
    Near,
}

/// A cell of the slides, and the row that is judged against it.
struct Judgement {
    what: &'static str,
    /// Message sizes, as the sheet names them.
    cell: &'static str,
    chosen: fn(u64) -> bool,
    metric: Metric,
    relation: Relation,
    /// Number that the words or the range of the cell stand for, in percent.
    value: f64,
    /// True if the scenarios' rows have the order of the printed ones.
    ordered: bool,
}

/// Returns the cells about a scenario.
#[rustfmt::skip]
fn judgements(scenario: Scenario) -> Vec<Judgement> {
    use {Metric::{Processor, Throughput}, Relation::{AtLeast, AtMost, Near}};
    type Sizes = fn(u64) -> bool;
    let (all, small, large): (Sizes, Sizes, Sizes) = (|_| true, |m| m < 1024, |m| m >= 1024);
    let (below_512, from_512): (Sizes, Sizes) = (|m| m < 512, |m| m >= 512);
    let reaches = "more processor use reaches the printed range";
    let rows = match scenario {
        Scenario::BareMetal => vec![
            ("throughput lost, at most", "all", all, Throughput, AtMost, BARELY, false),
            ("more processor use, at most", "all", all, Processor, AtMost, 30.0, true),
            (reaches, "all", all, Processor, AtLeast, 15.0, false),
        ],
        Scenario::DirectAccess => vec![
            ("throughput lost below 1024 bytes", "msg<1024", small, Throughput, Near, 45.0, true),
            ("throughput lost from 1024 bytes", "msg>=1024", large, Throughput, AtMost, BARELY,
                false),
            ("more processor use from 1024 bytes", "msg>=1024", large, Processor, AtMost, 60.0,
                true),
            (reaches, "msg>=1024", large, Processor, AtLeast, 40.0, false),
        ],
        Scenario::DriverDomain => vec![
            ("throughput lost below 512 bytes", "msg<512", below_512, Throughput, Near, 15.0,
                true),
            ("throughput lost from 512 bytes", "msg>=512", from_512, Throughput, AtMost, BARELY,
                false),
            ("more processor use from 512 bytes", "msg>=512", from_512, Processor, Near, 40.0,
                true),
        ],
    };
    let judgement = |(what, cell, chosen, metric, relation, value, ordered)| Judgement {
        what, cell, chosen, metric, relation, value, ordered,
    };
    rows.into_iter().map(judgement).collect()
}

/// The scenarios' rows, judged against the slides.
fn scenarios(
    found: &mut Findings,
    costs: &[(Scenario, ModeCost)],
    sheet: &Sheet,
) -> Result<(), LabError> {
    for (scenario, cost) in costs {
        let (scenario, name) = (*scenario, scenario.name());
        let added = added(cost, true);
        let spread = 100.0 * PAIRS_PER_FRAME * cost.spread / machine::FRAME_CYCLES;
        let row = |what: &str, value: f64| {
            let value = Measured::timed(value, 0.0).with_spread(spread);
            FindingRow::new(format!("{name}: {what}"), "%", value)
        };
        for judgement in judgements(scenario) {
            let (metric, order) = match judgement.metric {
                Metric::Throughput => ("throughput", "throughput lost"),
                Metric::Processor => ("cpu utilisation", "processor"),
            };
            let measured = most(judgement.chosen, |message| {
                let overhead = overhead(scenario, message, added, 1.0);
                match judgement.metric {
                    Metric::Throughput => overhead.lost,
                    Metric::Processor => overhead.more,
                }
            });
            let printed = cell(sheet, [name, judgement.cell, metric], judgement.value)?;
            let row = row(judgement.what, measured);
            let row = match judgement.relation {
                Relation::AtMost => row.at_most(printed),
                Relation::AtLeast => row.at_least(printed),
                Relation::Near => row.near(printed),
            };
            let row = row.with_null_model(NullModel::exactly(0.0));
            found.push(if judgement.ordered {
                row.ordered_within(order)
            } else {
                row
            });
        }
        for factor in NATIVE_FACTORS {
            let lost = most(|_| true, |m| overhead(scenario, m, added, factor).lost);
            let more = most(|_| true, |m| overhead(scenario, m, added, factor).more);
            let with = format!("with native work x{factor}");
            found.push(row(&format!("throughput lost, {with}"), lost));
            found.push(row(&format!("more processor use, {with}"), more));
        }
        for (metric, y) in [("Throughput", "Mb/s"), ("CPU use", "% of a processor")] {
            found.figures.push(plot(scenario, added, metric, y));
        }
    }
    Ok(())
}

/// A plot of the slides: IOMMU off and on over the message sizes.
fn plot(scenario: Scenario, added: f64, metric: &str, y: &'static str) -> Figure {
    let line = |name: &str, added: f64| {
        let points = MESSAGES.map(|message| {
            let rate = rate(scenario, message, added, 1.0);
            let value = match metric {
                "Throughput" => rate.mbps,
                _ => 100.0 * rate.busy,
            };
            (message as f64, value)
        });
        Series::line(name, points.to_vec())
    };
    let title = format!("{}: {}", scenario.name(), metric);
    let lines = vec![line("IOMMU off", 0.0), line("IOMMU on", added)];
    Figure::logarithmic(title, "message size (bytes)", y, lines)
}

/// The models of virtual I/O, for contrast: the slides do not compare with them. Emulation has a
/// row for each end of the range of an exit's cost.
fn virtual_io(found: &mut Findings, by_remedy: &[(&str, ModeCost)]) -> Result<(), LabError> {
    let of = |name: &str| {
        let found = by_remedy.iter().find(|(remedy, _)| *remedy == name);
        found.map(|(_, cost)| cost)
    };
    let straight = of("straightforward hypercalls");
    let straight = straight.ok_or(LabError::Internal("a remedy without a cost"))?;
    let added = added(straight, true);
    for model in VirtualIo::ALL {
        if let Some(attacked) = model.attacked().and_then(of) {
            let name = model.name();
            let what = format!("model {name}: attackers' accesses let through");
            found.push(FindingRow::counted(what, "", attacked.reached as f64));
        }
    }
    let mut push = |what: String, unit: &'static str, value: f64| {
        found.push(FindingRow::new(what, unit, Measured::timed(value, 0.0)));
    };
    let mut rows = |of: String, rate: machine::Rate| {
        push(format!("{of}: throughput at 1460 bytes"), "Mb/s", rate.mbps);
        let busy = 100.0 * rate.busy;
        let what = format!("{of}: processor use at 1460 bytes");
        push(what, "% of a processor", busy);
    };
    let mut counted = Vec::new();
    for coalesced in [1, COALESCED] {
        counted.push((coalesced, emulation::count(coalesced, EMULATED_FRAMES)?));
    }
    let mut shares = [0.0; 2];
    for (share, (_, exits)) in shares.iter_mut().zip(&counted) {
        *share = exits.per_frame() * EXIT[0];
    }
    for model in VirtualIo::ALL {
        let of = format!("model {}", model.name());
        if model != VirtualIo::Emulation {
            rows(of, model.rate(1460, added, 0.0));
            continue;
        }
        for (coalesced, exits) in &counted {
            for cycles in EXIT {
                let rate = model.rate(1460, added, exits.per_frame() * cycles);
                let with =
                    format!("{of}, {coalesced} frames an interrupt, {cycles} cycles an exit");
                rows(with, rate);
            }
        }
    }
    for (coalesced, exits) in counted {
        let what = format!("emulation, {coalesced} frames an interrupt: exits of a frame");
        found.push(FindingRow::counted(what, "", exits.per_frame()));
    }
    let per_bit = |model: VirtualIo, exits: f64| {
        let rate = model.rate(1460, added, exits);
        rate.busy / rate.mbps
    };
    let front = per_bit(VirtualIo::FrontBack, 0.0);
    let [single, joined] = shares.map(|exits| per_bit(VirtualIo::Emulation, exits) / front);
    found.explain(format!(
        "The exits of emulation are counted in the model of a network adapter; the registers of an \
        interrupt are those of Linux's e1000. The cost of an exit is a range: 2000 cycles, its \
        direct cost, and ten times that with indirect and synchronous costs. With the direct cost, \
        a bit takes {single:.2} times the cycles of front and back drivers without coalescing, and \
        {joined:.2} with it.",
    ));
    Ok(())
}

/// Replays `packets` received frames, with `repetitions` timed repetitions, on a machine with the
/// geometry and the crossings of `of`.
///
/// # Errors
/// A replay failed.
pub(super) fn measure(
    of: &Profile,
    packets: u64,
    repetitions: usize,
) -> Result<Findings, LabError> {
    let profile = profile(of);
    let frames = packets.min(16384);
    let mut found = Findings::with_method(format!(
        "{frames} received frames through the DMA layer of each mode, and behind Xen through the \
        hypervisor's code, with an oracle and attackers. A scenario's rate follows from these \
        cycles, from {} cycles for each crossing and {} for each flush, and from a declared native \
        cost of a frame: 1 GHz for 1 Gb/s, times Menon et al.'s shares for dom0 and a guest. The \
        rest is modelled: nothing here runs Xen, a link, or TCP.",
        profile.hypercall_cycles, profile.invalidation_cycles,
    ));
    let sheet = Sheet::named("calgary_results")?;
    let by_scenario = Scenario::ALL.map(|scenario| (scenario, scenario.mode()));
    let by_scenario = costs(by_scenario, &profile, frames, repetitions)?;
    scenarios(&mut found, &by_scenario, &sheet)?;
    let by_remedy = costs(REMEDIES, &profile, frames, repetitions)?;
    remedies::add(&mut found, &by_remedy);
    remedies::add_drivers(&mut found, &profile, frames)?;
    if let Some((_, straight)) = by_remedy.first() {
        virtual_io(&mut found, &by_remedy)?;
        found.explain(format!(
            "Of the {:.0} cycles that a pair costs dom0, {:.0} are modelled: two crossings and a \
            flush. The slides print neither. Their sum decides how many bytes a message needs to \
            hide it, and the rows with native work x0.5 and x2 show how far the losses depend on \
            the assumed cost of a frame.",
            straight.cycles(),
            straight.modelled(),
        ));
    }
    design_axes::add(&mut found)?;
    interfaces::add(&mut found, &profile)?;
    disk::add(&mut found, &profile, frames, repetitions)?;
    found.explain(
        "Without an IOMMU, a small message behind a driver domain is limited by the guest or by \
        dom0, which have a processor each. The IOMMU's cost is dom0's alone, so a part of it hides \
        behind the guest's work, and the driver domain loses less than direct access.",
    );
    found.note(
        "The slides do not name the machine. Its clock, the register reads of a flush, and the \
        cost of a hypercall are assumed. The size of messages matters only if the sender does not \
        join them.",
    );
    found.note(
        "The slides call the results of the disk workload (ffsb) and of DART comparable, and print \
        neither. The rows of the disk are judged against the network's limits, as the reading of \
        that word. Disks and native work of a command are assumed. DART has no rows.",
    );
    Ok(found)
}

#[cfg(test)]
mod tests;
