//! The rIOMMU paper's tables, and the numbers of the EIOVAR paper for the same machine.

use serde::Serialize;

/// Core clock of the paper's machine in GHz (section 5.1).
pub const CLOCK_GHZ: f64 = 3.1;

/// Cycles per packet without an IOMMU, mlx stream (Fig. 7).
pub const BASELINE_CYCLES: f64 = 1816.0;

/// Target buffers of an mlx packet: a header and a body, each with an IOVA (section 3.3).
pub const IOVAS_PER_PACKET: f64 = 2.0;

/// EIOVAR Table 2, mlx stream: throughput of strict with EIOVAR over strict.
pub const EIOVAR_STRICT_STREAM: f64 = 2.37;

/// EIOVAR Table 2, mlx stream: throughput of deferred with EIOVAR over deferred.
pub const EIOVAR_DEFER_STREAM: f64 = 1.71;

/// EIOVAR Table 2, mlx stream: cycles of an allocation in strict, without and with EIOVAR.
pub const EIOVAR_STRICT_ALLOC: (f64, f64) = (7656.0, 88.0);

/// A mode that Table 2 compares the rIOMMU variants with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Baseline {
    /// Linux's allocator; each unmap invalidates its IOTLB entries (`strict`).
    #[serde(rename = "strict")]
    Strict,
    /// `strict` with the EIOVAR allocator (`strict+`).
    #[serde(rename = "strict+")]
    StrictPlus,
    /// Linux's allocator; the IOTLB is flushed after a batch of unmaps (`defer`).
    #[serde(rename = "defer")]
    Defer,
    /// `defer` with the EIOVAR allocator (`defer+`).
    #[serde(rename = "defer+")]
    DeferPlus,
    /// No IOMMU, thus no protection (`none`).
    #[serde(rename = "none")]
    None,
}

/// All baselines, in the order of the tables' columns.
pub const BASELINES: [Baseline; 5] = [
    Baseline::Strict,
    Baseline::StrictPlus,
    Baseline::Defer,
    Baseline::DeferPlus,
    Baseline::None,
];

impl Baseline {
    /// Name in the tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::StrictPlus => "strict+",
            Self::Defer => "defer",
            Self::DeferPlus => "defer+",
            Self::None => "none",
        }
    }
}

/// A variant of rIOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Variant {
    /// `riommu-`: tables that the hardware does not snoop.
    #[serde(rename = "riommu-")]
    NonCoherent,
    /// `riommu`: tables that the hardware snoops.
    #[serde(rename = "riommu")]
    Coherent,
}

impl Variant {
    /// Both variants, in the order of the tables.
    pub const ALL: [Self; 2] = [Self::NonCoherent, Self::Coherent];

    /// Name in the tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NonCoherent => "riommu-",
            Self::Coherent => "riommu",
        }
    }
}

/// A network adapter and its machine (section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Nic {
    /// Mellanox ConnectX3, 40 Gb/s.
    Mlx,
    /// Broadcom NetXtreme II, 10 Gb/s.
    Brcm,
}

impl Nic {
    /// Name in the tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mlx => "mlx",
            Self::Brcm => "brcm",
        }
    }
}

/// A benchmark (section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Benchmark {
    /// Netperf TCP stream.
    #[serde(rename = "stream")]
    Stream,
    /// Netperf UDP request-response.
    #[serde(rename = "rr")]
    Rr,
    /// Apache, 1 MB files.
    #[serde(rename = "apache 1M")]
    Apache1M,
    /// Apache, 1 KB files.
    #[serde(rename = "apache 1K")]
    Apache1K,
    /// Memcached, a key-value server.
    #[serde(rename = "memcached")]
    Memcached,
}

impl Benchmark {
    /// Name in Table 2.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Rr => "rr",
            Self::Apache1M => "apache 1M",
            Self::Apache1K => "apache 1K",
            Self::Memcached => "memcached",
        }
    }
}

/// A metric of Table 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// Throughput; more is better.
    Throughput,
    /// CPU cycles; fewer are better.
    Cpu,
}

