//! Cost profiles: what no user program can execute is charged from here, and the geometry of the modelled hardware.

/// Costs and geometry of one platform. Charged cycles are the platform's own; executed cycles are those of the processor that runs the
/// replay. Reports keep the two apart.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Name, as given to `--profile`.
    pub name: String,
    /// Where the numbers come from.
    pub source: String,
    /// Cycles of one IOTLB invalidation, from the submission to its completion. Charged per invalidation command.
    pub invalidation_cycles: u64,
    /// Cycles a device waits for an IOTLB miss. Reported beside the hit rate; no part of the processor's cost.
    pub miss_cycles: u64,
    /// Cycles a packet costs without protection, per mapping: the c of `relative_throughput`.
    pub c_none: f64,
    /// Whether the page walker snoops the processor's caches.
    pub coherent: bool,
    /// IOTLB sets, a power of two.
    pub iotlb_sets: u32,
    /// IOTLB ways.
    pub iotlb_ways: u32,
    /// Entries of the page-walk caches of level 1 (upper end of a leaf table), 2 and 3.
    pub walk_cache: [u32; 3],
}

impl Profile {
    /// The machine of the rIOMMU and EIOVAR documents: Dell R210, Xeon E3-1220 at 3.1 GHz, Mellanox 40 Gb/s.
    ///
    /// Invalidation: about 2150 cycles (rIOMMU section 5.1; Table 1 prints 2127 to 2135). Miss: 1532 cycles (section 5.3). c: half
    /// of the 1816 cycles that a packet of two mappings costs without protection (Fig. 7). The documents print neither
    /// IOTLB nor walk-cache geometry; these are assumptions, printed with every report.
    pub fn r210_2015() -> Self {
        Self {
            name: "r210-2015".into(),
            source: "rIOMMU (ASPLOS'15) Table 1, sections 5.1 and 5.3, Fig. 7; geometry assumed"
                .into(),
            invalidation_cycles: 2150,
            miss_cycles: 1532,
            c_none: 908.0,
            coherent: true,
            iotlb_sets: 16,
            iotlb_ways: 4,
            walk_cache: [32, 16, 4],
        }
    }

    /// Profiles that come with the program.
    pub fn builtin() -> Vec<Self> {
        vec![Self::r210_2015()]
    }
}
