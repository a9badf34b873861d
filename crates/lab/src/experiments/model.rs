//! RI20: throughput from the cycles of a packet, and what the document's own tables say by it
//! (rIOMMU section 3.3).
//!
//! The core is the bottleneck, so a packet of 1500 bytes that takes C cycles gives `Gbps(C) = 1500
//! x 8 x S / C` at a clock of S GHz. The document validates this by lengthening C with a busy-wait
//! loop and by the throughput of each mode (Fig. 8): [`busy_wait_line`] executes the first,
//! [`deviation`] says how far measured points lie from the line.
//!
//! The other half derives C from Table 2 and compares it with Table 1. The two disagree by more
//! than rounding ([`residuals`], erratum 2), and the document disagrees with EIOVAR on the same
//! machine ([`against_eiovar`], erratum 4).

use serde::Serialize;

use super::published::{
    BASELINE_CYCLES, BASELINES, Baseline, CLOCK_GHZ, EIOVAR_DEFER_STREAM, EIOVAR_STRICT_ALLOC,
    EIOVAR_STRICT_STREAM, IOVAS_PER_PACKET, MLX_STREAM, Metric, Rounded, TABLE_1, Table1Column,
    Variant,
};

/// Bytes of an Ethernet packet.
pub const PACKET_BYTES: f64 = 1500.0;

/// The model: throughput in Gbit/s of a core of `clock_ghz` that spends `cycles` on each packet.
/// Infinite for no cycles.
pub fn gbps(clock_ghz: f64, cycles: f64) -> f64 {
    PACKET_BYTES * 8.0 * clock_ghz / cycles
}

/// Cycles of a packet of `iovas` buffers, each mapped and unmapped once, invalidations included.
pub fn cycles_per_packet(c_none: f64, iovas: f64, map: f64, unmap: f64) -> f64 {
    c_none + iovas * (map + unmap)
}

/// A point of Fig. 8.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Point {
    /// Cycles of a packet.
    pub cycles: f64,
    /// Throughput in Gbit/s.
    pub gbps: f64,
}

/// The thick line of Fig. 8: the model at each of `cycles`.
pub fn model_line(clock_ghz: f64, cycles: &[f64]) -> Vec<Point> {
    let points = cycles.iter().map(|&cycles| Point {
        cycles,
        gbps: gbps(clock_ghz, cycles),
    });
    points.collect()
}

/// The thin line of Fig. 8, executed: for each of `cycles`, `packets` packets that each wait until
/// that many cycles are over, and the throughput by the time that all of them took. `now` counts
/// cycles of `clock_ghz` and never stops; without packets nothing is measured.
///
/// The points' cycles are those asked for. The loop's own work and what else runs on the processor
/// is in the time, and so in the distance from the model.
pub fn busy_wait_line(
    clock_ghz: f64,
    cycles: &[u64],
    packets: u64,
    mut now: impl FnMut() -> u64,
) -> Vec<Point> {
    let mut line = Vec::with_capacity(cycles.len());
    for &length in cycles.iter().filter(|_| packets > 0) {
        let begin = now();
        let mut at = begin;
        for _ in 0..packets {
            let packet = at;
            while at.wrapping_sub(packet) < length {
                at = now();
            }
        }
        let elapsed = at.wrapping_sub(begin) as f64 / packets as f64;
        line.push(Point {
            cycles: length as f64,
            gbps: gbps(clock_ghz, elapsed),
        });
    }
    line
}

/// How far measured points lie from the model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Deviation {
    /// Points.
    pub points: usize,
    /// Mean of |measured / model - 1|.
    pub mean: f64,
    /// Largest of them.
    pub worst: f64,
}

/// Compares measured `points` with the model; `None` without points.
pub fn deviation(clock_ghz: f64, points: &[Point]) -> Option<Deviation> {
    let off = points
        .iter()
        .map(|point| (point.gbps / gbps(clock_ghz, point.cycles) - 1.0).abs());
    let worst = off.clone().reduce(f64::max)?;
    Some(Deviation {
        points: points.len(),
        mean: off.sum::<f64>() / points.len() as f64,
        worst,
    })
}

/// Cycles of an mlx stream packet in one mode, as Table 2 implies them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Derived {
    /// `C / C_none`.
    pub ratio: Rounded,
    /// C.
    pub cycles: Rounded,
    /// The model's throughput in Gbit/s at the document's clock.
    pub gbps: Rounded,
}

impl Derived {
    fn of(ratio: Rounded) -> Self {
        let cycles = ratio * Rounded::exact(BASELINE_CYCLES);
        Self {
            ratio,
            cycles,
            gbps: Rounded {
                lo: gbps(CLOCK_GHZ, cycles.hi),
                value: gbps(CLOCK_GHZ, cycles.value),
                hi: gbps(CLOCK_GHZ, cycles.lo),
            },
        }
    }
}

