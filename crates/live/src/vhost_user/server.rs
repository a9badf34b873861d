//! The socket server: it accepts one front-end at a time and passes its messages to a [`Session`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use ringfence_softiommu::iotlb::reply_status;
use ringfence_vfio_user::MessageAssembler;
use rustix::net::{RecvFlags, recv};

use super::refusal::Refusal;
use super::request::VhostUser;
use super::session::{Session, Settings};
use crate::access::SocketAccess;
use crate::counters::DeviceCounters;
use crate::server::{EventHandler, LogBudget, ServeEvent, StopSignal, answer, receive_bytes, wait};
use crate::virtio::{Device, PollSource};

/// Listener of the front-ends, and the users who may connect.
#[derive(Clone, Copy, Debug)]
pub struct Clients<'a> {
    /// Socket at which front-ends connect.
    pub listener: &'a UnixListener,
    /// Users who may connect.
    pub access: SocketAccess,
}

/// Serves front-ends one after another until the stop signal.
///
/// # Errors
/// Listening failed, the limits leave no room for an IOTLB, or the device's thread panicked. A
/// front-end's mistakes are not errors: they are reported and at worst end its connection.
pub fn serve<D: Device + Send + 'static>(
    clients: &Clients<'_>,
    mut device: D,
    settings: &Settings,
    counters: &Arc<DeviceCounters>,
    stop: &StopSignal,
    report: &EventHandler,
) -> io::Result<()> {
    let mut words = LogBudget::default();
    loop {
        let say = |event: ServeEvent<'_>| words.log(event, |event| report(&event));
        let Some(stream) = stop.accept(clients.listener, clients.access, say)? else {
            break;
        };
        report(&ServeEvent::Connected);
        let counters = Arc::clone(counters);
        let events = Arc::clone(report);
        let session = Session::new(device, settings, Arc::clone(&counters), events);
        let mut session = session.map_err(io::Error::other)?;
        words = words.next_client();
        let end = converse(&stream, &mut session, &counters, stop, report, &mut words);
        device = session
            .end()
            .ok_or_else(|| io::Error::other("the device's thread panicked"))?;
        if let Err(error) = &end {
            words.log(ServeEvent::Closed(error), |event| report(&event));
        }
        report(&ServeEvent::Disconnected);
        if let Ok(false) = end {
            break;
        }
    }
    Ok(())
}

/// Serves one front-end. Returns true at the end of its connection, and false on the stop signal.
fn converse<D: Device + Send + 'static>(
    stream: &UnixStream,
    session: &mut Session<D>,
    counters: &DeviceCounters,
    stop: &StopSignal,
    report: &EventHandler,
    words: &mut LogBudget,
) -> io::Result<bool> {
    let mut inbox = MessageAssembler::<VhostUser>::default();
    let mut replies = Replies::default();
    loop {
        let channel = session.channel().cloned();
        let replied = channel
            .as_ref()
            .map(|channel| PollSource::readable(channel.as_fd()));
        let woken = wait(Some(stream.as_fd()), replied, stop, false)?;
        if woken.stop {
            return Ok(false);
        }
        // Handle the main socket first: its messages precede the reply that they cause.
        if woken.main {
            let Some(piece) = receive_bytes(stream, inbox.bytes_wanted(), RecvFlags::DONTWAIT)?
            else {
                continue;
            };
            if piece.bytes.is_empty() {
                return Ok(true);
            }
            let message = match inbox.feed(&piece.bytes, piece.fds, piece.received) {
                Ok(Some(message)) => message,
                Ok(None) => continue,
                Err(error) => {
                    words.log(ServeEvent::Closed(&error), |event| report(&event));
                    return Ok(true);
                }
            };
            counters.messages.add(1);
            let outcome = session.handle(message);
            if let Some(refusal) = &outcome.refusal {
                counters.refused.add(1);
                words.log(ServeEvent::Refused(refusal), |event| report(&event));
            }
            if let Some(reply) = outcome.reply
                && !answer(stream, &reply, stop)?
            {
                return Ok(false);
            }
            if outcome.close {
                return Ok(true);
            }
        } else if woken.extra
            && let Some(channel) = channel
        {
            match replies.take(&channel)? {
                Reply::Part => {}
                Reply::End => return Ok(true),
                Reply::Whole(bytes) => {
                    let status = reply_status(&bytes).map_err(Refusal::Reply);
                    if let Err(refusal) = status.and_then(|done| session.replied(done)) {
                        counters.refused.add(1);
                        words.log(ServeEvent::Refused(&refusal), |event| report(&event));
                        return Ok(true);
                    }
                }
            }
        }
    }
}

/// Length of a reply in bytes.
const REPLY_BYTES: usize = 20;

/// Assembles a reply of the front-end that arrives in pieces.
#[derive(Default)]
struct Replies {
    bytes: [u8; REPLY_BYTES],
    filled: usize,
}

enum Reply {
    Whole([u8; REPLY_BYTES]),
    Part,
    End,
}

impl Replies {
    fn take(&mut self, channel: &OwnedFd) -> io::Result<Reply> {
        let unfilled = self.bytes.get_mut(self.filled..).unwrap_or_default();
        match recv(channel, unfilled, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(Reply::End),
            Ok((bytes, _)) => self.filled = self.filled.saturating_add(bytes),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if self.filled < REPLY_BYTES {
            return Ok(Reply::Part);
        }
        self.filled = 0;
        Ok(Reply::Whole(self.bytes))
    }
}
