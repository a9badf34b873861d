//! X09: amortisation of invalidations over bursts, and ring overflow (rIOMMU section 4).

mod as_published;

use std::collections::HashMap;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{NetperfStream, PACKETS_PER_RUN};

use super::capture::{Capture, Run};
use super::experiment::Experiment;
use super::figure::{Figure, Series};
use super::finding::{FindingRow, Findings, Measured, NullModel, Published};
use super::owned::{InvalidationModel, costs, refused};
use super::published::{BASELINE_CYCLES, IOVAS_PER_PACKET, Sheet};
use super::setting::Setting;
use super::timed::{Cost, TimedReplays, TimedSubject};
use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::plan::Step;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X09",
    title: "Bursts and amortised invalidation; ring size and overflow",
    source: "rIOMMU section 4",
    measure,
};

/// Received packets per interrupt. mlx unmaps two buffers for each.
const BURSTS: [u32; 14] = [1, 2, 5, 10, 20, 25, 50, 75, 100, 150, 200, 250, 300, 400];

/// Results of a port with one burst limit.
#[derive(Debug)]
struct Point {
    /// Packets per interrupt.
    packets: u32,
    /// Mean number of unmaps per invalidation.
    unmaps: f64,
    /// Rings that the driver owns, with counted invalidations, and with busy-waited ones.
    owned: Cost,
    waited: Cost,
    /// Rings behind the DMA layer.
    layer: Cost,
}

/// Returns the models of the invalidations of [`Point::owned`] and [`Point::waited`].
fn models(profile: &Profile) -> [InvalidationModel; 2] {
    let waited = InvalidationModel::Waited(profile.invalidation_cycles);
    [InvalidationModel::Counted, waited]
}

impl Point {
    fn measure(setting: &Setting, packets: u32) -> Result<Self, LabError> {
        let stream = NetperfStream::default();
        let mut capture = Capture::with(NicProfile::MLX, stream, packets, PACKETS_PER_RUN)?;
        // The first run fills the rings.
        let runs = [capture.run()?, capture.run()?];
        let last = |costs: Vec<Cost>| costs.last().cloned().ok_or(LabError::Internal("no runs"));
        let [counted, waits] = models(&setting.profile);
        let owned = last(costs(&runs, setting.repetitions, counted)?)?;
        let waited = last(costs(&runs, setting.repetitions, waits)?)?;
        let mut timed =
            TimedReplays::new(TimedSubject::Rings, &setting.profile, setting.repetitions)?;
        timed.run(&runs[0])?;
        let layer = timed.run(&runs[1])?;
        Ok(Self {
            packets,
            unmaps: runs[1].plan.unmaps as f64 / owned.invalidations.max(1) as f64,
            owned,
            waited,
            layer,
        })
    }

    /// Throughput over that of `none`. A packet costs the cycles of `none` plus two maps and
    /// unmaps.
    fn relative_to_none(cost: &Cost, profile: &Profile) -> Measured {
        let extra = IOVAS_PER_PACKET * cost.per_pair(profile);
        let ratio = BASELINE_CYCLES / (BASELINE_CYCLES + extra);
        let share = IOVAS_PER_PACKET * cost.spread_per_pair() / (BASELINE_CYCLES + extra);
        Measured::timed(ratio, share)
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    found(setting, |packets| Point::measure(setting, packets))
}

/// Adds the rows and lines of the points that `measure` returns for each of [`BURSTS`].
fn found(
    setting: &Setting,
    measure: impl Fn(u32) -> Result<Point, LabError>,
) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(
        "mlx stream with interrupts at 1 to 400 packets. The driver's calls are recorded while \
        frames cross the wire and are verified. They are replayed on rings that the driver owns \
        and on rings behind the DMA layer. 1816 cycles are modelled per packet and 2150 per \
        invalidation; maps and unmaps are measured. On owned rings, the driver's loops are timed, \
        and the cycles of the same loops without protection are subtracted, because the 1816 \
        include them.",
    );
    let points = BURSTS.map(measure);
    let points = points.into_iter().collect::<Result<Vec<_>, _>>()?;
    for point in &points {
        point_rows(&mut found, point, setting)?;
    }
    figures(&mut found, &points, setting);
    // The first run begins with empty rings.
    let run = Capture::new(NicProfile::MLX, NetperfStream::default())?.run()?;
    overflow(&run, &mut found)?;
    found.explain(
        "An interrupt at 100 received packets ends a burst of 200 unmaps. Acknowledgements are \
        inlined and end no burst. The control messages of a run end one of two unmaps each, so the \
        mean over both directions is slightly below 200.",
    );
    found.note(
        "riommu / none: the paper prints 0.77 for mlx stream, where a map and an unmap cost about \
        260 cycles. On rings that the driver owns they cost a few dozen cycles here, so the \
        modelled invalidation dominates until bursts are long.",
    );
    found.note(
        "Busy-waited: the paper's own method (RI19) runs none with the real driver code and spins \
        for 2150 cycles at each invalidation of a ring. Its rows differ from the cycles of the \
        owned ring by the overshoot of the spin and the overlap with other work.",
    );
    found.note(
        "Erratum 8: until a burst ends, the device can reach its last entries; the fixed ring \
        withholds their buffers.",
    );
    found.note(
        "In the paper, N >= L avoids overflow, and the ring as published is judged by that. The \
        fixed ring must not reuse a slot of a burst before its invalidation, so its condition is \
        N >= L plus the longest burst: the price of erratum 8.",
    );
    Ok(found)
}

