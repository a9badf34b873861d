//! The operating system's reaction to an I/O page fault. A DMA is not restartable, so the system
//! re-initialises the device (rIOMMU sections 2.2 and 4).

use ringfence_hw::FaultRecord;
use ringfence_types::{PhysRange, RequesterId};

use crate::nic::{Environment, NicProfile, NicTestbed, TestbedError};

/// Control of a device's access to memory, and the faults of the IOMMU.
pub trait DeviceIsolation {
    /// Reason why access could not be changed.
    type Error;

    /// Takes the oldest fault of `device` from the fault recording registers. Leaves the faults of
    /// other devices.
    fn take_fault(&mut self, device: RequesterId) -> Option<FaultRecord>;

    /// Denies `device` all DMA. When this returns, no earlier access is in progress and no cached
    /// translation has effect.
    ///
    /// # Errors
    /// The device may still access memory.
    fn block(&mut self, device: RequesterId) -> Result<(), Self::Error>;

    /// Lets `device` access its mappings again.
    ///
    /// # Errors
    /// The device stays blocked.
    fn unblock(&mut self, device: RequesterId) -> Result<(), Self::Error>;
}

/// Reason why a device was not re-initialised.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError<E> {
    /// The device could not be blocked or unblocked.
    #[error("cannot change the DMA access of the device")]
    Isolation(E),
    /// The driver could not close or open the port. The device is blocked, or has no mappings.
    #[error(transparent)]
    Driver(TestbedError),
}

/// Arguments with which a port opens again.
#[derive(Debug, Clone, Copy)]
pub struct PortOptions {
    /// Rings and buffers of the adapter.
    pub profile: NicProfile,
    /// Memory of the buffers.
    pub memory: PhysRange,
    /// Completions for each interrupt.
    pub burst: u32,
    /// Seed of the frames.
    pub seed: u64,
}

/// A port with the outcome of [`handle_faults`].
pub type RecoveryResult<W> = Result<
    (NicTestbed<<W as Environment>::Handle>, Recovery),
    RecoveryError<<W as DeviceIsolation>::Error>,
>;

/// Handles the pending faults of a port's device: re-initialises `port` if there is one. Returns
/// the port and the outcome. Faults of other devices stay pending.
///
/// The rIOMMU paper states that operating systems typically reinitialise a device after an I/O page
/// fault. The steps are:
/// 1. Block the device, so that nothing it does reaches a buffer.
/// 2. Reset the device, which stops its rings.
/// 3. Close the port: unmap every buffer, and free the rings.
/// 4. Unblock the device, which now has no mapping.
/// 5. Open the port: map new rings and buffers, and program the device.
///
/// # Errors
/// [`RecoveryError`]. Buffers of a failed step are lost.
pub fn handle_faults<W>(
    port: NicTestbed<W::Handle>,
    env: &mut W,
    options: &PortOptions,
) -> RecoveryResult<W>
where
    W: Environment + DeviceIsolation,
{
    let device = port.device_id();
    let Some(fault) = env.take_fault(device) else {
        return Ok((port, Recovery::NotNeeded));
    };
    env.block(device).map_err(RecoveryError::Isolation)?;
    // Later faults of the device need no further reset.
    while env.take_fault(device).is_some() {}
    // Resets the device before the driver unmaps.
    port.close(env).map_err(RecoveryError::Driver)?;
    env.unblock(device).map_err(RecoveryError::Isolation)?;
    let PortOptions {
        profile,
        memory,
        burst,
        seed,
    } = *options;
    let port = NicTestbed::open(env, device, profile, memory, burst, seed)
        .map_err(RecoveryError::Driver)?;
    Ok((port, Recovery::Reinitialised(fault)))
}

/// Outcome of [`handle_faults`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// No fault of the device was pending.
    NotNeeded,
    /// The device was re-initialised because of this fault, its first.
    Reinitialised(FaultRecord),
}
