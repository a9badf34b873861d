//! RI20: the model that gives throughput from cycles per packet, and its application to the rIOMMU
//! paper's own tables (section 3.3).
//!
//! The core is the bottleneck, so a packet of 1500 bytes that takes C cycles gives
//! `Gbps(C) = 1500 x 8 x S / C` at a clock of S GHz. The paper validates the model in two ways: by
//! lengthening C with a busy-wait loop, and by the throughput of each mode (Fig. 8).
//! `packet_loop.rs` executes the loop; [`deviation`] measures the distance of points from the line.
//!
//! The rest of this module derives C from Table 2 and compares it with Table 1. The tables disagree
//! by more than rounding ([`residuals`], erratum 2). The paper also disagrees with EIOVAR, which
//! used the same machine ([`against_eiovar`], erratum 4).

use serde::Serialize;

use super::published::{
    BASELINE_CYCLES, BASELINES, Baseline, CLOCK_GHZ, EIOVAR_DEFER_STREAM, EIOVAR_STRICT_ALLOC,
    EIOVAR_STRICT_STREAM, IOVAS_PER_PACKET, MLX_STREAM, Metric, Rounded, TABLE_1, Table1Column,
    Variant,
};

/// Bytes per Ethernet packet.
pub const PACKET_BYTES: f64 = 1500.0;

/// The model: throughput in Gbit/s of a core of `clock_ghz` that spends `cycles` on each packet.
/// Infinite if `cycles` is 0.
pub fn gbps(clock_ghz: f64, cycles: f64) -> f64 {
    PACKET_BYTES * 8.0 * clock_ghz / cycles
}

/// Cycles per packet with `iovas` buffers, each mapped and unmapped once, invalidations included.
pub fn cycles_per_packet(c_none: f64, iovas: f64, map: f64, unmap: f64) -> f64 {
    c_none + iovas * (map + unmap)
}

/// A point of Fig. 8.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Point {
    /// Cycles per packet.
    pub cycles: f64,
    /// Throughput in Gbit/s.
    pub gbps: f64,
}

/// The thick line of Fig. 8: the model's throughput at each of `cycles`.
pub fn model_line(clock_ghz: f64, cycles: &[f64]) -> Vec<Point> {
    let points = cycles.iter().map(|&cycles| Point {
        cycles,
        gbps: gbps(clock_ghz, cycles),
    });
    points.collect()
}

/// Distance of measured points from the model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Deviation {
    /// Number of points.
    pub points: usize,
    /// Mean of |measured / model - 1|.
    pub mean: f64,
    /// Largest |measured / model - 1|.
    pub worst: f64,
}

/// Compares measured `points` with the model. Returns `None` if `points` is empty.
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

/// Cycles per mlx stream packet in one mode, as Table 2 implies them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Derived {
    /// `C / C_none`.
    pub ratio: Rounded,
    /// C: cycles per packet.
    pub cycles: Rounded,
    /// The model's throughput in Gbit/s at the paper's clock.
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

/// C of `mode` from the ratios of `via`. Throughput is proportional to 1 / C, so `C / C_none` is
/// the ratio of `via` to `mode` divided by the ratio of `via` to `none`.
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

/// Cycles per IOVA in a variant of rIOMMU: map, unmap and a share of the invalidation.
pub fn cycles_per_iova(variant: Variant) -> Rounded {
    let extra = derived_variant(variant).cycles - Rounded::exact(BASELINE_CYCLES);
    extra / Rounded::exact(IOVAS_PER_PACKET)
}

/// C of a mode from Table 1: C without an IOMMU plus two maps and two unmaps.
pub fn by_table_1(column: &Table1Column) -> f64 {
    cycles_per_packet(
        BASELINE_CYCLES,
        IOVAS_PER_PACKET,
        column.map(),
        column.unmap(),
    )
}

/// The part of Table 2's C that Table 1 does not explain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Residual {
    /// Mode, a column of Table 1.
    pub mode: Baseline,
    /// C from Table 1.
    pub by_table_1: f64,
    /// C from Table 2 through the ratios of `riommu`, which are larger and therefore more precise.
    pub by_table_2: Rounded,
    /// `by_table_2` minus `by_table_1`, in cycles per packet.
    pub residual: Rounded,
    /// True if rounding can explain the residual.
    pub within_rounding: bool,
}

/// Erratum 2: for each mode of Table 1, the cycles per packet that only Table 2 accounts for.
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

/// A speedup that both papers print for the same machine and workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Disagreement {
    /// Mode without the better allocator.
    pub mode: Baseline,
    /// Throughput with the better allocator over throughput without it, from rIOMMU Table 2.
    pub riommu: Rounded,
    /// The same ratio from EIOVAR Table 2.
    pub eiovar: Rounded,
    /// True if rounding can explain the difference.
    pub within_rounding: bool,
    /// The ratio that rIOMMU's cycles would give with EIOVAR's cost of an allocation; `None` if
    /// EIOVAR does not print that cost.
    pub with_eiovar_alloc: Option<Rounded>,
}

/// Erratum 4: the speedup of the better allocator according to both papers.
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

/// The crosses of Fig. 8 as the paper's tables imply them: `none`, every mode of Table 1, and the
/// two variants.
pub fn printed_crosses() -> Vec<(&'static str, Derived)> {
    let modes = BASELINES
        .iter()
        .map(|&mode| (mode.name(), derived(mode, Variant::Coherent)));
    let variants = Variant::ALL.map(|variant| (variant.name(), derived_variant(variant)));
    modes.chain(variants).collect()
}
