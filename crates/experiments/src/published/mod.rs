//! The papers' printed numbers as data, for comparison with measurements.

mod cells;
mod riommu;
mod rounded;

pub use cells::Sheet;
pub use riommu::{
    BASELINE_CYCLES, BASELINES, Baseline, Benchmark, CLOCK_GHZ, EIOVAR_DEFER_STREAM,
    EIOVAR_STRICT_ALLOC, EIOVAR_STRICT_STREAM, IOVAS_PER_PACKET, MLX_STREAM, Metric, Nic, TABLE_1,
    TABLE_2, TABLE_3, Table1Column, Table2Row, Table3Row, Variant,
};
pub use rounded::Rounded;
