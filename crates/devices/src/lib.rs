//! Devices as sources of DMA.
//!
//! [`Bus`] is the access engine: it asks the unit to translate a device's access, tells an [`Observer`] what came of it, and moves the
//! bytes. The [attackers](Attacker) decide which accesses to make, and know nothing of the protection mode they are up
//! against: they see what a driver does and whether an access was stopped.
#![forbid(unsafe_code)]

mod access;
mod attack;
mod bytes;
mod observer;
mod request;

pub use access::{Bus, DmaError};
pub use attack::{
    Attacker, DEAD_RANGES, Event, Mapping, Neighbour, Passive, Port, Racer, Replayer, Reuse,
    WARM_MAPPINGS,
};
pub use bytes::{ByteMemory, Unreachable};
pub use observer::Observer;
pub use request::Request;
