//! Main loop of a device's thread: it serves clients and pauses on request.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::{FunctionState, PauseCommand, PauseHandle, PauseReply, SavedDevice, SessionState};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::nvme::NvmeFunction;
use crate::riommu::RiommuFunction;
use crate::saved_state::HandOverBlocker;
use crate::server::{ClientSlot, PolledFunction, ServeEnd, ServeEvent, StopSignal};
use crate::virtio::{Device, DeviceState, VirtioPci};

/// A function whose state another process can receive.
pub(crate) trait HandOverFunction: PolledFunction {
    /// Returns the registers and the device's own state.
    ///
    /// # Errors
    /// [`HandOverBlocker`] if the device cannot be handed over.
    fn saved(&self) -> Result<(FunctionState, DeviceState), HandOverBlocker>;
}

impl<D: Device, A: Dma> HandOverFunction for VirtioPci<D, A> {
    fn saved(&self) -> Result<(FunctionState, DeviceState), HandOverBlocker> {
        let (registers, state) = self.save()?;
        Ok((FunctionState::Virtio(registers), state))
    }
}

impl HandOverFunction for RiommuFunction {
    fn saved(&self) -> Result<(FunctionState, DeviceState), HandOverBlocker> {
        let (registers, state) = self.save()?;
        Ok((FunctionState::Plain(registers), DeviceState::Ring(state)))
    }
}

impl<A: Dma> HandOverFunction for NvmeFunction<A> {
    fn saved(&self) -> Result<(FunctionState, DeviceState), HandOverBlocker> {
        Err(HandOverBlocker::Unsupported("an NVMe disk"))
    }
}

/// Serves clients until `stop` is signalled or the device is released to another process.
///
/// # Errors
/// A listening or polling error.
pub(crate) fn serve_device<F: HandOverFunction>(
    mut slot: ClientSlot<F>,
    pause: &PauseHandle,
    counters: &DeviceCounters,
    stop: &StopSignal,
    mut report: impl FnMut(ServeEvent<'_>),
) -> io::Result<()> {
    loop {
        match slot.serve(counters, stop, Some(pause.wake_fd()), &mut report)? {
            ServeEnd::Stop => {
                slot.end();
                return Ok(());
            }
            ServeEnd::PauseRequested => {}
        }
        let Some(request) = pause.take_request() else {
            continue;
        };
        if !slot.function().is_none_or(|f| f.pause(request.until)) {
            let _ = request.replies.send(PauseReply::Busy);
            continue;
        }
        // If the requester has given up, `recv` fails at once and the device resumes.
        let _ = request.replies.send(PauseReply::Stopped);
        while let Ok(command) = request.commands.recv() {
            match command {
                PauseCommand::Save => {
                    slot.complete_unmaps();
                    let _ = request
                        .replies
                        .send(PauseReply::Saved(Box::new(save(&slot))));
                }
                PauseCommand::Release => {
                    let left = slot.function().is_none_or(PolledFunction::release);
                    // No reset: the guest's device continues in the destination.
                    drop(slot);
                    let answer = if left {
                        PauseReply::Released
                    } else {
                        PauseReply::Stuck
                    };
                    let _ = request.replies.send(answer);
                    return Ok(());
                }
            }
        }
    }
}

/// Returns the state that another process needs to serve the device.
///
/// # Errors
/// [`HandOverBlocker`] if the device cannot be handed over.
pub(crate) fn save<F: HandOverFunction>(
    slot: &ClientSlot<F>,
) -> Result<SavedDevice, HandOverBlocker> {
    let connection = slot.conversation();
    if let Some(range) = connection.and_then(|connection| connection.session.ram().unmapping()) {
        // Only this process can see the stuck process exit, and it could not release the device.
        return Err(HandOverBlocker::UnmapPending { range });
    }
    let function = connection
        .map(|connection| connection.session.served())
        .or(slot.idle_function());
    let function = function.ok_or(HandOverBlocker::Unsupported(
        "a device whose service has failed",
    ))?;
    let (registers, own) = function.saved()?;
    let session = connection.map(|connection| {
        let (bytes, fds, too_many_fds) = connection.inbox.part();
        let fds: io::Result<Vec<OwnedFd>> = fds.iter().map(OwnedFd::try_clone).collect();
        Ok::<_, io::Error>(SessionState {
            stream: connection.stream.as_fd().try_clone_to_owned()?,
            agreed: connection.session.is_agreed(),
            bytes: bytes.to_vec(),
            fds: fds?,
            too_many_fds,
            ranges: connection.session.ram().save()?,
        })
    });
    Ok(SavedDevice {
        state: own,
        listener: slot.listener().as_fd().try_clone_to_owned()?,
        function: registers,
        session: session.transpose()?,
        requests: function.completed(),
    })
}
