//! Ring and IOTLB sizes for a trace: the computation behind `ringfence size`.
//!
//! One pass counts the demand of the trace on each ring ([`TraceDemand`]). Some sizes follow from
//! these counts without a trial. A second pass replays the trace with rings of several sizes, on
//! the shipped driver and unit, and counts the maps that waited ([`advise`]). [`RingSlots`]
//! predicts the same counts with a model that shares no code with the driver. The second pass also
//! tries IOTLBs of several geometries.
//!
//! Each (device, direction) has one ring, as in every replay (decision 0012).

mod advice;
mod bursts;
mod iotlb;
mod ranks;
mod slots;
mod sweep;
mod usage;

pub use advice::{
    Fit, IotlbAdvice, IotlbPoint, IotlbStrategy, RingAdvice, SizePoint, Stalls, TraceSizing,
};
pub use iotlb::{ENTRIES, WAYS, geometries};
pub use slots::RingSlots;
pub use sweep::{SizeOptions, advise, readings};
pub use usage::{RingDemand, TraceDemand, measure_demand};