fn point_rows(found: &mut Findings, point: &Point, setting: &Setting) -> Result<(), LabError> {
    let profile = &setting.profile;
    let at = format!("interrupt at {}", point.packets);
    let modelled = point.owned.modelled_per_pair(profile);
    let each = Measured::cost(point.owned.measured_per_pair(), modelled, 0.0)
        .with_spread(point.owned.spread_per_pair());
    let what = format!("{at}: map, unmap and share of the invalidation, owned ring");
    found.push(FindingRow::new(what, "cycles", each));
    let over_none = Point::relative_to_none(&point.owned, profile);
    let row = FindingRow::new(format!("{at}: riommu / none, owned ring"), "", over_none);
    found.push(match point.packets {
        100 => {
            let wanted = [
                ("nic", "mlx"),
                ("benchmark", "stream"),
                ("metric", "throughput"),
                ("variant", "riommu"),
                ("divided_by", "none"),
            ];
            let printed = Sheet::named("riommu_table2")?.printed(&wanted, "value")?;
            row.at_least(printed).with_null_model(NullModel::RATIO)
        }
        _ => row,
    });
    let layer = Point::relative_to_none(&point.layer, profile);
    let what = format!("{at}: riommu / none, through the DMA layer");
    found.push(FindingRow::new(what, "", layer));
    let waited = Measured::counted(point.waited.measured_per_pair());
    let waited = waited.with_spread(point.waited.spread_per_pair());
    let what = format!("{at}: map and unmap with invalidations busy-waited");
    found.push(FindingRow::new(what, "cycles", waited));
    if point.packets == 100 {
        let bursts = Sheet::named("claims")?.printed(&[("id", "R23")], "value")?;
        let row = FindingRow::counted(format!("{at}: unmaps per burst"), "", point.unmaps);
        found.push(row.near(bursts));
        let wanted = [
            ("mode", "riommu"),
            ("quantity", "amortised rIOTLB invalidation = 2150/200"),
        ];
        let printed = Sheet::named("riommu_fig7_fig8_anchors")?.printed(&wanted, "value")?;
        let row = FindingRow::new(
            format!("{at}: invalidation cycles per unmap"),
            "cycles",
            Measured::cost(0.0, profile.invalidation_cycles as f64 / point.unmaps, 0.0),
        );
        // The printed price over the row above.
        found.push(row.near(printed).fitted());
    }
    Ok(())
}

fn figures(found: &mut Findings, points: &[Point], setting: &Setting) {
    let profile = &setting.profile;
    let line = |name: &str, of: &dyn Fn(&Point) -> f64| {
        let points = points
            .iter()
            .map(|point| (f64::from(point.packets), of(point)));
        Series::line(name, points.collect())
    };
    found.figures.push(Figure::logarithmic(
        "riommu over none by burst length, mlx stream",
        "packets per interrupt (two unmaps each)",
        "throughput relative to none",
        vec![
            line("rings owned by the driver", &|point| {
                Point::relative_to_none(&point.owned, profile).median
            }),
            line("owned rings, invalidations busy-waited", &|point| {
                BASELINE_CYCLES
                    / (BASELINE_CYCLES + IOVAS_PER_PACKET * point.waited.measured_per_pair())
            }),
            line("rings behind the DMA layer", &|point| {
                Point::relative_to_none(&point.layer, profile).median
            }),
        ],
    ));
    found.figures.push(Figure::logarithmic(
        "Cost of a map and an unmap by burst length",
        "packets per interrupt (two unmaps each)",
        "cycles",
        vec![
            line("modelled: share of the invalidation", &|point| {
                point.owned.modelled_per_pair(profile)
            }),
            line("measured: rings owned by the driver", &|point| {
                point.owned.measured_per_pair()
            }),
            line("measured: rings behind the DMA layer", &|point| {
                point.layer.measured_per_pair()
            }),
        ],
    ));
}

/// For each ring, the maximum number of mapped slots, and of slots that are mapped or wait for the
/// end of a burst.
fn most(run: &Run) -> HashMap<u16, (u32, u32)> {
    let mut rings: HashMap<u16, (u32, u32)> = HashMap::new();
    let mut most: HashMap<u16, (u32, u32)> = HashMap::new();
    for (timed, ring) in run.plan.steps.iter().zip(&run.step_rings) {
        let (live, waiting) = rings.entry(*ring).or_default();
        match timed.step {
            Step::Map { .. } => *live += 1,
            Step::Unmap { .. } => {
                *live = live.saturating_sub(1);
                *waiting += 1;
            }
            Step::EndBurst { .. } => *waiting = 0,
            Step::Doorbell { .. } | Step::EndDescriptor { .. } | Step::Tick => {}
        }
        let largest = most.entry(*ring).or_default();
        largest.0 = largest.0.max(*live);
        largest.1 = largest.1.max(*live + *waiting);
    }
    most
}

