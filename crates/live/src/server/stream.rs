//! Receives and sends bytes and descriptors on a client's socket.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ringfence_vfio_user::{FramingError, Inbox, MAX_FDS, Message, ReceivedFds};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};

use super::{StopSignal, wait};
use crate::event::PollSource;

/// Sends a reply. Returns false if the stop signal comes first: a client that does not read may
/// block its device, but not the daemon's exit.
pub(crate) fn answer(stream: &UnixStream, mut reply: &[u8], stop: &StopSignal) -> io::Result<bool> {
    while !reply.is_empty() {
        match send(stream, reply, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => reply = reply.get(sent..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                let room = PollSource {
                    fd: stream.as_fd(),
                    input: false,
                    output: true,
                };
                if wait(None, Some(room), stop, false)?.stop {
                    return Ok(false);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

pub(super) enum Received {
    Message(Message),
    Part,
    End,
    Lost(FramingError),
}

pub(super) fn receive(stream: &UnixStream, inbox: &mut Inbox) -> io::Result<Received> {
    let Some(piece) = receive_bytes(stream, inbox.bytes_wanted(), RecvFlags::DONTWAIT)? else {
        return Ok(Received::Part);
    };
    if piece.bytes.is_empty() {
        return Ok(Received::End);
    }
    Ok(match inbox.feed(&piece.bytes, piece.fds, piece.received) {
        Ok(Some(message)) => Received::Message(message),
        Ok(None) => Received::Part,
        Err(error) => Received::Lost(error),
    })
}

/// Bytes of a stream and the descriptors that came with them.
#[derive(Debug)]
pub struct ReceivedBytes {
    /// Received bytes; empty at the end of the stream.
    pub bytes: Vec<u8>,
    /// Descriptors that came with them.
    pub fds: Vec<OwnedFd>,
    /// Completeness of the descriptors.
    pub received: ReceivedFds,
}

/// Receives at most `wants` bytes. `None` if no data is available, or a receive timeout expires.
pub fn receive_bytes(
    stream: &UnixStream,
    wants: usize,
    flags: RecvFlags,
) -> io::Result<Option<ReceivedBytes>> {
    let mut bytes = vec![0; wants];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = match recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags | RecvFlags::CMSG_CLOEXEC,
    ) {
        Ok(got) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    bytes.truncate(got.bytes);
    let received = if got.flags.contains(ReturnFlags::CTRUNC) {
        ReceivedFds::Truncated
    } else {
        ReceivedFds::All
    };
    Ok(Some(ReceivedBytes {
        bytes,
        fds,
        received,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More bytes than any socket buffers.
    const LONG: usize = 64 << 20;

    #[test]
    fn a_client_that_does_not_read_does_not_keep_the_daemon() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = StopSignal::new().unwrap();
        stop.stop();
        assert!(!answer(&ours, &vec![0; LONG], &stop).unwrap());
        drop(theirs);
        assert!(answer(&ours, &[0], &stop).is_err(), "it has gone");
    }

    #[test]
    fn a_reply_that_does_not_fit_is_sent_as_it_is_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stop = StopSignal::new().unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; LONG];
            io::Read::read_exact(&mut theirs, &mut bytes).unwrap();
            bytes.iter().all(|byte| *byte == 7)
        });
        assert!(answer(&ours, &vec![7; LONG], &stop).unwrap());
        assert!(reader.join().unwrap());
    }
}