/// A column of Table 1: cycles of one map and one unmap by component, mlx stream.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Table1Column {
    /// Mode of the column.
    pub mode: Baseline,
    /// Map: IOVA allocation.
    pub alloc: f64,
    /// Map: page table.
    pub map_table: f64,
    /// Map: all other work.
    pub map_other: f64,
    /// Unmap: search for the IOVA.
    pub find: f64,
    /// Unmap: free of the IOVA.
    pub free: f64,
    /// Unmap: page table.
    pub unmap_table: f64,
    /// Unmap: IOTLB invalidation.
    pub invalidation: f64,
    /// Unmap: all other work.
    pub unmap_other: f64,
}

impl Table1Column {
    /// Cycles of a map: the sum of its components.
    pub fn map(&self) -> f64 {
        self.alloc + self.map_table + self.map_other
    }

    /// Cycles of an unmap: the sum of its components.
    pub fn unmap(&self) -> f64 {
        self.find + self.free + self.unmap_table + self.invalidation + self.unmap_other
    }
}

/// Table 1 of the rIOMMU paper.
pub static TABLE_1: [Table1Column; 4] = [
    Table1Column {
        mode: Baseline::Strict,
        alloc: 3986.0,
        map_table: 588.0,
        map_other: 44.0,
        find: 249.0,
        free: 159.0,
        unmap_table: 438.0,
        invalidation: 2127.0,
        unmap_other: 26.0,
    },
    Table1Column {
        mode: Baseline::StrictPlus,
        alloc: 92.0,
        map_table: 590.0,
        map_other: 45.0,
        find: 418.0,
        free: 62.0,
        unmap_table: 427.0,
        invalidation: 2135.0,
        unmap_other: 25.0,
    },
    Table1Column {
        mode: Baseline::Defer,
        alloc: 1674.0,
        map_table: 533.0,
        map_other: 44.0,
        find: 263.0,
        free: 189.0,
        unmap_table: 471.0,
        invalidation: 9.0,
        unmap_other: 205.0,
    },
    Table1Column {
        mode: Baseline::DeferPlus,
        alloc: 108.0,
        map_table: 577.0,
        map_other: 42.0,
        find: 454.0,
        free: 57.0,
        unmap_table: 504.0,
        invalidation: 9.0,
        unmap_other: 216.0,
    },
];

/// A row of Table 2: ratios of each variant to each of [`BASELINES`], printed with two decimals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Table2Row {
    /// Network adapter of the measured machine.
    pub nic: Nic,
    /// Benchmark that the ratios describe.
    pub benchmark: Benchmark,
    /// Ratios of throughput, indexed by [`Variant::ALL`], then by [`BASELINES`].
    pub throughput: [[f64; 5]; 2],
    /// Ratios of CPU cycles, indexed by [`Variant::ALL`], then by [`BASELINES`].
    pub cpu: [[f64; 5]; 2],
}

impl Table2Row {
    /// Returns the ratio of `variant` to `baseline`.
    pub fn ratio(&self, metric: Metric, variant: Variant, baseline: Baseline) -> f64 {
        let of_metric = match metric {
            Metric::Throughput => self.throughput,
            Metric::Cpu => self.cpu,
        };
        of_metric[variant as usize][baseline as usize]
    }
}

