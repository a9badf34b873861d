//! A12, A15, A16: attacks in the PCI Express fabric, in front of the IOMMU.
//!
//! The fabric routes a request before the mode's IOMMU sees it. Each class runs on plain PCI, which
//! decides, and with the remedy, for comparison.

use ringfence_devices::fabric::{Acs, AttachedBelow, FabricRequest, Port, RootComplex, Routed};
use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::{
    AddressType, CompatibilityFormat, Interrupt, InterruptEntry, InterruptRemapping,
    SourceValidation, Translate, Translation, TranslationCompletion, TranslationService,
};
use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_lab::testbed::Machine;
use ringfence_types::{
    Access, Direction, Fault, FaultReason, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId,
};

use super::ScenarioResult;
use crate::bench::{Bench, DEVICES, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Registers of the victim's device, outside memory.
const PEER: u64 = 0xd000_0000;
/// First address of interrupt requests.
const INTERRUPTS: u64 = 0xfee0_0000;

/// The mode's IOMMU as the unit of a root complex.
struct MachineUnit<'a> {
    machine: &'a mut dyn Machine,
    ranges: Vec<PhysRange>,
}

/// Collects the memory that accesses reach.
pub(super) struct Collect<'a>(pub(super) &'a mut Vec<PhysRange>);

impl Observer for Collect<'_> {
    fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
        self.0.extend_from_slice(ranges);
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

fn blocked(device: RequesterId, iova: Iova, access: Access) -> Fault {
    Fault {
        device,
        iova,
        access,
        reason: FaultReason::RequestTypeBlocked,
    }
}

impl Translate for MachineUnit<'_> {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        _: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        self.ranges.clear();
        let request = DmaRequest {
            device,
            iova,
            bytes,
            access,
        };
        self.machine
            .probe(&request, &mut Collect(&mut self.ranges))?;
        Translation::many(&self.ranges).ok_or(blocked(device, iova, access))
    }
}

/// The context entries of these scenarios permit no device TLB.
impl TranslationService for MachineUnit<'_> {
    fn translation_request<M: PhysMemory + ?Sized>(
        &mut self,
        _: &M,
        device: RequesterId,
        iova: Iova,
    ) -> TranslationCompletion {
        TranslationCompletion::UnsupportedRequest(blocked(device, iova, Access::Read))
    }

    fn translated_request<M: PhysMemory + ?Sized>(
        &mut self,
        _: &M,
        device: RequesterId,
        at: PhysAddr,
        _: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        Err(blocked(device, Iova::new(at.get()), access))
    }
}

/// The ports above the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ports {
    /// One port for each device. The first device has registers at [`PEER`].
    Separate,
    /// One port, a conventional bridge with both devices behind it. All requests arrive with the
    /// requester ID of the bridge's secondary bus, which is also the first device's.
    Bridge,
}

/// Routes a request through the ports above its sender.
fn route(
    bench: &mut Bench,
    ports: Ports,
    acs: Acs,
    interrupts: InterruptRemapping,
    request: &FabricRequest,
) -> Result<Option<Routed>, LabError> {
    let buses: Vec<u8> = (0..DEVICES)
        .map(|device| Ok(bench.requester(device)?.bus()))
        .collect::<Result<_, LabError>>()?;
    let memory = bench.machine().memory();
    let mut complex = RootComplex::new(MachineUnit {
        machine: bench.machine(),
        ranges: Vec::new(),
    });
    complex.interrupts = interrupts;
    let first = buses.iter().copied().min().unwrap_or_default();
    let last = buses.iter().copied().max().unwrap_or_default();
    let spans = match ports {
        Ports::Separate => buses.into_iter().map(|bus| (bus, bus)).collect(),
        Ports::Bridge => vec![(first, last)],
    };
    for (index, (first_bus, last_bus)) in spans.into_iter().enumerate() {
        let window = PhysRange::new(PhysAddr::new(PEER), 0x1000)
            .filter(|_| index == 0 && ports == Ports::Separate);
        let port = Port {
            first_bus,
            last_bus,
            acs,
            below: match ports {
                Ports::Separate => AttachedBelow::Express,
                Ports::Bridge => AttachedBelow::ConventionalBridge {
                    secondary_bus: first_bus,
                },
            },
            windows: window.into_iter().collect(),
        };
        let added = complex.topology.add(port);
        added.map_err(|_| LabError::Internal("two devices on one bus"))?;
    }
    Ok(complex.route(&*memory, request, ()).ok())
}

