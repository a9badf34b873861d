//! A self-virtualising network adapter: one port with several contexts, each a PCI function of its
//! own (Single Root I/O Virtualization; PCI Express Base Specification, section 9.2).
//!
//! A context (virtual function, VF) has its own registers, rings and requester ID. A host assigns
//! each to a guest with a domain of its own, so the IOMMU isolates the contexts from each other. A
//! switch in the adapter selects the context of a received frame. It drops a sent frame of a flow
//! that the context does not own.

use std::collections::BTreeMap;

use ringfence_types::RequesterId;

use super::device::{NicDevice, Reception};
use super::profile::NicProfile;
use crate::{DmaError, Transfer};

/// Bytes of a frame that hold its flow.
const FLOW: std::ops::Range<usize> = 14..18;

/// Requester IDs of the virtual functions (SR-IOV capability).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VirtualFunctions {
    physical: RequesterId,
    first_offset: u16,
    stride: u16,
    count: u16,
}

/// Error: the virtual functions have no distinct requester IDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("virtual functions {first_offset} + n * {stride}, n < {count}, of {physical}: ids collide")]
pub struct VirtualFunctionError {
    /// The physical function.
    pub physical: RequesterId,
    /// First VF Offset.
    pub first_offset: u16,
    /// Distance between two ids (VF Stride).
    pub stride: u16,
    /// Number of enabled functions (NumVFs).
    pub count: u16,
}

impl VirtualFunctions {
    /// Creates the ids of `count` functions: the id of `physical` plus `first_offset` (First VF
    /// Offset) plus n times `stride` (VF Stride).
    ///
    /// # Errors
    /// Two functions would have the same id, or an id would exceed 16 bits.
    pub const fn new(
        physical: RequesterId,
        first_offset: u16,
        stride: u16,
        count: u16,
    ) -> Result<Self, VirtualFunctionError> {
        let steps = if count == 0 { 0 } else { count - 1 };
        let last = physical.get() as u64 + first_offset as u64 + steps as u64 * stride as u64;
        let repeats = count > 1 && stride == 0;
        if last > u16::MAX as u64 || count > 0 && first_offset == 0 || repeats {
            return Err(VirtualFunctionError {
                physical,
                first_offset,
                stride,
                count,
            });
        }
        Ok(Self {
            physical,
            first_offset,
            stride,
            count,
        })
    }

    /// Returns the requester ID of function `index`; `None` beyond the last.
    pub const fn id(&self, index: u16) -> Option<RequesterId> {
        if index >= self.count {
            return None;
        }
        let offset = self.first_offset + index * self.stride;
        Some(RequesterId::new(self.physical.get() + offset))
    }

    /// Returns the number of functions.
    pub const fn count(&self) -> u16 {
        self.count
    }
}

/// Destination of a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The frame went to this context.
    Context(u16, Reception),
    /// No context owns the flow: the frame is dropped.
    NoContext,
}

/// Counters of the switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwitchStats {
    /// Received frames of a flow that no context owns.
    pub unknown: u64,
    /// Sent frames of a flow that their context does not own.
    pub spoofed: u64,
}

/// An adapter with contexts.
#[derive(Debug)]
pub struct SriovNic {
    contexts: Vec<NicDevice>,
    /// Context of each flow. The host programs it through the physical function.
    owners: BTreeMap<u32, u16>,
    stats: SwitchStats,
}

impl SriovNic {
    /// Creates an adapter whose contexts have the rings of `profile`. Each interrupts after `burst`
    /// completions of a ring.
    pub fn new(functions: &VirtualFunctions, profile: &NicProfile, burst: u32) -> Self {
        let ids = (0..functions.count()).filter_map(|index| functions.id(index));
        Self {
            contexts: ids.map(|id| NicDevice::new(id, profile, burst)).collect(),
            owners: BTreeMap::new(),
            stats: SwitchStats::default(),
        }
    }

    /// Returns the registers of a context, which its guest accesses without the host; `None` if the
    /// context does not exist.
    pub fn context(&mut self, index: u16) -> Option<&mut NicDevice> {
        self.contexts.get_mut(usize::from(index))
    }

    /// Gives a flow to a context. Only the host calls this.
    pub fn steer(&mut self, flow: u32, context: u16) {
        self.owners.insert(flow, context);
    }

    /// Returns the counters of the switch.
    pub fn switch_stats(&self) -> SwitchStats {
        self.stats
    }

    /// Receives a frame from the wire into receive ring `queue` of the context that owns its flow.
    ///
    /// # Errors
    /// The context could not fetch a descriptor or write a completion: its ring stops, and the
    /// frame is lost. Other contexts continue.
    pub fn receive<T: Transfer>(
        &mut self,
        bus: &mut T,
        queue: u16,
        frame: &[u8],
    ) -> Result<Delivery, DmaError> {
        let owner = flow_of(frame).and_then(|flow| self.owners.get(&flow).copied());
        let Some((owner, context)) =
            owner.and_then(|owner| Some((owner, self.contexts.get_mut(usize::from(owner))?)))
        else {
            self.stats.unknown += 1;
            return Ok(Delivery::NoContext);
        };
        let reception = context.receive(bus, queue, frame)?;
        Ok(Delivery::Context(owner, reception))
    }

    /// Sends the frames that transmit ring `queue` of a context offers, except frames of flows that
    /// the context does not own. Returns the number of frames that left the context's ring.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub fn transmit<T: Transfer>(
        &mut self,
        bus: &mut T,
        index: u16,
        queue: u16,
        mut wire: impl FnMut(&[u8]),
    ) -> Result<u32, DmaError> {
        let Some(context) = self.contexts.get_mut(usize::from(index)) else {
            return Ok(0);
        };
        let (owners, stats) = (&self.owners, &mut self.stats);
        context.transmit(bus, queue, |frame| {
            let owner = flow_of(frame).and_then(|flow| owners.get(&flow));
            if owner == Some(&index) {
                wire(frame);
            } else {
                stats.spoofed += 1;
            }
        })
    }
}

fn flow_of(frame: &[u8]) -> Option<u32> {
    let bytes = frame.get(FLOW)?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes))
}
