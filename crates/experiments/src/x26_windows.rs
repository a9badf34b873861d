//! X26: the window of vulnerability, which EIOVAR section 9 leaves to future work: its lengths in
//! every mode, and the accesses of three attackers.

use std::collections::HashMap;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{BURST, NetperfStream};
use ringfence_trace::{Chunk, Operations, TraceOptions, TraceSource};
use ringfence_types::Nanos;

use super::capture::{CALL_NS, Capture, Run};
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Published};
use super::published::Sheet;
use super::setting::Setting;
use super::x18_fujita::{REQUEST_NS, Requests};
use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::modes::{FlushKind, Mode};
use ringfence_lab::plan::{Plan, Step, TimedStep};
use ringfence_lab::replay::{AttackerKind, Outcomes};

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X26",
    title: "The window between an unmap and its invalidation, under three attackers",
    source: "EIOVAR sections 2 and 9 (future work)",
    measure,
};

const ATTACKERS: [(&str, AttackerKind); 3] = [
    ("passive", AttackerKind::Passive),
    ("replayer", AttackerKind::Replayer),
    ("racer", AttackerKind::Racer),
];

/// Requests before the silence: fewer than fill a queue of 250 or 256.
const BEFORE_SILENCE: u64 = 100;
/// Length of the silence in ticks of 1 ms: twice the timers' 10 ms.
const SILENCE_MS: u64 = 20;
/// Requests after a wrap, to trigger its flush.
const AFTER_WRAP: u64 = 16;

/// A trace with one device. Further devices of a plan have their indices as requester IDs.
fn device() -> Result<Operations<TraceSource>, LabError> {
    let line = "    task-1 [000] ..1.. 1.000000: dma_map_phys: 0000:03:00.0 dir=FROM_DEVICE \
        dma_addr=1000 size=64 phys_addr=1000 attrs=\n";
    let source =
        TraceSource::from_reader("device", std::io::Cursor::new(line.as_bytes().to_vec()))?;
    let mut operations = Operations::new("device", source, TraceOptions::default());
    operations.next_chunk(&mut Chunk::default())?;
    Ok(operations)
}

/// Replays `plans` in `mode` under the oracle and `attackers`.
fn replay<'a>(
    setting: &Setting,
    mode: &Mode,
    attackers: AttackerKind,
    plans: impl Iterator<Item = Result<Plan, LabError>> + 'a,
) -> Result<Outcomes, LabError> {
    let options = CompareOptions {
        modes: vec![mode.clone()],
        profile: setting.profile.clone(),
        devices: None,
        repetitions: 0,
        attack: true,
        attackers,
        ..CompareOptions::default()
    };
    let operations = device()?;
    let mut hostile = runner(mode, &options)?
        .attack
        .ok_or(LabError::Internal("no attack pass"))?;
    for plan in plans {
        hostile.run(&plan?, operations.devices())?;
    }
    Ok(hostile.finish(&[]))
}

/// Longest window in nanoseconds. Spaces that keep mappings have their longest after the trace.
fn longest(outcome: &Outcomes) -> u64 {
    outcome.stale_max_ns.max(outcome.exposure.max_ns)
}

/// 100 requests, one at a time, and silence in which only timers run.
fn silence() -> Result<Plan, LabError> {
    let mut plan = Requests::new()?.take(BEFORE_SILENCE)?.plan;
    let end = plan.steps.last().map_or(Nanos(0), |last| last.time);
    plan.steps.extend((1..=SILENCE_MS).map(|tick| TimedStep {
        time: Nanos(end.0 + tick * 1_000_000),
        step: Step::Tick,
    }));
    Ok(plan)
}

/// Requests over the whole 32-bit space, in parts.
fn wrap() -> Result<impl Iterator<Item = Result<Plan, LabError>>, LabError> {
    let all = (1 << 20) + AFTER_WRAP;
    let mut driver = Requests::new()?;
    Ok((0..all).step_by(1 << 16).map(move |first| {
        let count = (1 << 16).min(all - first);
        Ok(driver.take(count)?.plan)
    }))
}

