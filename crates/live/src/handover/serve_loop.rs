//! Main loop of a device's thread: it serves clients and pauses on request.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::{HandOverBlocker, PauseCommand, PauseHandle, PauseReply, SavedDevice, SessionState};
use crate::counters::DeviceCounters;
use crate::server::{ClientSlot, PolledFunction, ServeEnd, ServeEvent, StopSignal};

/// Serves clients until `stop` is signalled or the device is released to another process.
///
/// # Errors
/// A listening or polling error.
pub(crate) fn serve_device<F: PolledFunction>(
    mut post: ClientSlot<F>,
    attention: &PauseHandle,
    counters: &DeviceCounters,
    stop: &StopSignal,
    mut report: impl FnMut(ServeEvent<'_>),
) -> io::Result<()> {
    loop {
        match post.serve(counters, stop, Some(attention.wake_fd()), &mut report)? {
            ServeEnd::Stop => {
                post.end();
                return Ok(());
            }
            ServeEnd::PauseRequested => {}
        }
        let Some(round) = attention.take_request() else {
            continue;
        };
        if !post.function().is_none_or(|f| f.pause(round.until)) {
            let _ = round.replies.send(PauseReply::Busy);
            continue;
        }
        // If the requester has given up, `recv` fails at once and the device resumes.
        let _ = round.replies.send(PauseReply::Stopped);
        while let Ok(order) = round.commands.recv() {
            match order {
                PauseCommand::Save => {
                    let _ = round.replies.send(PauseReply::Saved(Box::new(save(&post))));
                }
                PauseCommand::Release => {
                    let left = post.function().is_none_or(F::release);
                    // No reset: the guest's device continues in the destination.
                    drop(post);
                    let answer = if left {
                        PauseReply::Released
                    } else {
                        PauseReply::Stuck
                    };
                    let _ = round.replies.send(answer);
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
pub(crate) fn save<F: PolledFunction>(
    post: &ClientSlot<F>,
) -> Result<SavedDevice, HandOverBlocker> {
    let talk = post.conversation();
    let function = talk
        .map(|talk| talk.session.served())
        .or(post.idle_function());
    let function = function.ok_or(HandOverBlocker::Keeps("a device that has failed"))?;
    let (registers, own) = function.save()?;
    let session = talk.map(|talk| {
        let (agreed, ram) = talk.session.agreement();
        let (bytes, fds, too_many_fds) = talk.inbox.part();
        let fds: io::Result<Vec<OwnedFd>> = fds.iter().map(OwnedFd::try_clone).collect();
        Ok::<_, io::Error>(SessionState {
            stream: talk.stream.as_fd().try_clone_to_owned()?,
            agreed,
            bytes: bytes.to_vec(),
            fds: fds?,
            too_many_fds,
            ranges: ram.save()?,
        })
    });
    Ok(SavedDevice {
        state: own,
        listener: post.listener().as_fd().try_clone_to_owned()?,
        function: registers,
        session: session.transpose()?,
        requests: function.completed(),
    })
}
