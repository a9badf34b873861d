//! Blocked accesses and their reports to the driver (virtio 1.3, section 5.13.6.9).

use alloc::collections::VecDeque;
use core::fmt;

use ringfence_types::{Access, Iova};

use crate::EndpointId;
use crate::spec::{
    FAULT_BYTES, VIRTIO_IOMMU_FAULT_F_ADDRESS, VIRTIO_IOMMU_FAULT_F_READ,
    VIRTIO_IOMMU_FAULT_F_WRITE, VIRTIO_IOMMU_FAULT_R_DOMAIN, VIRTIO_IOMMU_FAULT_R_MAPPING,
    VIRTIO_IOMMU_FAULT_R_UNKNOWN,
};

/// Reason why an access was blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TranslationFaultReason {
    /// This device has no such endpoint.
    NoEndpoint,
    /// The endpoint is attached to no domain and may not bypass the IOMMU.
    Unattached,
    /// The domain does not map the address.
    NotMapped,
    /// The mapping does not allow this access.
    Permission,
    /// The address is reserved, or the access reads a doorbell.
    Reserved,
    /// The domain is blocked, because its sink failed to unmap.
    Blocked,
}

/// A blocked access. No part of it took place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TranslationFault {
    /// The endpoint that made the access.
    pub endpoint: EndpointId,
    /// First address that is not allowed.
    pub iova: Iova,
    /// Read or write.
    pub access: Access,
    /// Reason why the access was blocked.
    pub reason: TranslationFaultReason,
}

impl TranslationFault {
    /// Encodes the fault report for the driver.
    pub(crate) fn encode(&self) -> [u8; FAULT_BYTES] {
        let reason = match self.reason {
            TranslationFaultReason::Unattached => VIRTIO_IOMMU_FAULT_R_DOMAIN,
            TranslationFaultReason::NotMapped
            | TranslationFaultReason::Permission
            | TranslationFaultReason::Reserved => VIRTIO_IOMMU_FAULT_R_MAPPING,
            TranslationFaultReason::NoEndpoint | TranslationFaultReason::Blocked => {
                VIRTIO_IOMMU_FAULT_R_UNKNOWN
            }
        };
        let flags = VIRTIO_IOMMU_FAULT_F_ADDRESS
            | match self.access {
                Access::Read => VIRTIO_IOMMU_FAULT_F_READ,
                Access::Write => VIRTIO_IOMMU_FAULT_F_WRITE,
            };
        let [f0, f1, f2, f3] = flags.to_le_bytes();
        let [e0, e1, e2, e3] = self.endpoint.get().to_le_bytes();
        let [a0, a1, a2, a3, a4, a5, a6, a7] = self.iova.get().to_le_bytes();
        [
            reason, 0, 0, 0, f0, f1, f2, f3, e0, e1, e2, e3, 0, 0, 0, 0, a0, a1, a2, a3, a4, a5,
            a6, a7,
        ]
    }
}

impl fmt::Display for TranslationFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.reason {
            TranslationFaultReason::NoEndpoint => "the endpoint does not exist",
            TranslationFaultReason::Unattached => "not attached",
            TranslationFaultReason::NotMapped => "no mapping",
            TranslationFaultReason::Permission => "not permitted",
            TranslationFaultReason::Reserved => "reserved",
            TranslationFaultReason::Blocked => "the domain is blocked",
        };
        write!(
            f,
            "{} of {} by endpoint {} stopped: {why}",
            self.access, self.iova, self.endpoint
        )
    }
}

impl core::error::Error for TranslationFault {}

/// Error: a buffer is too small for an event. Return it to the driver with used length 0; the event
/// waits for the next buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferTooSmall {
    /// Length of the buffer.
    pub bytes: usize,
}

impl fmt::Display for BufferTooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the event buffer of {} bytes is shorter than an event of {FAULT_BYTES}",
            self.bytes
        )
    }
}

impl core::error::Error for BufferTooSmall {}

/// Faults that wait for a buffer, oldest first. Faults beyond the limit are dropped and counted, so
/// an endpoint that faults constantly does not exhaust memory.
#[derive(Debug)]
pub(crate) struct Events {
    waiting: VecDeque<TranslationFault>,
    limit: usize,
    dropped: u64,
}

impl Events {
    pub(crate) const fn new(limit: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            limit,
            dropped: 0,
        }
    }

    pub(crate) fn push(&mut self, denied: TranslationFault) {
        if self.waiting.len() >= self.limit || self.waiting.try_reserve(1).is_err() {
            self.count_dropped();
        } else {
            self.waiting.push_back(denied);
        }
    }

    pub(crate) const fn count_dropped(&mut self) {
        self.dropped = self.dropped.saturating_add(1);
    }

    /// Drops the events of `endpoint`.
    pub(crate) fn drop_endpoint(&mut self, endpoint: EndpointId) {
        let before = self.waiting.len();
        self.waiting.retain(|denied| denied.endpoint != endpoint);
        let removed = before - self.waiting.len();
        self.dropped = self.dropped.saturating_add(removed as u64);
    }

    /// Encodes the oldest event into `buffer` and returns its length; `None` if no event is
    /// waiting.
    pub(crate) fn next(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, BufferTooSmall> {
        let Some(oldest) = self.waiting.front() else {
            return Ok(None);
        };
        let bytes = buffer.len();
        let Some(slot) = buffer.first_chunk_mut() else {
            return Err(BufferTooSmall { bytes });
        };
        *slot = oldest.encode();
        self.waiting.pop_front();
        Ok(Some(FAULT_BYTES))
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Returns the waiting events, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &TranslationFault> {
        self.waiting.iter()
    }

    /// Sets the number of dropped events, from a snapshot.
    pub(crate) const fn set_dropped(&mut self, dropped: u64) {
        self.dropped = dropped;
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }
}