/// Longest time from the first unmap of a burst to its end, in nanoseconds.
fn longest_burst(run: &Run) -> u64 {
    let mut first = HashMap::new();
    let mut longest = 0;
    for (timed, ring) in run.plan.steps.iter().zip(&run.step_rings) {
        match timed.step {
            Step::Unmap { .. } => {
                first.entry(*ring).or_insert(timed.time);
            }
            Step::EndBurst { .. } => {
                let since = first.remove(ring).unwrap_or(timed.time);
                longest = longest.max(timed.time.since(since));
            }
            Step::Map { .. } | Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => {}
        }
    }
    longest
}

/// Column of `attacks.csv` for a mode.
fn column(mode: &Mode) -> &'static str {
    match mode.flush {
        _ if mode.has_rings() => "riommu",
        FlushKind::Never => "none",
        FlushKind::PerUnmap
        | FlushKind::Burst
        | FlushKind::BurstAsPublished
        | FlushKind::Descriptor
        | FlushKind::TransmitBatch => "strict",
        FlushKind::Deferred
        | FlushKind::DescriptorAsPublished
        | FlushKind::PerCpuQueue
        | FlushKind::PerWrap
        | FlushKind::Optimistic
        | FlushKind::Async => "deferred",
        FlushKind::LastUser => "shared_mapping",
        FlushKind::MapCache | FlushKind::NeverFree | FlushKind::PagePool => "persistent_map",
        FlushKind::PerCycle | FlushKind::PerCycleAdaptive | FlushKind::PerCycleAsPublished => {
            "rtc_30_40s"
        }
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(format!(
        "A run of brcm stream in every mode under the oracle, with each of three attackers. Time \
        is that of the calls: {CALL_NS} ns each, as for a packet without protection. \
        {BEFORE_SILENCE} requests and {SILENCE_MS} ms of silence show the timers; 2^20 maps show a \
        wrap of the bitmap. The oracle measures a window from the return of an unmap to the end of \
        the invalidation that covers it.",
    ));
    let mut capture = Capture::with(
        NicProfile::BRCM,
        NetperfStream::default(),
        BURST,
        setting.packets,
    )?;
    let run = capture.run()?;
    let attacks = Sheet::named("attacks")?;
    for mode in Mode::named() {
        accesses(setting, &mode, &run, &attacks, &mut found)?;
        lengths(setting, &mode, &mut found)?;
    }
    if setting.wraps > 0 {
        wrapped(setting, &mut found)?;
    }
    found.note(
        "The expectations are those of class A02 in attacks.csv, written before the run: V, the \
        attacker gets through; R, it does not; B, only within the stated bound. The passive device \
        keeps to its grants in every mode. The replayer repeats accesses to unmapped addresses; \
        the racer also keeps translations in the IOTLB.",
    );
    found.note(
        "attacks.csv has B for riommu. The fixed rings withhold every buffer until the end of its \
        burst, so they are held to 0; the rings as published are held to one burst.",
    );
    found.note(
        "attacks.csv has B for shared_mapping: until the last user of a page. The oracle counts \
        bytes of a page that another buffer still uses as colocated, not as stale. So `shared` is \
        held to 0.",
    );
    Ok(found)
}

