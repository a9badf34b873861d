//! The route of a request: through its port, then to a sibling, to the interrupt logic, or through
//! the IOMMU to memory.

use ringfence_hw::{
    AddressType, INTERRUPT_RANGE, Interrupt, InterruptFault, InterruptRemapping, InterruptRequest,
    TranslationService,
};
use ringfence_types::{Access, Fault, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId};

use super::{Acs, Topology};
use crate::{DmaRequest, Observer};

/// A request as a device sends it. All fields except `sender` are the device's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FabricRequest {
    /// The device that sends it. The port knows the device by its link.
    pub sender: RequesterId,
    /// The requester ID in the request.
    pub requester: RequesterId,
    /// The AT field.
    pub address_type: AddressType,
    /// Address of the first byte: an IOVA, or a host address if it is translated.
    pub address: Iova,
    /// Length in bytes.
    pub bytes: u64,
    /// Read or write.
    pub access: Access,
    /// The first four bytes of a write, which are the data of an interrupt request.
    pub data: u32,
}

impl FabricRequest {
    /// Creates an untranslated request by `sender` with its own requester ID.
    pub const fn own(sender: RequesterId, address: Iova, bytes: u64, access: Access) -> Self {
        Self {
            sender,
            requester: sender,
            address_type: AddressType::Untranslated,
            address,
            bytes,
            access,
            data: 0,
        }
    }
}

/// Target that a request reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Routed {
    /// Memory, through the IOMMU.
    Memory(Vec<PhysRange>),
    /// Registers of a device below `port_bus`, without the IOMMU.
    PeerDirect {
        /// First bus of the peer's port.
        port_bus: u8,
    },
    /// Registers of a device below `port_bus`, at an address that the IOMMU permitted.
    PeerTranslated {
        /// First bus of the peer's port.
        port_bus: u8,
    },
    /// A valid interrupt request, after remapping.
    Interrupt(Interrupt),
    /// No target: the root complex ignores the request.
    Dropped,
}

/// Reason why a request was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FabricError {
    /// No port is above the sender.
    #[error("no port is above {0}")]
    NoPort(RequesterId),
    /// ACS violation: the bus number of the requester ID is not below the sender's port.
    #[error("{sender} sent a request as {requester}: blocked by ACS source validation")]
    ForeignRequester {
        /// The device that sent it.
        sender: RequesterId,
        /// The requester ID in the request.
        requester: RequesterId,
    },
    /// ACS violation: the AT field is not 00b.
    #[error("{0} sent a request with a translated address: blocked by ACS translation blocking")]
    TranslatedAddress(RequesterId),
    /// A translation request is no access; send it through [`Bus`](crate::Bus).
    #[error("a translation request of {0} accesses nothing")]
    TranslationRequest(RequesterId),
    /// The interrupt logic blocked an interrupt request.
    #[error(transparent)]
    Interrupt(#[from] InterruptFault),
    /// A read of interrupt addresses, or a write of another length than 4 bytes.
    #[error("{0} made an unsupported access to the addresses of interrupt requests")]
    UnsupportedInterruptAccess(RequesterId),
    /// The IOMMU blocked the request.
    #[error(transparent)]
    Blocked(#[from] Fault),
}

/// The root complex: ports, the IOMMU, and interrupt remapping.
#[derive(Debug)]
pub struct RootComplex<U> {
    /// Translates requests that no port routes to a sibling.
    pub unit: U,
    /// Ports, which route and check requests before the root complex.
    pub topology: Topology,
    /// Remaps or blocks writes to the addresses of interrupt requests.
    pub interrupts: InterruptRemapping,
}

impl<U: TranslationService> RootComplex<U> {
    /// Creates a root complex without ports. Interrupt remapping is disabled.
    pub const fn new(unit: U) -> Self {
        Self {
            unit,
            topology: Topology::new(),
            interrupts: InterruptRemapping::Disabled,
        }
    }

    /// Routes a request and reports an access to memory to `observer`, as an access by the true
    /// sender. Moves no byte.
    ///
    /// # Errors
    /// [`FabricError`]; the request reached nothing.
    pub fn route<M: PhysMemory + ?Sized, O: Observer>(
        &mut self,
        mem: &M,
        request: &FabricRequest,
        mut observer: O,
    ) -> Result<Routed, FabricError> {
        let sender = request.sender;
        let port = self
            .topology
            .port_of(sender)
            .ok_or(FabricError::NoPort(sender))?;
        let requester = port.received(request.requester);
        if port.acs.contains(Acs::SOURCE_VALIDATION) && !port.has_bus(requester.bus()) {
            return Err(FabricError::ForeignRequester { sender, requester });
        }
        if port.acs.contains(Acs::TRANSLATION_BLOCKING)
            && request.address_type != AddressType::Untranslated
        {
            return Err(FabricError::TranslatedAddress(sender));
        }
        // A switch routes by the address in the request, before any translation.
        if !port.acs.contains(Acs::REQUEST_REDIRECT)
            && let Some(peer) = self
                .topology
                .port_decoding(PhysAddr::new(request.address.get()))
        {
            return Ok(Routed::PeerDirect {
                port_bus: peer.first_bus,
            });
        }
        if request.address_type == AddressType::Untranslated
            && INTERRUPT_RANGE.contains_address(PhysAddr::new(request.address.get()))
        {
            return self.interrupt(mem, requester, request);
        }
        self.memory(mem, requester, request, &mut observer)
    }

    fn interrupt<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        requester: RequesterId,
        request: &FabricRequest,
    ) -> Result<Routed, FabricError> {
        let decoded = match (request.access, request.bytes) {
            (Access::Write, 4) => InterruptRequest::decode(&request.address, request.data),
            _ => None,
        };
        let decoded = decoded.ok_or(FabricError::UnsupportedInterruptAccess(request.sender))?;
        let interrupt = self.interrupts.remap(mem, requester, decoded)?;
        Ok(interrupt.map_or(Routed::Dropped, Routed::Interrupt))
    }

    fn memory<M: PhysMemory + ?Sized, O: Observer>(
        &mut self,
        mem: &M,
        requester: RequesterId,
        request: &FabricRequest,
        observer: &mut O,
    ) -> Result<Routed, FabricError> {
        let FabricRequest {
            address,
            bytes,
            access,
            ..
        } = *request;
        let observed = DmaRequest {
            device: request.sender,
            iova: address,
            bytes,
            access,
        };
        let translated = match request.address_type {
            AddressType::Untranslated => {
                self.unit.translate(mem, requester, address, bytes, access)
            }
            AddressType::Translated => {
                let at = PhysAddr::new(address.get());
                self.unit
                    .translated_request(mem, requester, at, bytes, access)
            }
            AddressType::TranslationRequest => {
                return Err(FabricError::TranslationRequest(request.sender));
            }
        };
        match translated {
            Ok(ranges) => {
                let first = ranges.first().start();
                if let Some(peer) = self.topology.port_decoding(first) {
                    return Ok(Routed::PeerTranslated {
                        port_bus: peer.first_bus,
                    });
                }
                observer.allowed(&observed, &ranges);
                Ok(Routed::Memory(ranges.to_vec()))
            }
            Err(fault) => {
                observer.faulted(&observed, &fault);
                Err(fault.into())
            }
        }
    }
}
