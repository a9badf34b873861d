//! Parses the output of an X29 guest, the counters of its devices, and QEMU's trace.

use ringfence_experiments::guest_loads::{GuestLoads, Load, LoadCounts, Machine, StaleAccesses};

use super::guest_counters::{before, counter};
use super::load_runner::device_addresses;

/// Output of a guest up to a checkpoint, and the counters at that time.
pub(super) type Checkpoint = (String, String);

/// Names of QEMU's trace events, and of the counters that stand for them.
const INVALIDATION: (&str, &str) = ("vtd_inv_desc_iotlb_", "qemu_invalidations");
const TAIL: (&str, &str) = ("vtd_inv_qi_tail", "qemu_tail_writes");
/// Device of these counters.
const QEMU_IOMMU: &str = "intel-iommu";
/// Line of a guest before the runs of `dma_count` that determine the cost without the copy.
pub(super) const UNCOPIED: &str = "ringfence: without the copy";
/// IOMMUs of this program.
const IOMMUS: [&str; 3] = ["iommu", "pviommu", "riommu"];

/// Returns QEMU's trace as counters, in the form of this program's.
pub(super) fn trace_counters(log: &str) -> String {
    let lines = |(event, counter): (&str, &str)| {
        let count = log.lines().filter(|line| line.contains(event)).count();
        format!("ringfence_{counter}_total{{device=\"{QEMU_IOMMU}\"}} {count}\n")
    };
    lines(INVALIDATION) + &lines(TAIL)
}

/// Counters at one checkpoint, since the guest's start.
struct Totals {
    exits: f64,
    device_exits: Option<f64>,
    invalidations: f64,
    unmaps: Option<f64>,
}

impl Totals {
    fn of(load: Load, machine: Machine, (out, metrics): &Checkpoint) -> Self {
        let of_iommu = |name| {
            let of = |device: &&str| counter(metrics, name, device);
            IOMMUS.iter().find_map(of)
        };
        let device = match load {
            Load::Stream | Load::RoundTrip => "net",
            Load::Read4K | Load::Read128K | Load::NvmeRead4K | Load::NvmeRead128K => "blk",
        };
        let traced = |(_, name)| counter(metrics, name, QEMU_IOMMU);
        // A ring IOMMU gets no unmap requests, and the others no invalidations.
        let ring = counter(metrics, "unit_invalidations", "riommu");
        Self {
            exits: traced(TAIL).or(of_iommu("messages")).unwrap_or(0.0),
            device_exits: match machine {
                Machine::Ringfence => counter(metrics, "doorbells", device),
                Machine::Qemu => None,
            },
            invalidations: traced(INVALIDATION)
                .or(ring)
                .or(of_iommu("unmaps"))
                .unwrap_or(0.0),
            unmaps: module_unmaps(out, load, machine),
        }
    }
}

/// Returns the unmaps that a module counts for the device of a load, in all of its rings.
fn module_unmaps(out: &str, load: Load, machine: Machine) -> Option<f64> {
    let (disk, net, _) = device_addresses(machine);
    let address = match load {
        Load::Stream | Load::RoundTrip => net,
        Load::Read4K | Load::Read128K | Load::NvmeRead4K | Load::NvmeRead128K => disk,
    };
    let unmaps = out.lines().filter_map(|line| {
        let (_, counter) = line.split_once(address)?;
        let (name, value) = counter.trim().rsplit_once([':', ' '])?;
        // pooldma has a file for each device, the other modules a directory.
        let own = name == ":unmaps" || name.ends_with("/unmaps");
        own.then(|| value.parse::<f64>().ok())?
    });
    unmaps.reduce(|sum, one| sum + one)
}

/// Returns the counts of a guest that ran `loads`, from a checkpoint before and after each.
pub(super) fn counts(
    loads: &[Load],
    machine: Machine,
    checkpoints: &[Checkpoint],
) -> Result<GuestLoads, String> {
    if checkpoints.len() != 2 * loads.len() {
        let (some, all) = (checkpoints.len(), 2 * loads.len());
        return Err(format!("it had {some} checkpoints, not {all}"));
    }
    let (first, _) = checkpoints.first().ok_or("no load was requested")?;
    let (_, last) = checkpoints.last().ok_or("no load was requested")?;
    let pairs = loads.iter().zip(checkpoints.chunks_exact(2));
    let loads = pairs.map(|(load, pair)| match pair {
        [begin, end] => Ok((*load, of_load(*load, machine, begin, end)?)),
        _ => Err("a load has no end".to_owned()),
    });
    Ok(GuestLoads {
        map_unmap: map_unmap(first)
            .ok_or("the guest's module dma_count printed no instructions")?,
        uncopied: uncopied(first),
        exposure: exposure(last)?,
        loads: loads.collect::<Result<_, _>>()?,
    })
}