/// A12: the attacker's device sends requests with the requester ID of the victim's device. Behind a
/// conventional bridge, the attacker sends its own, and the bridge replaces it.
///
/// Expected: source validation stops every forged ID of another port. It stops no request behind a
/// bridge, because the bridge's ID belongs to the port.
pub(crate) fn forged_requester(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for ports in [Ports::Separate, Ports::Bridge] {
        for acs in [Acs::NONE, Acs::SOURCE_VALIDATION] {
            let evidence = foreign_address(mode, ports, acs)?;
            match (ports, acs == Acs::NONE) {
                (Ports::Separate, true) => executed.trial("without ACS", evidence),
                (Ports::Separate, false) => executed.comparison("ACS source validation", evidence),
                (Ports::Bridge, true) => executed.trial("behind a bridge", evidence),
                (Ports::Bridge, false) => {
                    executed.comparison("behind a bridge, ACS source validation", evidence);
                }
            }
        }
    }
    Ok(Found::Executed(executed))
}

/// The attacker's device accesses addresses of the victim's device, which accesses them too.
fn foreign_address(mode: &Mode, ports: Ports, acs: Acs) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let (attacker, victim) = (bench.requester(1)?, bench.requester(0)?);
    for round in 0..20 {
        let buffer = memory(0x10_0000 + round * 4096, 4096)?;
        let id = bench.map(0, buffer, Direction::Bidirectional)?;
        for access in [Access::Read, Access::Write] {
            for sender in [victim, attacker] {
                let claimed = match ports {
                    Ports::Separate => victim,
                    Ports::Bridge => sender,
                };
                let request = FabricRequest {
                    requester: claimed,
                    ..FabricRequest::own(sender, bench.range(id)?.start(), 8, access)
                };
                let off = InterruptRemapping::Disabled;
                let verdict = match route(&mut bench, ports, acs, off, &request)? {
                    Some(Routed::Memory(ranges)) => ranges
                        .first()
                        .map(|range| bench.oracle.judge(sender, range, access, bench.now())),
                    _ => None,
                };
                if sender == attacker {
                    evidence.count(verdict.as_ref());
                } else {
                    evidence.false_faults += u64::from(verdict.is_none());
                }
            }
        }
    }
    Ok(evidence)
}

/// A15: the device writes interrupt requests: any vector in the compatibility format, and the
/// entry of another device in the remappable format.
pub(crate) fn interrupt(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for remapped in [false, true] {
        let mut bench = Bench::new(mode)?;
        let mut evidence = Evidence::default();
        let interrupts = if remapped {
            table_for_victim(&mut bench)?
        } else {
            InterruptRemapping::Disabled
        };
        let sender = bench.requester(1)?;
        // Index 0 in the remappable format: bit 4 of the address.
        let addresses = [INTERRUPTS, INTERRUPTS | 3 << 12, INTERRUPTS | 1 << 4];
        for address in addresses {
            for vector in [0x02, 0x20, 0x80, 0xff] {
                let own = FabricRequest::own(sender, Iova::new(address), 4, Access::Write);
                let request = FabricRequest {
                    data: if address & 1 << 4 == 0 { vector } else { 0 },
                    ..own
                };
                let routed = route(&mut bench, Ports::Separate, Acs::NONE, interrupts, &request)?;
                evidence.count_if(matches!(routed, Some(Routed::Interrupt(_))), 4);
            }
        }
        if remapped {
            executed.comparison("interrupt remapping", evidence);
        } else {
            executed.trial("without interrupt remapping", evidence);
        }
    }
    Ok(Found::Executed(executed))
}

/// Creates a remapping table with one entry, which belongs to the victim's device.
fn table_for_victim(bench: &mut Bench) -> Result<InterruptRemapping, LabError> {
    let table = bench.machine().alloc_frame()?;
    let entry = InterruptEntry {
        interrupt: Interrupt {
            destination: 0,
            vector: 0x41,
        },
        validation: SourceValidation::Requester {
            source: bench.requester(0)?,
            ignored_function_bits: 0,
        },
    };
    let [low, high] = entry.encode();
    bench.store(table.wrapping_add(8), high)?;
    bench.store(table, low)?;
    Ok(InterruptRemapping::Enabled {
        table,
        log2_entries: 8,
        compatibility: CompatibilityFormat::Blocked,
    })
}

/// A16: the device writes registers of the victim's device, which no driver has mapped for it.
pub(crate) fn peer_to_peer(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for acs in [Acs::NONE, Acs::REQUEST_REDIRECT] {
        let mut bench = Bench::new(mode)?;
        let mut evidence = Evidence::default();
        let sender = bench.requester(1)?;
        for register in 0..16 {
            let address = Iova::new(PEER + register * 4);
            let request = FabricRequest {
                address_type: AddressType::Untranslated,
                ..FabricRequest::own(sender, address, 4, Access::Write)
            };
            let routed = route(
                &mut bench,
                Ports::Separate,
                acs,
                InterruptRemapping::Disabled,
                &request,
            )?;
            let reached = matches!(
                routed,
                Some(Routed::PeerDirect { .. } | Routed::PeerTranslated { .. })
            );
            evidence.count_if(reached, 4);
        }
        if acs == Acs::NONE {
            executed.trial("without ACS", evidence);
        } else {
            executed.comparison("ACS request redirect", evidence);
        }
    }
    Ok(Found::Executed(executed))
}
