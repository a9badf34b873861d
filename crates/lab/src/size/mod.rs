//! How large a trace wants its rings and its IOTLB: what `ringfence size` computes.
//!
//! One pass counts what the trace asks of each ring ([`TraceDemand`]); from that follow the sizes
//! that need no trial. A second pass replays the trace with rings of several sizes, on the shipped
//! driver and unit, and says where maps had to wait ([`size`]); beside it stands what a model of
//! slots that shares no code with the driver predicts ([`RingSlots`]). The same pass tries IOTLBs
//! of several shapes.
//!
//! A ring is a (device, direction), as in every replay (decision 0012).

mod advice;
mod bursts;
mod iotlb;
mod ranks;
mod slots;
mod sweep;
mod usage;

pub use advice::{Fit, IotlbAdvice, IotlbPoint, RingAdvice, SizePoint, Stalls, TraceSizing};
pub use iotlb::{ENTRIES, WAYS, geometries};
pub use slots::RingSlots;
pub use sweep::{SizeOptions, readings, size};
pub use usage::{RingDemand, TraceDemand, measure_demand};
