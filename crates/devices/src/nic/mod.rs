//! Network adapters: the device, its driver, and frames that the receiver verifies.
//!
//! | file | concept |
//! |---|---|
//! | `profile.rs` | the profiles mlx and brcm |
//! | `layout.rs` | bit layout of descriptors and completions |
//! | `device.rs` | the device side: fetches descriptors, moves frames, completes |
//! | `driver.rs` | the driver side: rings, pools, open and close |
//! | `receive.rs`, `transmit.rs` | the driver's two loops |
//! | `tx_ring.rs` | a transmit ring and the record of each sent frame |
//! | `tx_timers.rs` | the timers that poll transmit rings |
//! | `premapped.rs` | permanently mapped buffers, sent by a user-level program |
//! | `virtual_functions.rs` | one port with contexts, each a function of its own (SR-IOV) |
//! | `frame.rs`, `flows.rs` | format of a frame; order of the frames of a connection |
//! | `testbed.rs` | a driver and its device under a workload |

mod device;
mod driver;
mod error;
mod flows;
mod frame;
mod layout;
mod premapped;
mod profile;
mod receive;
mod testbed;
mod transmit;
mod tx_ring;
mod tx_timers;
mod virtual_functions;

pub use device::{DeviceStats, NicDevice, QueueDir, Reception};
pub use driver::{DriverStats, Nic};
pub use error::NicError;
pub use frame::{FRAME_HEADER_BYTES, Frame, FrameError, MAX_BODY_BYTES};
pub use layout::{DescriptorSegment, FrameStatus, NicCompletion, SEGMENT_BYTES};
pub use premapped::{BufferChoice, Premapped};
pub use profile::{Fill, NicProfile, Replace, Rings, TxReclaim};
pub use receive::{Preemption, Received};
pub use testbed::{Environment, NicTestbed, TestbedError, TestbedStats};
pub use transmit::SendOutcome;
pub use virtual_functions::{
    Delivery, SriovNic, SwitchStats, VirtualFunctionError, VirtualFunctions,
};
