//! X15: message sizes on brcm, and numbers of clients on mlx (EIOVAR section 7, Figs. 11 and 12).

mod messages;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{Memcached, PACKETS_PER_RUN, Workload};

use self::messages::add_message_sizes;
use super::allocators::DrivenAllocator;
use super::capture::Capture;
use super::experiment::Experiment;
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published, Requirement};
use super::published::Sheet;
use super::setting::Setting;
use super::timed::{CountedSteps, TimedReplays, TimedSubject, run_in_turns};
use ringfence_lab::LabError;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X15",
    title: "Message sizes and numbers of clients",
    source: "EIOVAR section 7, Figs. 11 and 12",
    measure,
};

const CLIENTS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Receptions for each interrupt of mlx.
const RX_FRAMES: u32 = NicProfile::MLX.rx_frames;

/// Runs for each number of clients. Rings mix only over a long history (decision 0011).
const HISTORY: usize = 24;

/// Results of the last of several runs.
#[derive(Default)]
struct LastRun {
    /// Cycles per received frame beyond those without protection, in each mode.
    extra: Vec<Measured>,
    /// Mean search steps in `strict`.
    steps: f64,
    /// The subjects whose cycles `extra` has.
    #[cfg(test)]
    subjects: Vec<TimedSubject>,
}

/// Makes `runs` runs on one interface in each of `modes`, each timed `repetitions` times.
fn last_of<W: Workload>(
    setting: &Setting,
    mut capture: Capture<W>,
    modes: &[&str],
    (runs, repetitions): (usize, usize),
) -> Result<LastRun, LabError> {
    let timed = |mode: &&str| {
        TimedReplays::new(
            TimedSubject::from_name(mode)?,
            &setting.profile,
            repetitions,
        )
    };
    let mut timed = modes.iter().map(timed).collect::<Result<Vec<_>, _>>()?;
    let mut driven = DrivenAllocator::new(None, 1)?;
    let mut last = LastRun::default();
    for _ in 0..runs.max(2) {
        let run = capture.run()?;
        last.steps = driven.run(&run.plan, |_| {})?.mean_steps();
        // Per received frame, including its share of the acknowledgements.
        let frames = run.traffic.received.max(1) as f64;
        let costs = run_in_turns(&mut timed, &run, CountedSteps::All)?;
        #[cfg(test)]
        {
            let ran = costs.iter().filter_map(|cost| cost.subject.clone());
            last.subjects = ran.collect();
        }
        let of_frame = costs.into_iter().map(|cost| {
            let modelled = cost.invalidations as f64 * setting.profile.invalidation_cycles as f64;
            let cost_of_frame = Measured::cost(cost.measured / frames, modelled / frames, 0.0);
            cost_of_frame.with_spread(cost.spread / frames)
        });
        last.extra = of_frame.collect();
    }
    Ok(last)
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    found(setting, PACKETS_PER_RUN)
}

fn found(setting: &Setting, packets: u64) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "Fig. 11: brcm stream with messages of 64 bytes to 16 KB; a message below 1460 bytes is \
        one packet (decision 0011). A packet costs its cycles without protection plus its maps and \
        unmaps. The core, the packet rate of the port and the wire limit throughput. Fig. 12: \
        Memcached on mlx with 1 to 32 clients, each on a new interface for 24 runs, of which the \
        last is shown.",
    );
    add_message_sizes(setting, packets, &mut found)?;
    clients(setting, packets, &mut found)?;
    found.note(
        "Fitted: the cycles per packet without protection, once for each figure. Fig. 11: to the 4 \
        Gbit/s of strict with large messages (E14). Fig. 12: to the throughput of strict+ over \
        none on Memcached (rIOMMU Table 2, 0.83 / 1.19), at 32 clients. The rows with gathered \
        messages fit two numbers, the cycles per packet and per message: to the 4 Gbit/s, and to \
        the packet rate at 64 bytes. That rate is not printed: it is \"less than half\" of 5.7 \
        million packets per second (E16, E17). Half is an upper bound, as is the rate that it \
        predicts at 256 bytes. All other numbers are predictions.",
    );
    found.note(
        "The paper prints only anchors of these figures: 256 bytes, 4 Gbit/s, \"up to 5.5x\". The \
        points of its curves have no printed numbers.",
    );
    Ok(found)
}