/// Rows of the accesses that each attacker gets through, and of the longest window under the last.
fn accesses(
    setting: &Setting,
    mode: &Mode,
    run: &Run,
    attacks: &Sheet,
    found: &mut Findings,
) -> Result<(), LabError> {
    let name = &mode.name;
    let cell = attacks.text(&[("id", "A02")], column(mode))?;
    let expected = |value| {
        let text = format!("{cell} (A02, {})", column(mode));
        Published::new(text, value, "attacks.csv A02").rounded_by(0.0)
    };
    for (attacker, kind) in ATTACKERS {
        let plan = || match mode.has_rings() {
            true => run.by_ring(),
            false => Plan {
                steps: run.plan.steps.clone(),
                segments: run.plan.segments.clone(),
                ..Plan::default()
            },
        };
        let outcome = replay(setting, mode, kind, std::iter::once(Ok(plan())))?;
        // The oracle counts writes to released buffers of a pool apart.
        let mutable = match mode.flush {
            FlushKind::PagePool => outcome.tally.mutable,
            _ => 0,
        };
        let stale = FindingRow::counted(
            format!("{name}, {attacker}: permitted accesses to buffers after their unmap"),
            "",
            (outcome.tally.stale + mutable) as f64,
        );
        let withholds = matches!(
            mode.flush,
            FlushKind::Burst | FlushKind::Descriptor | FlushKind::TransmitBatch
        );
        // While another buffer shares the mapping, the oracle still has a grant of its bytes.
        let shares = mode.flush == FlushKind::LastUser;
        found.push(match (kind, cell.chars().next()) {
            (AttackerKind::Passive, _) => stale.exact(Published::new(
                "none: it keeps to its grants",
                0.0,
                "the attacker's definition",
            )),
            (_, Some('R')) => stale.exact(expected(0.0)),
            (_, Some('B')) if withholds || shares => stale.exact(expected(0.0)),
            (_, Some('V')) => stale.at_least(expected(1.0)),
            // The unit holds one entry for each ring. The replayer finds it only if the unmapped
            // buffer was the last one accessed; the racer accesses it just before.
            (AttackerKind::Racer, _) => stale.at_least(expected(1.0)),
            _ => stale.with_published(expected(1.0)),
        });
        if kind != AttackerKind::Racer {
            continue;
        }
        let calls = |ns: u64| ns as f64 / CALL_NS as f64;
        let window = FindingRow::counted(
            format!("{name}, stream: longest window in calls"),
            "",
            calls(longest(&outcome)),
        );
        let text = format!("{cell} (A02): until end_of_burst");
        let burst = Published::new(text, calls(longest_burst(run)), "attacks.csv A02, comment");
        found.push(match mode.flush {
            FlushKind::BurstAsPublished => window.exact(burst.clone()),
            _ => window,
        });
        if withholds {
            let delay = FindingRow::counted(
                format!("{name}, stream: longest delay of a release in calls"),
                "",
                calls(outcome.release_delay_max_ns),
            );
            found.push(delay.at_most(burst));
        }
    }
    Ok(())
}

/// Rows of the longest window if the workload falls silent.
fn lengths(setting: &Setting, mode: &Mode, found: &mut Findings) -> Result<(), LabError> {
    let plan = std::iter::once(silence());
    let outcome = replay(setting, mode, AttackerKind::Replayer, plan)?;
    let ns = longest(&outcome);
    let row = |what: &str, unit, value| {
        FindingRow::counted(format!("{}, silence: {what}", mode.name), unit, value)
    };
    let window = row("longest window", "ms", ns as f64 / 1e6);
    let stated = |text: &str, value| Published::new(text, value, "attacks.csv A02, comment");
    match mode.flush {
        FlushKind::PerUnmap
        | FlushKind::Burst
        | FlushKind::Descriptor
        | FlushKind::TransmitBatch
        | FlushKind::LastUser => {
            found.push(window.exact(stated("none", 0.0)));
        }
        // The stated bound of the mode, and the tick of 1 ms at which its timer runs.
        FlushKind::Optimistic => found.push(window.at_most(stated("few ms", 4.0 + 1.0))),
        FlushKind::Deferred | FlushKind::PerCpuQueue => {
            found.push(window.near(stated("10 ms", 10.0)));
        }
        FlushKind::PerCycle => {
            let seconds = || row("longest window", "s", ns as f64 / 1e9);
            found.push(seconds().at_least(stated("30-40 s", 30.0)));
            found.push(seconds().at_most(stated("30-40 s", 40.0)));
        }
        FlushKind::PerCycleAdaptive => {
            let seconds = row("longest window", "s", ns as f64 / 1e9);
            found.push(seconds.at_most(stated("at most that of pviommu+rtc", 40.0)));
        }
        FlushKind::Never
        | FlushKind::PerWrap
        | FlushKind::Async
        | FlushKind::MapCache
        | FlushKind::NeverFree
        | FlushKind::PagePool
        | FlushKind::BurstAsPublished
        | FlushKind::DescriptorAsPublished
        | FlushKind::PerCycleAsPublished => found.push(window),
    }
    Ok(())
}

