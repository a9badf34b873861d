//! The bundled profiles. Each number has its source in the profile; numbers that no source states
//! are absent. `docs/PROFILES.md` lists them.

use super::{DeviceSide, MachineProfile, Reported};
use crate::iommu_family::IommuFamily;
use crate::profile::Profile;

const FANDS: &str = "F&S (Fast & Safe IO Memory Protection, SOSP 2024)";

impl MachineProfile {
    /// Returns the bundled profiles, the default of `compare` first.
    pub fn builtin() -> Vec<Self> {
        vec![
            Self::r210_2015(),
            Self::cascade_lake_2024(),
            Self::ice_lake_2024(),
            Self::ice_lake_2025(),
            Self::grace_2025(),
            Self::graviton4_2026(),
            Self::epyc_2023(),
            Self::ryzen_2021(),
        ]
    }

    /// The machine of the rIOMMU and EIOVAR papers; see [`Profile::r210_2015`].
    pub fn r210_2015() -> Self {
        const ASSUMED: &str = "assumed";
        Self {
            clock_ghz: Some(3.1),
            ..Self::from(Profile::r210_2015())
        }
        .sourced([
            ("clock_ghz", "rIOMMU: Xeon E3-1220 at 3.1 GHz"),
            (
                "invalidation_cycles",
                "rIOMMU section 5.1 waits 2150; Table 1 prints 2127 to 2135",
            ),
            (
                "kick_cycles",
                "assumed: the order of a guest exit and the entry back",
            ),
            (
                "hypercall_cycles",
                "assumed: the order of an exit and the entry back",
            ),
            ("miss_cycles", "rIOMMU section 5.3"),
            (
                "baseline_cycles",
                "rIOMMU Fig. 7: half of the 1816 cycles of a packet with two mappings",
            ),
            ("coherent", "rIOMMU section 3.2: page walks do not snoop"),
            ("iotlb_sets", ASSUMED),
            ("iotlb_ways", ASSUMED),
            ("walk_cache_entries", ASSUMED),
        ])
    }

    /// The server of section 2.2 of F&S, whose measurements the paper fits its model to: four
    /// Xeon Gold 6234, a ConnectX-5 at 100 Gb/s on PCIe 3.0, Linux 6.0, no DDIO.
    ///
    /// - Device side: the paper fits l0 = 65 ns and lm = 197 ns to packets of 4 KB.
    /// - Page: five cores are the minimum that saturates the link with packets of 4 KB. A page
    ///   takes 327.68 ns of the link, so at most 5 x 327.68 ns of a core: 5407 cycles. Four cores
    ///   do not suffice, so it is more than 4325.
    /// - Reported: without protection the link is saturated; strict loses 20% with 5 flows and 65%
    ///   with 40.
    pub fn cascade_lake_2024() -> Self {
        Self {
            clock_ghz: Some(3.3),
            page_cycles: Some(5407.0),
            device_side: Some(DeviceSide {
                transfer_bytes: 4096,
                transfer_ns: 65.0,
                read_ns: 197.0,
                line_rate_gbps: 100.0,
            }),
            reported: vec![
                reported("iperf receive, 5 flows", "Gb/s", FANDS_2A)
                    .none(100.0)
                    .strict(80.0),
                reported("iperf receive, 40 flows", "Gb/s", FANDS_2A)
                    .none(100.0)
                    .strict(35.0),
            ],
            iommu: Some(IommuFamily::Vtd),
            ..Self::unknown(
                "cascade-lake-2024",
                format!("{FANDS}, section 2.2: Xeon Gold 6234, 100 Gb/s ConnectX-5"),
            )
        }
        .sourced([
            ("clock_ghz", "F&S section 2.2: 3.3 GHz"),
            (
                "page_cycles",
                "derived from F&S section 2.2: five cores, and no fewer, saturate 100 Gb/s with 4 \
                KB packets; an upper bound",
            ),
            (
                "device_side",
                "F&S section 2.2: p = 4 KB, l0 = 65 ns and lm = 197 ns fitted to the runs with 5 \
                and 10 flows; 100 Gb/s ConnectX-5",
            ),
        ])
    }

    /// The Ice Lake server of Fig. 10 of F&S: Xeon Platinum 8362, 32 cores per socket, receiving
    /// and sending at once.
    ///
    /// - Page: four cores saturate the link in each direction, so a received page takes at most 4 x
    ///   327.68 ns of a core: 3670 cycles.
    /// - Reported: strict loses up to about 80%.
    ///
    /// The paper fits l0 and lm on the other server, so this profile has no device side.
    pub fn ice_lake_2024() -> Self {
        const FIG_10: &str = "F&S section 4.1 and Fig. 10: up to about 80% lower; from the stated \
            share";
        Self {
            clock_ghz: Some(2.8),
            page_cycles: Some(3670.0),
            reported: vec![
                reported("iperf receive and send, 4 flows each", "Gb/s", FIG_10)
                    .none(100.0)
                    .strict(20.0),
            ],
            iommu: Some(IommuFamily::Vtd),
            ..Self::unknown(
                "ice-lake-2024",
                format!("{FANDS}, Fig. 10: Xeon Platinum 8362, 100 Gb/s ConnectX-5"),
            )
        }
        .sourced([
            (
                "clock_ghz",
                "brand string of the processor: Intel(R) Xeon(R) Platinum 8362 CPU @ 2.80GHz",
            ),
            (
                "page_cycles",
                "derived from F&S section 4.1: four cores saturate 100 Gb/s of receiving; an upper \
                bound",
            ),
        ])
    }

