//! Cost and exposure of the modes of X20: a receive ring and its acknowledgements, replayed under
//! the oracle and the meter.

use ringfence_lab::LabError;
use ringfence_lab::ReplayStatus;
use ringfence_lab::compare::{CompareOptions, runner};
use ringfence_lab::compose::compose;
use ringfence_lab::modes::Mode;
#[cfg(test)]
use ringfence_lab::modes::{Alloc, FlushKind, Owner, TableKind};
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::row::{Row, RowInputs};
use ringfence_lab::{Prices, Profile};
use ringfence_trace::{
    Chunk, DeviceIndex, Devices, MapClass, MapFlags, MappingId, Op, OpKind, SegmentSpan,
};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

/// Buffers that the receive ring holds: the default of Linux's e1000.
pub(super) const RING: u64 = 256;
/// Acknowledgements that wait for their completion.
pub(super) const ACKS: u64 = 8;
/// Frames that the driver completes and refills together (`E1000_RX_BUFFER_WRITE`).
pub(super) const GROUP: u64 = 16;
/// Time of a full frame on the link.
const FRAME_NS: u64 = 12_000;

/// All of the guest mapped in advance (CG07).
pub(super) const WHOLE_GUEST: &str = "alloc=identity,table=static-flat,flush=never,owner=xen";
/// Unmaps in batches, like `dma_unmap_multi`, with one crossing for up to 32 (CG10, CG12).
pub(super) const BATCH: &str = "alloc=bitmap,table=flat,flush=burst,owner=xen-multicall";

/// Cost and exposure of a mode. Cycles are per map/unmap pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModeCost {
    /// Cycles of the layer and, behind Xen, of the hypervisor's code.
    pub(super) measured: f64,
    /// Spread of the measured cycles.
    pub(super) spread: f64,
    /// Modelled cycles of flushes.
    pub(super) flushes: f64,
    /// Modelled cycles of crossings into the hypervisor.
    pub(super) crossings: f64,
    /// Number of crossings into the hypervisor.
    pub(super) crossed: f64,
    /// Number of flushes.
    pub(super) flushed: f64,
    /// Accesses outside live mappings that the IOMMU let through, of all that attackers tried.
    pub(super) reached: u64,
    /// Longest time for which an unmapped buffer stayed reachable, in ns.
    pub(super) window_ns: u64,
    /// The axes of the mode that ran.
    #[cfg(test)]
    pub(super) ran: Option<Axes>,
}

/// Allocator, table, flush policy and owner of a mode.
#[cfg(test)]
pub(super) type Axes = (Alloc, TableKind, FlushKind, Owner);

/// Returns the axes of `mode`.
#[cfg(test)]
pub(super) const fn axes(mode: &Mode) -> Axes {
    (mode.alloc, mode.table, mode.flush, mode.owner)
}

impl ModeCost {
    /// Returns measured and modelled cycles.
    pub(super) fn cycles(&self) -> f64 {
        self.measured + self.modelled()
    }

    pub(super) fn modelled(&self) -> f64 {
        self.flushes + self.crossings
    }
}

/// A receive ring of [`RING`] buffers of 2 KiB, and an acknowledgement for every second frame.
fn traffic(frames: u64) -> Result<Chunk, LabError> {
    let mut chunk = Chunk::default();
    let mut push = |at: u64, id: u64, mapped: Option<(u64, u64, Direction)>| {
        let kind = match mapped {
            Some((page, bytes, direction)) => {
                let piece = PhysRange::new(PhysAddr::new((page + 512) << 12), bytes);
                chunk
                    .segments
                    .push(piece.ok_or(LabError::Internal("a buffer"))?);
                OpKind::Map {
                    id: MappingId(id as u32),
                    direction,
                    class: MapClass::Single,
                    flags: MapFlags::NONE,
                    segments: SegmentSpan {
                        first: (chunk.segments.len() - 1) as u32,
                        count: 1,
                    },
                }
            }
            None => OpKind::Unmap {
                id: MappingId(id as u32),
            },
        };
        chunk.ops.push(Op {
            time: Nanos(1_000_000 + at),
            device: DeviceIndex(0),
            cpu: 0,
            lines: 1,
            kind,
        });
        Ok::<(), LabError>(())
    };
    for group in 0..(frames + RING) / GROUP {
        let at = group * GROUP * FRAME_NS;
        let (first, acks) = (group * GROUP, group * GROUP / 2);
        for frame in first..first + GROUP {
            if frame >= RING {
                push(at, frame % RING, None)?;
            }
        }
        for ack in acks..acks + GROUP / 2 {
            if ack >= ACKS {
                push(at + 1000, RING + ack % ACKS, None)?;
            }
        }
        for frame in first..first + GROUP {
            let buffer = (frame % (2 * RING), 2048, Direction::FromDevice);
            push(at + 2000, frame % RING, Some(buffer))?;
        }
        for ack in acks..acks + GROUP / 2 {
            let header = (2 * RING + ack % 64, 66, Direction::ToDevice);
            push(at + 3000, RING + ack % ACKS, Some(header))?;
        }
    }
    Ok(chunk)
}

/// Returns a named mode, or the mode that `name` composes.
pub(super) fn mode(name: &str) -> Result<Mode, LabError> {
    match Mode::find(name) {
        Some(mode) => Ok(mode),
        None => compose(name).map_err(|_| LabError::NoSuchMode(name.to_owned())),
    }
}