/// Modes of Fig. 12.
const BOTH: [&str; 2] = ["strict", "strict+"];

/// Runs Memcached with `count` clients in [`BOTH`] modes.
fn of_clients(setting: &Setting, count: u32, packets: u64) -> Result<LastRun, LabError> {
    let workload = Memcached::new(count, 1);
    let capture = Capture::with(NicProfile::MLX, workload, RX_FRAMES, packets)?;
    let amount = (setting.history.min(HISTORY), setting.repetitions.min(2));
    last_of(setting, capture, &BOTH, amount)
}

fn clients(setting: &Setting, packets: u64, found: &mut Findings) -> Result<(), LabError> {
    let mut costs = Vec::new();
    for count in CLIENTS {
        let last = of_clients(setting, count, packets)?;
        costs.push((count, last.extra, last.steps));
    }
    let table = Sheet::named("riommu_table2")?;
    let ratio = |baseline: &str| {
        let wanted = [
            ("nic", "mlx"),
            ("benchmark", "memcached"),
            ("metric", "throughput"),
            ("variant", "riommu"),
            ("divided_by", baseline),
        ];
        table.printed(&wanted, "value").map(|cell| cell.value)
    };
    let none_over_strict_plus = ratio("strict+")? / ratio("none")?;
    let (_, at_32, _) = costs.last().ok_or(LabError::Internal("no clients"))?;
    let c_none = none_cycles(at_32[1].median, none_over_strict_plus);
    let row = FindingRow::new(
        "Memcached on mlx: cycles per frame without protection",
        "cycles",
        Measured::cost(0.0, c_none, 0.0),
    );
    found.push(row.fitted());
    let (mut gain, mut searches) = (Vec::new(), Vec::new());
    for (count, of_count, steps) in &costs {
        let [strict, plus] = of_count[..] else {
            return Err(LabError::Internal("two modes"));
        };
        for (mode, cost) in BOTH.into_iter().zip([strict, plus]) {
            let what = format!("{count} clients: {mode}, additional cycles per frame");
            found.push(FindingRow::new(what, "cycles", cost));
        }
        let factor = factor(c_none, strict.median, plus.median);
        gain.push((f64::from(*count), factor));
        searches.push((f64::from(*count), *steps));
        let what = format!("{count} clients: strict, search steps");
        found.push(FindingRow::counted(what, "", *steps));
        let what = format!("{count} clients: throughput, strict EIOVAR / baseline");
        let spread = strict.spread / (c_none + strict.median);
        let row = FindingRow::new(what, "", Measured::timed(factor, spread));
        found.push(match count {
            32 => {
                let printed = Sheet::named("claims")?.printed(&[("id", "E18")], "value")?;
                row.overhead(printed, NullModel::RATIO)
            }
            _ => row,
        });
    }
    found.figures.push(Figure::logarithmic(
        "Memcached by number of clients, mlx: EIOVAR over baseline, strict (Fig. 12, \
        left)",
        "clients",
        "throughput relative to the baseline",
        vec![Series::line("strict", gain)],
    ));
    found.figures.push(Figure::logarithmic(
        "Memcached by number of clients, mlx: search for an address (Fig. 12, right)",
        "clients",
        "steps",
        vec![Series::line("strict baseline", searches)],
    ));
    long_histories(setting, packets, found)?;
    Ok(())
}

/// Cycles of a frame without protection, to which protection adds `extra`, if throughput without it
/// is `ratio` times that with it.
fn none_cycles(extra: f64, ratio: f64) -> f64 {
    extra / (ratio - 1.0)
}

/// Throughput with `plus` over that with `strict`, the cycles that each adds to the `c_none` of a
/// frame.
fn factor(c_none: f64, strict: f64, plus: f64) -> f64 {
    (c_none + strict) / (c_none + plus)
}

/// Numbers of clients whose search is counted over a long history.
const LONG: [u32; 4] = [1, 4, 16, 32];
/// Maximum completions per interrupt: the default, and one.
const INTERRUPTS: [u32; 2] = [RX_FRAMES, 1];