    /// A server with a Xeon Platinum 8380 and a ConnectX-7, one socket in use.
    ///
    /// Page: one core runs the application and the interrupts, and receives 69.3 Gb/s with
    /// `epoll` and an MTU of 4096. A page of data takes 472.8 ns of that core.
    pub fn ice_lake_2025() -> Self {
        const ZCRX: &str = "Toukan, [PATCH net-next V2 00/11] net/mlx5e: Add support for devmem \
            and io_uring TCP zero-copy (2025-05-22), message \
            1747950086-1246773-1-git-send-email-tariqt@nvidia.com";
        Self {
            clock_ghz: Some(2.3),
            page_cycles: Some(1088.0),
            iommu: Some(IommuFamily::Vtd),
            ..Self::unknown(
                "ice-lake-2025",
                format!("{ZCRX}: Xeon Platinum 8380, ConnectX-7"),
            )
        }
        .sourced([
            (
                "clock_ghz",
                "brand string of the processor: Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz",
            ),
            (
                "page_cycles",
                "derived: one core receives 69.3 Gb/s with epoll and an MTU of 4096, so a page \
                takes 472.8 ns; the source does not state whether the IOMMU was on",
            ),
        ])
    }

    /// Two NVIDIA Grace sockets with four NVMe drives each. Only throughputs are published.
    pub fn grace_2025() -> Self {
        const PULL: &str = "NVIDIA/NV-Kernels pull request 182 (2025-08-06)";
        Self {
            reported: vec![
                reported("4 KiB random reads of 8 NVMe drives", "M IOPS", PULL)
                    .none(16.5)
                    .lazy(16.4)
                    .strict(2.8),
            ],
            iommu: Some(IommuFamily::Smmuv3),
            ..Self::unknown("grace-2025", format!("{PULL}: two Grace sockets"))
        }
    }

    /// An AWS m8g.metal-24xl with Graviton4, Debian 13, Linux 6.12.74. Only throughputs are
    /// published.
    pub fn graviton4_2026() -> Self {
        const PATCH: &str = "Abdul, [RFC PATCH] iommu: Default to lazy DMA mode on ARM64 \
            (2026-04-02), message 20260402195913.32084-1-nafeabd@amazon.com";
        Self {
            reported: vec![reported("iperf3", "Gb/s", PATCH).lazy(39.8).strict(14.9)],
            iommu: Some(IommuFamily::Smmuv3),
            ..Self::unknown("graviton4-2026", format!("{PATCH}: AWS m8g.metal-24xl"))
        }
    }

    /// The AMD EPYC of Farshin et al. at 200 Gb/s. The abstract states one share, for this machine
    /// and for Xeons alike.
    pub fn epyc_2023() -> Self {
        const PEERJ: &str = "Farshin, Rizzo, Elmeleegy and Kostic, Overcoming the IOTLB wall for \
            multi-100-Gbps Linux-based networking (PeerJ CS 9:e1385, 2023)";
        const ABSTRACT: &str = "PeerJ CS 9:e1385, abstract: up to 20% lower throughput with the \
            IOMMU, on Xeon Scalable and EPYC; booted with amd_iommu=on iommu=on, so deferred";
        Self {
            reported: vec![
                reported("iperf, 200 Gb/s, worst case", "share of none", ABSTRACT)
                    .none(1.0)
                    .lazy(0.8),
            ],
            iommu: Some(IommuFamily::AmdVi),
            ..Self::unknown("epyc-2023", format!("{PEERJ}: AMD EPYC, 200 Gb/s"))
        }
    }

    /// A desktop: AMD Ryzen 9 5950X with two Optane P5800X drives.
    ///
    /// Block request: 10 M requests per second on one core, so 100 ns each, or 340 cycles of the
    /// time-stamp counter.
    pub fn ryzen_2021() -> Self {
        const TEN_MILLION: &str = "Axboe, 2021-10-25, in Phoronix, Newest Linux Optimizations Can \
            Achieve 10M IOPS Per-Core With IO_uring";
        Self {
            clock_ghz: Some(3.4),
            block_request_cycles: Some(340.0),
            iommu: Some(IommuFamily::AmdVi),
            ..Self::unknown(
                "ryzen-2021",
                format!("{TEN_MILLION}: Ryzen 9 5950X, two Optane P5800X"),
            )
        }
        .sourced([
            (
                "clock_ghz",
                "base clock as Windows prints it: AMD Ryzen 9 5950X 16-Core Processor (3.40 GHz)",
            ),
            (
                "block_request_cycles",
                "derived: 10 M requests per second on one core; the source does not state whether \
                the IOMMU was on",
            ),
        ])
    }

    fn sourced<const N: usize>(mut self, sources: [(&str, &str); N]) -> Self {
        let sources = sources.map(|(field, source)| (field.to_owned(), source.to_owned()));
        self.sources.extend(sources);
        self
    }
}

const FANDS_2A: &str = "F&S section 2.2 and Fig. 2a: 20 to 65% lower; from the stated shares";

fn reported(workload: &str, unit: &str, source: &str) -> Reported {
    Reported {
        workload: workload.to_owned(),
        unit: unit.to_owned(),
        none: None,
        lazy: None,
        strict: None,
        source: source.to_owned(),
    }
}

impl Reported {
    fn none(self, value: f64) -> Self {
        Self {
            none: Some(value),
            ..self
        }
    }

    fn lazy(self, value: f64) -> Self {
        Self {
            lazy: Some(value),
            ..self
        }
    }

    fn strict(self, value: f64) -> Self {
        Self {
            strict: Some(value),
            ..self
        }
    }
}