/// Replays `frames` received frames in the mode of each of `entries`, and returns its cost with the
/// entry.
///
/// # Errors
/// A replay failed, or its row is not valid.
pub(super) fn costs<T>(
    entries: impl IntoIterator<Item = (T, &'static str)>,
    profile: &Profile,
    frames: u64,
    repetitions: usize,
) -> Result<Vec<(T, ModeCost)>, LabError> {
    let entries = entries.into_iter();
    let costs = entries.map(|(of, mode)| Ok((of, cost(mode, profile, frames, repetitions)?)));
    costs.collect()
}

/// Replays `frames` received frames in a mode.
///
/// # Errors
/// The replay failed, or its row is not valid.
pub(super) fn cost(
    name: &str,
    profile: &Profile,
    frames: u64,
    repetitions: usize,
) -> Result<ModeCost, LabError> {
    cost_of(name, profile, &traffic(frames)?, repetitions)
}

/// Replays the operations of `chunk`, which begin without mappings, in a mode.
///
/// # Errors
/// The replay failed, or its row is not valid.
pub(super) fn cost_of(
    name: &str,
    profile: &Profile,
    chunk: &Chunk,
    repetitions: usize,
) -> Result<ModeCost, LabError> {
    let mode = mode(name)?;
    let options = CompareOptions {
        modes: Vec::new(),
        profile: profile.clone(),
        repetitions,
        ..CompareOptions::new()
    };
    let mut runner = runner(&mode, &options)?;
    let mut planner = Planner::new().with_cycles(options.cache_cycles.for_mode(&mode));
    let mut plan = Plan::default();
    planner.plan(chunk, &mut plan)?;
    planner.finish(&mut plan);
    let devices = Devices::new();
    runner.metered.run(&plan, &devices)?;
    if let Some(attack) = &mut runner.attack {
        attack.run(&plan, &devices)?;
    }
    if let Some(meter) = &mut runner.meter {
        meter.chunk(&plan)?;
    }
    let alive = planner.live_mappings();
    let metered = runner.metered.finish(&alive);
    let attack = runner.attack.as_mut().map(|attack| attack.finish(&alive));
    let row = Row::new(&RowInputs {
        trace: "X20",
        mode: &mode,
        iommu: profile.iommu,
        metered: &metered,
        attack: attack.as_ref(),
        components: runner.meter.as_ref().map(|meter| meter.finish()),
        prices: Prices::from(profile),
        round_trips: None,
        cache_cycles: options.cache_cycles,
        status: ReplayStatus::Ok,
    });
    if metered.first_refusal.is_some() || row.false_faults > 0 {
        return Err(LabError::Internal("a device could not access its buffers"));
    }
    let components = row.components.unwrap_or_default();
    let pairs = row.unmaps.max(1) as f64;
    let crossed = metered.traffic.kicks_in_maps as f64 / row.maps.max(1) as f64
        + metered.traffic.kicks_in_unmaps as f64 / pairs;
    Ok(ModeCost {
        measured: components.measured.max(0.0),
        spread: components.repetition_spread * components.measured.abs(),
        flushes: row.invalidations as f64 / pairs * profile.invalidation_cycles as f64,
        crossings: crossed * profile.crossing_cycles(mode.owner) as f64,
        crossed,
        flushed: row.invalidations as f64 / pairs,
        reached: row.violations.map_or(0, |violations| violations.total),
        window_ns: row.stale_window_max_ns,
        #[cfg(test)]
        ran: Some(axes(&mode)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_exposure_of_each_remedy() {
        let profile = Profile::r210_2015();
        // Mode; crossings and flushes of a pair; true if attackers reach unmapped buffers.
        for (name, crossed, flushes, exposed) in [
            ("none", 0.0, 0.0, true),
            ("calgary", 0.0, 1.0, false),
            ("calgary-lazy", 0.0, 0.0, true),
            ("xen", 2.0, 1.0, false),
            ("xen-multicall", 2.0, 1.0, false),
            ("xen-lazy", 2.0, 0.0, true),
            ("xen-grant", 2.0, 1.0, false),
            (WHOLE_GUEST, 0.0, 0.0, true),
        ] {
            let cost = cost(name, &profile, 512, 0).unwrap();
            assert_eq!(cost.crossed, crossed, "{name}");
            assert_eq!(cost.crossings, crossed * 1228.0, "{name}");
            assert_eq!(cost.flushes, flushes * 2150.0, "{name}");
            assert_eq!(cost.reached > 0, exposed, "{name}");
        }
        // Caches of mappings: each buffer crosses once, with its first map.
        for flush in ["map-cache", "never-free"] {
            for owner in ["xen", "xen-multicall"] {
                let name = format!("alloc=linux-rcache,table=flat,flush={flush},owner={owner}");
                let cost = cost(&name, &profile, 1024, 0).unwrap();
                // Buffers and headers, of all maps.
                let maps = (1024 + RING) as f64 * 1.5;
                assert_eq!(cost.crossed, (2 * RING + 64) as f64 / maps, "{name}");
                assert_eq!((cost.flushed, cost.reached > 0), (0.0, true), "{name}");
            }
        }
        // The meter measures only in repetitions.
        let [unmeasured, measured] = [0, 1].map(|repetitions| {
            let cost = cost("xen", &profile, 64, repetitions).unwrap();
            cost.measured > 0.0
        });
        assert_eq!((unmeasured, measured), (false, true));
        let cost = cost(BATCH, &profile, 512, 0).unwrap();
        assert!(cost.crossed < 2.0 && cost.flushes < 2150.0, "{cost:?}");
        assert_eq!(cost.reached, 0);
    }
}