/// Rows of the longest window over a wrap of the bitmap.
fn wrapped(setting: &Setting, found: &mut Findings) -> Result<(), LabError> {
    let facts = Sheet::named("fujita_facts")?;
    let fact = |name: &str| facts.printed(&[("fact", name)], "value");
    let iops = fact("IOPS of default (1024-B I/O, 1 outstanding)")?.value;
    let mode = Mode::find("bitmap").ok_or(LabError::Internal("mode bitmap"))?;
    let outcome = replay(setting, &mode, AttackerKind::Passive, wrap()?)?;
    let maps = longest(&outcome) as f64 / REQUEST_NS as f64;
    let row = FindingRow::counted("bitmap, one wrap: longest window in maps", "", maps);
    found.push(row.near(fact("maps per wrap")?.read_as(1_048_576.0)));
    let row = FindingRow::counted("bitmap, one wrap: longest window", "s", maps / iops);
    // The time of a map is the paper's, so only the count above is a result.
    found.push(row.near(fact("bitmap flush period")?).fitted());
    found.explain(format!(
        "A window of the bitmap ends with its wrap and with nothing else: after {maps:.0} maps, \
        which are {:.1} s at the paper's {iops:.0} requests a second, and never without maps.",
        maps / iops,
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;

    fn value(found: &crate::Finding, what: &str) -> f64 {
        let row = found.rows.iter().find(|row| row.quantity == what);
        row.and_then(|row| row.measured)
            .unwrap_or_else(|| panic!("{what}"))
            .median
    }

    #[test]
    fn expectations_hold_for_every_mode_and_attacker() {
        let setting = Setting {
            wraps: 0,
            ..Setting::smoke()
        };
        let found = EXPERIMENT.run(&setting).unwrap();
        let failed = found.rows.iter().filter(|row| row.holds == Some(false));
        let failed: Vec<_> = failed
            .map(|row| (&row.quantity, row.measured.map(|measured| measured.median)))
            .collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert_eq!(found.verdict, Verdict::Reproduced);
        for mode in Mode::named() {
            for (attacker, _) in ATTACKERS {
                let what = "permitted accesses to buffers after their unmap";
                value(&found, &format!("{}, {attacker}: {what}", mode.name));
            }
        }
        // The timer ends windows after 10 ms of silence, at a tick; one more would be 11 ms.
        for mode in ["defer", "defer+", "linux-lazy", "virtio-lazy"] {
            let ms = value(&found, &format!("{mode}, silence: longest window"));
            assert!((10.0..11.0).contains(&ms), "{mode}: {ms}");
        }
        for (mode, open) in [
            ("strict", false),
            ("fence", false),
            ("defer", true),
            ("none", true),
        ] {
            let calls = value(&found, &format!("{mode}, stream: longest window in calls"));
            assert_eq!(calls > 0.0, open, "{mode}: {calls}");
        }
        for mode in ["riommu", "fence-burst"] {
            let what = format!("{mode}, stream: longest delay of a release in calls");
            assert!(value(&found, &what) > 0.0, "{mode}");
        }
        // Nothing but a wrap ends those of the bitmap.
        assert!(value(&found, "bitmap, silence: longest window") > SILENCE_MS as f64);
    }

    #[test]
    fn a_wrap_ends_the_windows_of_the_bitmap() {
        let mut found = Findings::default();
        wrapped(&Setting::smoke(), &mut found).unwrap();
        let wrap = found.rows[0].measured.unwrap().median;
        assert!(
            wrap > f64::from((1 << 20) - 4) && wrap <= f64::from(1 << 20),
            "{wrap}"
        );
    }
}
