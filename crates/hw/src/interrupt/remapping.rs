//! The remapping of interrupt requests (VT-d specification, sections 5.1.3 and 5.1.4).

use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_types::{PhysAddr, PhysMemory, RequesterId};

use super::entry::EntryError;
use super::{Interrupt, InterruptEntry, InterruptRequest};

/// Interrupt remapping of a unit. It caches no entry, so a changed entry takes effect at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InterruptRemapping {
    /// A device can send any interrupt. The unit ignores requests in the remappable format.
    #[default]
    Disabled,
    /// The table decides.
    Enabled {
        /// Address of the table (IRTA).
        table: PhysAddr,
        /// Binary logarithm of the number of entries, 1 to 16 (field S plus 1).
        log2_entries: u8,
        /// Handling of requests in the compatibility format (CFIS).
        compatibility: CompatibilityFormat,
    },
}

/// Handling of requests in the compatibility format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CompatibilityFormat {
    /// The unit blocks them.
    #[default]
    Blocked,
    /// They bypass the table.
    PassedThrough,
}

/// Error: the unit blocked an interrupt request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterruptFault {
    /// Requester ID in the request.
    pub source: RequesterId,
    /// Index of the entry; 0 for a request in the compatibility format.
    pub index: u32,
    /// Check that the request failed.
    pub reason: InterruptFaultReason,
}

/// Reason for blocking an interrupt request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InterruptFaultReason {
    /// The index lies beyond the table.
    IndexBeyondTable,
    /// The entry is not present.
    NotPresent,
    /// The table lies outside memory.
    TableAccess,
    /// A reserved bit or an unsupported mode is set in the entry.
    ReservedBit,
    /// Requests in the compatibility format are blocked.
    CompatibilityBlocked,
    /// The entry does not permit this requester.
    SourceDenied,
}

impl InterruptFaultReason {
    /// Returns the fault reason code of section 7.1.3.
    pub const fn code(self) -> u8 {
        match self {
            Self::IndexBeyondTable => 0x21,
            Self::NotPresent => 0x22,
            Self::TableAccess => 0x23,
            Self::ReservedBit => 0x24,
            Self::CompatibilityBlocked => 0x25,
            Self::SourceDenied => 0x26,
        }
    }
}

impl fmt::Display for InterruptFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.reason {
            InterruptFaultReason::IndexBeyondTable => "index beyond the table",
            InterruptFaultReason::NotPresent => "entry not present",
            InterruptFaultReason::TableAccess => "table outside memory",
            InterruptFaultReason::ReservedBit => "reserved bit set",
            InterruptFaultReason::CompatibilityBlocked => "compatibility format blocked",
            InterruptFaultReason::SourceDenied => "requester not permitted",
        };
        write!(
            f,
            "interrupt {} of {} stopped: {reason}",
            self.index, self.source
        )
    }
}

impl core::error::Error for InterruptFault {}

impl InterruptRemapping {
    /// Returns the interrupt of a request by `source`. `None` if remapping is disabled and the
    /// request has the remappable format: the unit ignores it.
    ///
    /// # Errors
    /// [`InterruptFault`]; no interrupt is sent.
    pub fn remap<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        source: RequesterId,
        request: InterruptRequest,
    ) -> Result<Option<Interrupt>, InterruptFault> {
        let fault = |index, reason| {
            Err(InterruptFault {
                source,
                index,
                reason,
            })
        };
        let Self::Enabled {
            table,
            log2_entries,
            compatibility,
        } = self
        else {
            return Ok(match request {
                InterruptRequest::Compatibility(interrupt) => Some(interrupt),
                InterruptRequest::Remappable { .. } => None,
            });
        };
        let index = match (request, compatibility) {
            (InterruptRequest::Remappable { index }, _) => index,
            (InterruptRequest::Compatibility(interrupt), CompatibilityFormat::PassedThrough) => {
                return Ok(Some(interrupt));
            }
            (InterruptRequest::Compatibility(_), CompatibilityFormat::Blocked) => {
                return fault(0, InterruptFaultReason::CompatibilityBlocked);
            }
        };
        if index >> (*log2_entries).clamp(1, 16) != 0 {
            return fault(index, InterruptFaultReason::IndexBeyondTable);
        }
        let at = table.wrapping_add(u64::from(index).wrapping_mul(16));
        let Some([low, high]) = mem.words(at, 2).ok().and_then(|words| words.first_chunk()) else {
            return fault(index, InterruptFaultReason::TableAccess);
        };
        // As for context entries: an entry whose low word changes while it is read is not present.
        let before = low.load(Ordering::Acquire);
        let high = high.load(Ordering::Acquire);
        if low.load(Ordering::Relaxed) != before {
            return fault(index, InterruptFaultReason::NotPresent);
        }
        match InterruptEntry::decode([before, high]) {
            Ok(entry) if entry.validation.accepts(source) => Ok(Some(entry.interrupt)),
            Ok(_) => fault(index, InterruptFaultReason::SourceDenied),
            Err(EntryError::NotPresent) => fault(index, InterruptFaultReason::NotPresent),
            Err(EntryError::Reserved) => fault(index, InterruptFaultReason::ReservedBit),
        }
    }
}