/// Counts the search after a long history, untimed (decision 0011). EIOVAR states that concurrency
/// amplifies the interference between rings.
fn long_histories(setting: &Setting, packets: u64, found: &mut Findings) -> Result<(), LabError> {
    let wanted = [
        ("nic", "mlx"),
        ("metric", "search_len"),
        ("protection", "strict"),
        ("benchmark", "memcached"),
    ];
    let with_16 = Sheet::named("eiovar_table2")?.printed(&wanted, "baseline")?;
    let (mut series, mut directions) = (Vec::new(), Vec::new());
    for burst in INTERRUPTS {
        let mut last = Vec::new();
        for count in LONG {
            let workload = Memcached::new(count, 1);
            let mut capture = Capture::with(NicProfile::MLX, workload, burst, packets)?;
            let mut driven = DrivenAllocator::new(None, 1)?;
            let mut points = Vec::new();
            for number in 0..(setting.history / 2).max(2) {
                let counts = driven.run(&capture.run()?.plan, |_| {})?;
                points.push((number as f64 + 1.0, counts.mean_steps()));
            }
            let steps = points.last().map_or(0.0, |(_, steps)| *steps);
            let runs = points.len();
            let what = format!(
                "bursts of at most {burst}, {count} clients, run {runs}: strict, search steps"
            );
            let row = FindingRow::counted(what, "", steps);
            found.push(match count {
                16 => row.with_published(with_16.clone()),
                _ => row,
            });
            last.push(steps);
            series.push(Series::line(
                format!("bursts of {burst}, {count} clients"),
                points,
            ));
        }
        if let [one, four, sixteen, most] = last[..] {
            let steps = format!(
                "{one:.0} steps with one client, {four:.0} with 4, {sixteen:.0} with 16 and \
                {most:.0} with 32"
            );
            let direction = trend(&last);
            directions.push(direction);
            found.explain(match burst {
                RX_FRAMES => format!(
                    "Clients and the search: each turn from receiving to sending costs one \
                    exchange of addresses between rings (X11) and one search for it. A turn here \
                    has one frame per client, because the server is interrupted when all clients \
                    wait. With the number of clients, the search {direction}: {steps}. In the \
                    paper, the cost of an allocation grows \"proportionally to the number of \
                    clients\"; it has {} steps with 16 clients after 150 runs of 20 seconds (Table \
                    2).",
                    with_16.text
                ),
                _ => format!(
                    "With an interrupt at every completion, a turn is one frame for any number of \
                    clients, and the search {direction}: {steps}. The paper does not print how its \
                    adapter coalesced interrupts; the timed rows use the default (decision 0011)."
                ),
            });
            let row = FindingRow::counted(
                format!(
                    "bursts of at most {burst}, 32 clients over 1, after that history: strict, \
                    search steps"
                ),
                "",
                most / one.max(1.0),
            );
            let printed = Published::new(
                "amplified",
                1.0,
                "EIOVAR section 7, in words: concurrency amplifies the interference",
            );
            let row = row.with_published(printed);
            found.push(match burst {
                RX_FRAMES => row.require(Requirement::Above),
                _ => row,
            });
        }
    }
    if let [long, short] = directions[..] {
        found.explain(by_turn(long, short));
    }
    found.figures.push(Figure::linear(
        "Memcached by history, mlx: search for an address",
        "run",
        "steps",
        series,
    ));
    Ok(())
}

/// Returns the verb for the search lengths `steps`, by increasing number of clients.
fn trend(steps: &[f64]) -> &'static str {
    if steps.is_sorted_by(|fewer, more| more > fewer) {
        "grows"
    } else if steps.is_sorted_by(|fewer, more| more < fewer) {
        "falls"
    } else {
        "neither grows nor falls throughout"
    }
}

/// Compares the directions of the search with turns of one frame per client (`long`) and of one
/// frame (`short`).
fn by_turn(long: &str, short: &str) -> String {
    if long == short {
        format!("The length of a turn does not change the direction: with both, the search {long}.")
    } else {
        format!(
            "The length of a turn determines the direction: the search {long} with turns of one \
            frame per client, and {short} with turns of one frame."
        )
    }
}

#[cfg(test)]
mod tests;
