//! The machine of X20: a declared profile, and throughput and processor use of a scenario.
//!
//! The slides print neither cycles nor the machine's clock. Nothing here is fitted to their
//! results; each number has a source or is marked as assumed.

use ringfence_lab::Profile;

/// Message sizes of the plots' axis, in bytes.
pub(super) const MESSAGES: [u64; 15] = [
    64, 128, 256, 512, 1024, 1460, 1480, 2048, 4096, 8192, 16384, 32768, 65536, 131_072, 262_144,
];

/// Clock in Hz. Assumed: the slower of the two processors of the xSeries x366 (Xeon MP).
pub(super) const CLOCK: f64 = 3.16e9;
/// Payload of a full frame: 1500 bytes less headers of IP and TCP with timestamps.
const SEGMENT: u64 = 1448;
/// Bytes on the wire of a frame beyond its payload: headers, checksum, preamble and gap.
const FRAMING: u64 = 52 + 38;
/// The link: Gigabit Ethernet, in bytes per second.
const LINK: f64 = 125e6;
/// Cycles per bit of a bulk TCP transfer: the rule of 1 GHz for 1 Gb/s (Foong et al., ISPASS 2003,
/// which examines it).
const CYCLES_PER_BIT: f64 = 1.0;
/// Native cycles of a full frame.
pub(super) const FRAME_CYCLES: f64 = CYCLES_PER_BIT * 8.0 * SEGMENT as f64;
/// Cycles per byte that the copy to the user takes, of those. Assumed.
pub(super) const COPY_PER_BYTE: f64 = 1.0;
/// Receive throughput of Xen's driver domain and of a guest behind it, as shares of native Linux.
/// Menon, Cox and Zwaenepoel (USENIX 2006) reach 0.93 after a gain of 35%, and 0.39 after a gain of
/// 18%.
const DRIVER_DOMAIN: f64 = 0.93 / 1.35;
const GUEST: f64 = 0.39 / 1.18;
/// Map/unmap pairs of a received frame: its buffer, and half of an acknowledgement.
pub(super) const PAIRS_PER_FRAME: f64 = 1.5;

/// Reads of registers in a flush of Calgary's TCE cache: two to stop arbitration, one of the split
/// queue, one to flush the last write (Linux, `calgary_tce_cache_blast`).
const FLUSH_READS: u64 = 4;
/// Nanoseconds of a read of a chipset register. Assumed.
const REGISTER_READ_NS: u64 = 500;

/// Costs of the modelled machine. Its walks do not snoop: Linux writes every TCE back
/// (`flush_tce`).
pub(super) fn profile(setting: &Profile) -> Profile {
    Profile {
        name: "x366-2007".into(),
        source: "X20: register reads of the Linux driver, 500 ns each (assumed); hypercall and \
            geometry of the default profile"
            .into(),
        invalidation_cycles: FLUSH_READS * REGISTER_READ_NS * 316 / 100,
        coherent: false,
        ..setting.clone()
    }
}

/// The system that the netperf server runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scenario {
    /// A kernel without a hypervisor.
    BareMetal,
    /// dom0, which drives the device.
    DirectAccess,
    /// A guest behind dom0, which drives the device.
    DriverDomain,
}

impl Scenario {
    pub(super) const ALL: [Self; 3] = [Self::BareMetal, Self::DirectAccess, Self::DriverDomain];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::BareMetal => "bare metal",
            Self::DirectAccess => "direct access (dom0)",
            Self::DriverDomain => "driver domain (domU via dom0)",
        }
    }

    /// Returns the mode that drives the IOMMU: Linux as merged, and the straightforward hypercalls
    /// of the prototype.
    pub(super) const fn mode(self) -> &'static str {
        match self {
            Self::BareMetal => "calgary-lazy",
            Self::DirectAccess | Self::DriverDomain => "xen",
        }
    }

    /// Returns the work of the domain that drives the device and of the guest behind it, as
    /// multiples of native work. They have a processor each.
    pub(super) fn work(self) -> [f64; 2] {
        match self {
            Self::BareMetal => [1.0, 0.0],
            Self::DirectAccess => [1.0 / DRIVER_DOMAIN, 0.0],
            Self::DriverDomain => [1.0 / DRIVER_DOMAIN, 1.0 / GUEST - 1.0 / DRIVER_DOMAIN],
        }
    }
}

/// Frames of a message. Small messages are not joined: the sender disables Nagle's algorithm
/// (assumed; otherwise the size of a message would hardly matter to the receiver).
fn frames(message: u64) -> u64 {
    message.div_ceil(SEGMENT)
}

/// Native cycles of a message. Frames cost the same, and each byte is copied once.
fn native(message: u64) -> f64 {
    let frame = FRAME_CYCLES - COPY_PER_BYTE * SEGMENT as f64;
    frames(message) as f64 * frame + message as f64 * COPY_PER_BYTE
}

/// Throughput and use of processors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rate {
    /// Mb/s of payload.
    pub(super) mbps: f64,
    /// Busy share of one processor, summed over processors.
    pub(super) busy: f64,
}

impl Rate {
    /// Returns the rate of work on two processors: `work` has the cycles of each for a message. The
    /// busier one, or the link, limits it.
    pub(super) fn of(message: u64, work: [f64; 2]) -> Self {
        let wire = (message + frames(message) * FRAMING) as f64;
        let messages = (LINK / wire).min(CLOCK / work[0].max(work[1]));
        Self {
            mbps: messages * message as f64 * 8.0 / 1e6,
            busy: messages * (work[0] + work[1]) / CLOCK,
        }
    }
}

