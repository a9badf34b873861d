//! The word that the driver writes to INV.

use ringfence_types::{RequesterId, RingId};

const RING_SHIFT: u32 = 16;
const SCOPE_SHIFT: u32 = 32;

/// Cached state that an invalidation removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InvalidateScope {
    /// Scope 0: the slots of one ring of a device.
    Ring(RequesterId, RingId),
    /// Scope 1: context, rDEVICE and all rings of a device.
    Device(RequesterId),
    /// Scope 2: everything.
    All,
}

/// Encoding of an invalidation: requester ID in bits 0 to 15, ring in bits 16 to 31, scope in bits
/// 32 and 33. All other bits are 0, and so are fields that the scope does not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InvalidateWord(u64);

impl InvalidateWord {
    /// Encodes an invalidation.
    pub const fn new(scope: InvalidateScope) -> Self {
        Self(match scope {
            InvalidateScope::Ring(device, ring) => {
                device.get() as u64 | (ring.get() as u64) << RING_SHIFT
            }
            InvalidateScope::Device(device) => device.get() as u64 | 1 << SCOPE_SHIFT,
            InvalidateScope::All => 2 << SCOPE_SHIFT,
        })
    }

    /// Interprets a value written to the register.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the value of the register.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Decodes the word. `None` if the scope is reserved or an unused bit is set.
    pub const fn scope(self) -> Option<InvalidateScope> {
        let device = RequesterId::new(self.0 as u16);
        let ring = RingId::new((self.0 >> RING_SHIFT) as u16);
        let scope = match self.0 >> SCOPE_SHIFT {
            0 => InvalidateScope::Ring(device, ring),
            1 => InvalidateScope::Device(device),
            2 => InvalidateScope::All,
            _ => return None,
        };
        // The encoding is unique, so another word has an unused bit set.
        if Self::new(scope).0 == self.0 {
            Some(scope)
        } else {
            None
        }
    }
}