/// Measures overflow in `run`, which begins with empty rings.
fn overflow(run: &Run, found: &mut Findings) -> Result<(), LabError> {
    let (live, busy) = most(run).into_values().fold((0, 0), |most, ring| {
        (most.0.max(ring.0), most.1.max(ring.1))
    });
    let row = FindingRow::counted("largest ring: live addresses (L)", "", f64::from(live));
    let printed = Sheet::named("claims")?
        .printed(&[("id", "R51")], "value")?
        .read_as(8192.0);
    // The profile bounds L by the ring size, and N by L: neither row can fail.
    found.push(row.with_published(printed));
    let row = FindingRow::counted("largest ring: N that never overflows", "", f64::from(busy));
    let printed = Published::new("L", f64::from(live), "claims.csv R52");
    found.push(row.with_published(printed));
    overflow_at_l(run, found)?;
    let (mut driver, mut counted) = (Vec::new(), Vec::new());
    let (mut published, mut live_only) = (Vec::new(), Vec::new());
    for share in 1..=24 {
        let slots = (busy * share / 20).max(1);
        let sizes = vec![slots; run.rings.len()];
        let point = |line: &mut Vec<_>, share| line.push((f64::from(slots), 100.0 * share));
        point(&mut driver, refused(run, &sizes)?);
        point(&mut counted, without_room(run, slots, Withheld::UntilBurst));
        point(&mut published, as_published::overflow(run, &sizes)?.share());
        point(&mut live_only, without_room(run, slots, Withheld::Never));
    }
    found.figures.push(Figure::linear(
        format!("Maps refused by a full ring, by ring size; L = {live}, L and B = {busy}"),
        "N",
        "% of maps",
        vec![
            Series::line("on the ring driver", driver),
            Series::crosses("by counting slots", counted),
            Series::line("on the ring as published", published),
            Series::crosses("by counting live addresses", live_only),
        ],
    ));
    Ok(())
}

/// Measures overflow where each ring has its own L as its size, and one less.
fn overflow_at_l(run: &Run, found: &mut Findings) -> Result<(), LabError> {
    let most = most(run);
    let live = |ring: &u16| most.get(ring).map_or(1, |(live, _)| (*live).max(1));
    let at_l: Vec<u32> = run.rings.iter().map(live).collect();
    // A ring of one live address has no smaller size.
    let below: Vec<u32> = at_l.iter().map(|slots| (slots - 1).max(1)).collect();
    let published = as_published::overflow(run, &at_l)?;
    let what = "rings as published, N = L of each: maps refused";
    let none = Published::new("no overflow", 0.0, "claims.csv R52");
    found.push(FindingRow::counted(what, "", published.refused() as f64).exact(none));
    let smaller = at_l.iter().zip(&below).filter(|(at_l, below)| below < at_l);
    let smaller = smaller.count();
    let overflowing = as_published::overflow(run, &below)?.rings_that_refuse();
    let what = "rings as published, N = L - 1 of each: rings that refuse a map";
    let each = Published::new("each overflows", smaller as f64, "rIOMMU section 4");
    found.push(FindingRow::counted(what, "", overflowing as f64).exact(each));
    let what = "rings as published, N = L of each: live entries overwritten";
    found.push(FindingRow::counted(what, "", published.overwritten as f64));
    let what = "fixed rings, N = L of each: maps refused";
    found.push(FindingRow::counted(what, "%", 100.0 * refused(run, &at_l)?));
    Ok(())
}

/// Slots that are not live and not free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Withheld {
    /// The fixed ring withholds an unmapped slot until its burst ends.
    UntilBurst,
    /// The ring as published withholds none.
    Never,
}

/// Returns the share of maps that find a ring of `slots` slots full. It counts slots, independently
/// of the ring driver. A refused map is skipped together with its unmap.
fn without_room(run: &Run, slots: u32, withheld: Withheld) -> f64 {
    let mut busy: HashMap<u16, (u32, u32)> = HashMap::new();
    let mut out = std::collections::HashSet::new();
    let (mut maps, mut full) = (0_u64, 0_u64);
    for (timed, ring) in run.plan.steps.iter().zip(&run.step_rings) {
        let (live, waiting) = busy.entry(*ring).or_default();
        match timed.step {
            Step::Map { id, .. } => {
                maps += 1;
                if *live + *waiting < slots {
                    *live += 1;
                } else {
                    full += 1;
                    out.insert(id);
                }
            }
            Step::Unmap { id, .. } if !out.remove(&id) => {
                *live = live.saturating_sub(1);
                *waiting += u32::from(withheld == Withheld::UntilBurst);
            }
            Step::EndBurst { .. } => *waiting = 0,
            Step::Unmap { .. }
            | Step::Doorbell { .. }
            | Step::EndDescriptor { .. }
            | Step::Tick => {}
        }
    }
    full as f64 / maps.max(1) as f64
}

#[cfg(test)]
mod tests;