fn printed(variant: Variant, baseline: Baseline) -> Rounded {
    Rounded::hundredths(MLX_STREAM.ratio(Metric::Throughput, variant, baseline))
}

/// C of `mode` by the ratios of `via`: throughput is proportional to 1 / C, so `C / C_none` is the
/// variant over `mode`, divided by the variant over `none`.
pub fn derived(mode: Baseline, via: Variant) -> Derived {
    Derived::of(match mode {
        Baseline::None => Rounded::exact(1.0),
        _ => printed(via, mode) / printed(via, Baseline::None),
    })
}

/// C of a variant of rIOMMU.
pub fn derived_variant(variant: Variant) -> Derived {
    Derived::of(Rounded::exact(1.0) / printed(variant, Baseline::None))
}

/// Cycles that one IOVA costs in a variant of rIOMMU: map, unmap, and its share of the
/// invalidation.
pub fn cycles_per_iova(variant: Variant) -> Rounded {
    let extra = derived_variant(variant).cycles - Rounded::exact(BASELINE_CYCLES);
    extra / Rounded::exact(IOVAS_PER_PACKET)
}

/// C of a mode by Table 1: C without an IOMMU, and two maps and two unmaps.
pub fn by_table_1(column: &Table1Column) -> f64 {
    cycles_per_packet(
        BASELINE_CYCLES,
        IOVAS_PER_PACKET,
        column.map(),
        column.unmap(),
    )
}

/// What Table 2 implies and Table 1 does not explain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Residual {
    /// The mode.
    pub mode: Baseline,
    /// C by Table 1.
    pub by_table_1: f64,
    /// C by Table 2 through the ratios of `riommu`, which are the larger and so the more exact.
    pub by_table_2: Rounded,
    /// The second less the first, in cycles a packet.
    pub residual: Rounded,
    /// Whether rounding could explain it.
    pub within_rounding: bool,
}

/// Erratum 2: for each mode of Table 1, the cycles of a packet that only Table 2 knows of.
pub fn residuals() -> Vec<Residual> {
    TABLE_1
        .iter()
        .map(|column| {
            let by_table_1 = by_table_1(column);
            let by_table_2 = derived(column.mode, Variant::Coherent).cycles;
            let residual = by_table_2 - Rounded::exact(by_table_1);
            Residual {
                mode: column.mode,
                by_table_1,
                by_table_2,
                residual,
                within_rounding: residual.contains(0.0),
            }
        })
        .collect()
}

/// A gain that both documents print for the same machine and workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Disagreement {
    /// The mode without the better allocator.
    pub mode: Baseline,
    /// Throughput with it over throughput without, by rIOMMU Table 2.
    pub riommu: Rounded,
    /// The same by EIOVAR Table 2.
    pub eiovar: Rounded,
    /// Whether rounding could explain the difference.
    pub within_rounding: bool,
    /// The gain that rIOMMU's cycles would give with EIOVAR's cost of an allocation, where that is
    /// printed.
    pub with_eiovar_alloc: Option<Rounded>,
}

/// Erratum 4: what the better allocator gains, by both documents.
pub fn against_eiovar() -> [Disagreement; 2] {
    let gain = |mode, plus| {
        let via = Variant::Coherent;
        printed(via, mode) / printed(via, plus)
    };
    let disagreement = |mode, plus, eiovar, with_eiovar_alloc| {
        let (riommu, eiovar) = (gain(mode, plus), Rounded::hundredths(eiovar));
        Disagreement {
            mode,
            riommu,
            eiovar,
            within_rounding: riommu.agrees(&eiovar),
            with_eiovar_alloc,
        }
    };
    let strict = derived(Baseline::Strict, Variant::Coherent).cycles;
    let plus = derived(Baseline::StrictPlus, Variant::Coherent).cycles;
    let dearer = EIOVAR_STRICT_ALLOC.0 - TABLE_1[Baseline::Strict as usize].alloc;
    let with_alloc = (strict + Rounded::exact(IOVAS_PER_PACKET * dearer)) / plus;
    [
        disagreement(
            Baseline::Strict,
            Baseline::StrictPlus,
            EIOVAR_STRICT_STREAM,
            Some(with_alloc),
        ),
        disagreement(
            Baseline::Defer,
            Baseline::DeferPlus,
            EIOVAR_DEFER_STREAM,
            None,
        ),
    ]
}

/// The crosses of Fig. 8 as the document's tables give them: every mode of Table 1, `none`, and the
/// two variants.
pub fn printed_crosses() -> Vec<(&'static str, Derived)> {
    let modes = BASELINES
        .iter()
        .map(|&mode| (mode.name(), derived(mode, Variant::Coherent)));
    let variants = Variant::ALL.map(|variant| (variant.name(), derived_variant(variant)));
    modes.chain(variants).collect()
}