/// Table 2 of the rIOMMU paper. The extra 1.00 at the end of its first row is left out: a variant
/// has only five baselines.
pub static TABLE_2: [Table2Row; 10] = [
    Table2Row {
        nic: Nic::Mlx,
        benchmark: Benchmark::Stream,
        throughput: [
            [5.12, 2.90, 2.57, 1.74, 0.52],
            [7.56, 4.28, 3.79, 2.57, 0.77],
        ],
        cpu: [
            [1.00, 1.00, 1.00, 1.00, 1.00],
            [1.00, 1.00, 1.00, 1.00, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Mlx,
        benchmark: Benchmark::Rr,
        throughput: [
            [1.23, 1.07, 1.05, 1.02, 0.95],
            [1.25, 1.09, 1.07, 1.03, 0.96],
        ],
        cpu: [
            [0.94, 0.99, 0.98, 0.99, 1.01],
            [0.93, 0.98, 0.96, 0.98, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Mlx,
        benchmark: Benchmark::Apache1M,
        throughput: [
            [5.30, 1.62, 1.58, 1.20, 0.76],
            [5.80, 1.77, 1.73, 1.31, 0.83],
        ],
        cpu: [
            [0.99, 0.99, 1.00, 1.00, 1.00],
            [0.99, 0.99, 0.99, 1.00, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Mlx,
        benchmark: Benchmark::Apache1K,
        throughput: [
            [2.32, 1.08, 1.07, 1.03, 0.92],
            [2.32, 1.08, 1.07, 1.03, 0.92],
        ],
        cpu: [
            [0.99, 1.00, 1.00, 1.00, 1.00],
            [0.99, 1.00, 1.00, 1.00, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Mlx,
        benchmark: Benchmark::Memcached,
        throughput: [
            [4.77, 1.17, 1.25, 1.03, 0.82],
            [4.88, 1.19, 1.28, 1.05, 0.83],
        ],
        cpu: [
            [1.00, 1.00, 1.00, 1.00, 1.00],
            [1.00, 1.00, 1.00, 1.00, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Brcm,
        benchmark: Benchmark::Stream,
        throughput: [
            [2.17, 1.00, 1.00, 1.00, 1.00],
            [2.17, 1.00, 1.00, 1.00, 1.00],
        ],
        cpu: [
            [0.40, 0.50, 0.64, 0.81, 1.21],
            [0.36, 0.45, 0.58, 0.73, 1.09],
        ],
    },
    Table2Row {
        nic: Nic::Brcm,
        benchmark: Benchmark::Rr,
        throughput: [
            [1.19, 1.05, 1.04, 1.02, 0.99],
            [1.21, 1.06, 1.05, 1.03, 1.00],
        ],
        cpu: [
            [0.86, 0.96, 0.96, 1.00, 1.11],
            [0.84, 0.93, 0.93, 0.98, 1.08],
        ],
    },
    Table2Row {
        nic: Nic::Brcm,
        benchmark: Benchmark::Apache1M,
        throughput: [
            [1.20, 1.01, 1.00, 1.00, 1.00],
            [1.20, 1.01, 1.00, 1.00, 1.00],
        ],
        cpu: [
            [0.48, 0.49, 0.60, 0.75, 1.41],
            [0.41, 0.42, 0.52, 0.65, 1.22],
        ],
    },
    Table2Row {
        nic: Nic::Brcm,
        benchmark: Benchmark::Apache1K,
        throughput: [
            [1.24, 1.13, 1.08, 1.02, 0.89],
            [1.29, 1.18, 1.13, 1.07, 0.93],
        ],
        cpu: [
            [0.99, 0.99, 0.99, 1.00, 1.00],
            [0.99, 1.00, 1.00, 1.00, 1.00],
        ],
    },
    Table2Row {
        nic: Nic::Brcm,
        benchmark: Benchmark::Memcached,
        throughput: [
            [1.76, 1.35, 1.18, 1.10, 0.78],
            [1.88, 1.45, 1.27, 1.18, 0.84],
        ],
        cpu: [
            [1.00, 1.00, 1.00, 1.00, 1.00],
            [1.00, 1.00, 1.00, 1.00, 1.00],
        ],
    },
];

/// The row of Table 2 that the throughput model describes: mlx, stream.
pub static MLX_STREAM: &Table2Row = &TABLE_2[0];

/// A row of Table 3: round-trip times of request-response in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Table3Row {
    /// Network adapter of the measured machine.
    pub nic: Nic,
    /// Round-trip times, indexed by [`BASELINES`].
    pub baselines: [f64; 5],
    /// Round-trip times, indexed by [`Variant::ALL`].
    pub variants: [f64; 2],
}

/// Table 3 of the rIOMMU paper.
pub static TABLE_3: [Table3Row; 2] = [
    Table3Row {
        nic: Nic::Mlx,
        baselines: [17.3, 15.1, 14.9, 14.4, 13.4],
        variants: [14.1, 13.9],
    },
    Table3Row {
        nic: Nic::Brcm,
        baselines: [41.9, 36.7, 36.6, 35.8, 34.6],
        variants: [35.1, 34.7],
    },
];