/// Adds the loads of the guests after the first to the counts of the first.
pub(super) fn merged(guests: Vec<GuestLoads>) -> Option<GuestLoads> {
    let mut guests = guests.into_iter();
    let mut first = guests.next()?;
    first.loads.extend(guests.flat_map(|guest| guest.loads));
    Some(first)
}

fn of_load(
    load: Load,
    machine: Machine,
    begin: &Checkpoint,
    end: &Checkpoint,
) -> Result<LoadCounts, String> {
    let missing = |what: &str| format!("{}: the guest printed no {what}", load.name());
    let (out, _) = end;
    let operations: f64 = values(out, "operations: ", "").iter().sum();
    if operations == 0.0 {
        return Err(missing("operations"));
    }
    let mut rounds = match load {
        Load::Stream => {
            let works = values(out, "sent: ", " ns of work together");
            let counts = values(out, "sent: ", " of them");
            works
                .iter()
                .zip(counts)
                .map(|(work, of)| work / of)
                .collect()
        }
        _ => values(out, "waited: ", " ns of work the median"),
    };
    rounds.sort_by(f64::total_cmp);
    let (Some(least), Some(instructions), Some(most)) =
        (rounds.first(), rounds.get(rounds.len() / 2), rounds.last())
    else {
        return Err(missing("instructions"));
    };
    let [then, now] = [begin, end].map(|one| Totals::of(load, machine, one));
    let each = |now: f64, then: f64| (now - then) / operations;
    let both = |now: Option<f64>, then: Option<f64>| Some(each(now?, then?));
    if both(now.device_exits, then.device_exits) == Some(0.0) {
        return Err(format!("{}: the device received nothing", load.name()));
    }
    Ok(LoadCounts {
        instructions: *instructions,
        spread: most - least,
        exits: each(now.exits, then.exits),
        device_exits: both(now.device_exits, then.device_exits),
        invalidations: each(now.invalidations, then.invalidations),
        unmaps: both(now.unmaps, then.unmaps),
    })
}

/// Returns the numbers in the lines that begin with `start`, before `unit` or at the line's end.
fn values(out: &str, start: &str, unit: &str) -> Vec<f64> {
    let lines = out.lines().filter(|line| line.starts_with(start));
    let values = lines.filter_map(|line| match unit {
        "" => line.trim_end().strip_prefix(start)?.parse().ok(),
        _ => before(line, unit),
    });
    values.collect()
}

/// Returns the smaller mean of the first runs of `dma_count`, if there are any.
fn map_unmap(out: &str) -> Option<f64> {
    let (first, _) = out.split_once(UNCOPIED).unwrap_or((out, ""));
    smaller_mean(first, " maps and unmaps")
}

/// Returns the smaller mean of the runs with one copy, less that of the copies alone.
fn uncopied(out: &str) -> Option<f64> {
    let (_, runs) = out.split_once(UNCOPIED)?;
    Some(smaller_mean(runs, " maps and unmaps")? - smaller_mean(runs, " copies")?)
}

/// Returns the smaller mean of the runs that counted `what`.
fn smaller_mean(out: &str, what: &str) -> Option<f64> {
    let lines = out.lines().filter(|line| line.contains("dma_count: "));
    let means = lines.filter_map(|line| {
        let times = before(line, what).filter(|times| *times > 0.0)?;
        Some(before(line, " for ")? / times)
    });
    means.reduce(f64::min)
}

/// Returns the accesses after an unmap. The disk tries one, which an IOMMU stops or memory takes.
fn exposure(metrics: &str) -> Result<Option<StaleAccesses>, String> {
    let sum = |name: &str| {
        let begin = format!("ringfence_{name}_total{{");
        let lines = metrics.lines().filter(|line| line.starts_with(&begin));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u32>().ok());
        values.fold(0, u32::saturating_add)
    };
    let (reached, stopped) = (sum("injected_permitted"), sum("faults"));
    match reached.saturating_add(stopped) {
        0 => Ok(None),
        1 => Ok(Some(StaleAccesses { tried: 1, reached })),
        more => Err(format!(
            "{more} accesses after an unmap, or stopped ones, of 1"
        )),
    }
}

#[cfg(test)]
mod tests;