/// Returns the rate of a scenario. The DMA API adds `added` cycles to each frame in the domain that
/// drives the device. `native_factor` scales the cost of a message without an IOMMU.
pub(super) fn rate(scenario: Scenario, message: u64, added: f64, native_factor: f64) -> Rate {
    let [driver, guest] = scenario.work();
    let native = native_factor * native(message);
    let dma = frames(message) as f64 * added;
    Rate::of(message, [driver * native + dma, guest * native])
}

/// Cycles per frame of the models of virtual I/O beyond native work (CG15).
pub(super) mod models {
    use super::{COPY_PER_BYTE, DRIVER_DOMAIN, GUEST, Rate, frames, native};

    /// A model of virtual I/O.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in super::super) enum VirtualIo {
        /// The host emulates an adapter for an unmodified guest.
        Emulation,
        /// Frontend and backend drivers.
        FrontBack,
        /// The guest drives the device, without an IOMMU.
        Direct,
        /// The guest drives the device behind an IOMMU.
        DirectBehindIommu,
        /// Frontend and backend drivers; the backend's device is behind an IOMMU.
        DriverDomain,
    }

    impl VirtualIo {
        pub(in super::super) const ALL: [Self; 5] = [
            Self::Emulation,
            Self::FrontBack,
            Self::DriverDomain,
            Self::Direct,
            Self::DirectBehindIommu,
        ];

        pub(in super::super) const fn name(self) -> &'static str {
            match self {
                Self::Emulation => "emulation",
                Self::FrontBack => "front and back drivers",
                Self::Direct => "direct access, no IOMMU",
                Self::DirectBehindIommu => "direct access",
                Self::DriverDomain => "driver domain",
            }
        }

        /// Returns the remedy whose mode a hostile owner of the device attacks. `None` if the owner
        /// has no device: the host checks each access of an emulated one.
        pub(in super::super) const fn attacked(self) -> Option<&'static str> {
            match self {
                Self::Emulation => None,
                Self::FrontBack | Self::Direct => Some("no IOMMU"),
                Self::DirectBehindIommu => Some("straightforward hypercalls"),
                Self::DriverDomain => Some("grant table integration"),
            }
        }

        /// Returns the rate. A frame takes `added` cycles in the DMA API behind an IOMMU, and
        /// `exits` cycles in the exits of an emulated adapter.
        pub(in super::super) fn rate(self, message: u64, added: f64, exits: f64) -> Rate {
            let (native, frames) = (native(message), frames(message) as f64);
            let driver = native / DRIVER_DOMAIN;
            let guest = native / GUEST - driver;
            let work = match self {
                Self::Emulation => {
                    // The host receives the frame and copies it; the guest's driver and stack are
                    // native and exit at each register.
                    let copies = COPY_PER_BYTE * message as f64;
                    [native + copies + frames * exits, native]
                }
                Self::FrontBack => [driver, guest],
                Self::DriverDomain => [driver + frames * added, guest],
                Self::Direct => [driver, 0.0],
                Self::DirectBehindIommu => [driver + frames * added, 0.0],
            };
            Rate::of(message, work)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::emulation::EXIT;
    use super::*;

    /// Exits of a frame without coalescing, of the order that the adapter model counts.
    const EXITS: f64 = 9.0;

    #[test]
    fn the_link_or_the_busier_processor_limits() {
        // 1 GHz moves 1 Gb/s of full frames on bare metal.
        let bulk = rate(Scenario::BareMetal, SEGMENT * 100, 0.0, 1.0);
        assert!((bulk.busy * CLOCK / (bulk.mbps * 1e6) - 1.0).abs() < 1e-9);
        assert!((bulk.mbps - 941.5).abs() < 0.1, "{}", bulk.mbps);
        // Two processors of half the work each are as fast as one, and twice as busy.
        let one = Rate::of(64, [1e5, 0.0]);
        let two = Rate::of(64, [1e5, 1e5]);
        assert_eq!((one.mbps, 2.0 * one.busy), (two.mbps, two.busy));
        // A scenario costs what Menon et al. measured: the receive throughput of a saturated
        // processor falls to their share.
        let share = |scenario| {
            let saturated = rate(scenario, 64, 0.0, 10.0);
            saturated.mbps / saturated.busy / rate(Scenario::BareMetal, 64, 0.0, 10.0).mbps
        };
        assert!((share(Scenario::DirectAccess) - 0.689).abs() < 0.001);
        assert!((share(Scenario::DriverDomain) - 0.331).abs() < 0.001);
    }

    #[test]
    fn models_of_virtual_io_are_in_the_slides_order() {
        use models::VirtualIo as V;
        let added = 5000.0;
        let busy = |model: V, exits: f64| {
            let rate = model.rate(1460, added, exits);
            rate.busy / rate.mbps
        };
        let [cheap, dear] = EXIT.map(|cycles| EXITS * cycles);
        let order = [
            V::Direct,
            V::DirectBehindIommu,
            V::FrontBack,
            V::DriverDomain,
        ];
        for pair in order.windows(2) {
            assert!(busy(pair[0], cheap) < busy(pair[1], cheap), "{pair:?}");
        }
        // With all costs of its exits, emulation is the dearest.
        assert!(busy(V::Direct, cheap) < busy(V::Emulation, cheap));
        assert!(busy(V::DriverDomain, dear) < busy(V::Emulation, dear));
    }

    #[test]
    fn a_flush_is_four_register_reads() {
        let profile = profile(&Profile::r210_2015());
        // 4 x 500 ns at 3.16 GHz.
        assert_eq!(profile.invalidation_cycles, 6320);
        assert_eq!(profile.validate(), Ok(()));
    }
}
