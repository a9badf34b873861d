//! Hostile clients of a whole daemon: what `ringfence serve` starts, with its sockets, its threads
//! and their system call filters, and the disk's sandboxed process.
//!
//! The first byte selects the devices ([`Setup`]). Messages follow as in `vfio_user`, each with its
//! byte about descriptors. Commands that are not messages:
//!
//! - 200 writes its body to the guest's memory, at the offset in its first four bytes.
//! - 201 selects the socket for the next messages with its first byte ([`SOCKETS`]; the disk's at
//!   first) and connects to it unless a connection is open.
//! - 202 makes the network's other end send its body except the first byte.
//! - 203 waits until a device has taken a request or a frame, or has faulted, for a moment.
//! - 204 closes the selected connection.
//!
//! Behind a vhost-user back-end all messages go to the disk's socket, whose own framing applies.
//!
//! After the input every socket must answer a sound client. The daemon must not have ended the
//! disk's process, which is honest. When it is stopped, all its threads must have ended, and all
//! its descriptors and processes must be gone.

mod client;
mod host;

use std::sync::Once;

use self::client::{Client, Exchange};
use self::host::{Host, Resources, Setup};
use crate::OutcomeHook;
use crate::vfio_user::{Files, with_files};
use ringfence_vfio_user::{Inbox, MAX_MESSAGE_BYTES, ReceivedFds};

pub use self::host::{SANDBOX_ARGUMENT, run_if_sandboxed, set_program};

/// Outcomes that the corpus reaches.
pub const OUTCOMES: &[&str] = &[
    "answered",
    "refused",
    "closed",
    "sent",
    "virtio: disk served",
    "sandbox: disk served",
    "sandbox: fault",
    "para: disk served",
    "para: fault",
    "nvme: disk served",
    "vhost-user: answered",
    "frame received",
];

/// Sockets that command 201 selects, by number. The first of them and the IOMMU's have several
/// numbers, as the devices of `vfio_user` have.
const SOCKETS: [Socket; 8] = [
    Socket::Disk,
    Socket::Net,
    Socket::Iommu,
    Socket::Disk,
    Socket::Iommu,
    Socket::Disk,
    Socket::Control,
    Socket::Metrics,
];

/// Kinds of sockets in the daemon's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Socket {
    Disk,
    Net,
    Iommu,
    Control,
    Metrics,
}

const POKE: u16 = 200;
const TALK_TO: u16 = 201;
const PEER: u16 = 202;
const AWAIT: u16 = 203;
const CLOSE: u16 = 204;
/// Waits that one input may ask for.
const MAX_WAITS: u32 = 4;

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((setup, data)) = data.split_first() else {
        return;
    };
    let setup = Setup::of(*setup);
    with_files(|files| {
        // The first daemon of a process opens what the process keeps: its AIO context.
        static FIRST: Once = Once::new();
        FIRST.call_once(|| Host::start(Setup::Virtio).stop());
        let before = Resources::now();
        let mut host = Host::start(setup);
        if setup == Setup::VhostUser {
            vhost_user(data, files, &host, reached);
        } else {
            vfio_user(data, files, &mut host, reached);
        }
        for socket in host.sockets() {
            host.expect_answer(socket);
        }
        host.tell(reached);
        host.stop();
        before.expect_no_more();
    });
}

/// One connection for each socket.
#[derive(Default)]
struct Clients([Option<Client>; 5]);

impl Clients {
    fn at(&mut self, socket: Socket) -> &mut Option<Client> {
        &mut self.0[socket as usize]
    }

    /// Returns the connection to a socket. `None` if the daemon has no such socket.
    fn open(&mut self, socket: Socket, host: &Host) -> Option<&mut Client> {
        let client = self.at(socket);
        if client.is_none() {
            *client = host.connect(socket);
        }
        client.as_mut()
    }
}

fn vfio_user(data: &[u8], files: &Files, host: &mut Host, reached: OutcomeHook<'_>) {
    let mut clients = Clients::default();
    let mut inbox = Inbox::default();
    let mut socket = Socket::Disk;
    let mut waits = 0;
    let mut rest = data;
    while let Some((about, after)) = rest.split_first() {
        let fds = files.descriptors(*about);
        rest = after;
        let message = loop {
            let wants = inbox.bytes_wanted().min(MAX_MESSAGE_BYTES);
            let (piece, after) = rest.split_at(wants.min(rest.len()));
            rest = after;
            match inbox.feed(piece, std::iter::empty(), ReceivedFds::All) {
                Ok(Some(message)) => break Some(message),
                Ok(None) if piece.is_empty() => break None,
                Ok(None) => {}
                Err(_) => break None,
            }
        };
        let bytes = &after[..after.len() - rest.len()];
        let Some(message) = message else {
            // Not a message, or an incomplete one: the daemon closes the connection.
            if let Some(client) = clients.open(socket, host) {
                client.send(bytes, &fds);
                client.drain();
                reached("closed");
            }
            return;
        };
        match (message.header.command, message.body.as_slice()) {
            (POKE, [a, b, c, d, bytes @ ..]) => {
                files.poke(u32::from_le_bytes([*a, *b, *c, *d]), bytes);
            }
            (TALK_TO, [number, ..]) => {
                socket = SOCKETS[usize::from(*number) % SOCKETS.len()];
            }
            (PEER, [_, bytes @ ..]) => host.send_frames(bytes),
            (AWAIT, _) => {
                waits += 1;
                if waits <= MAX_WAITS {
                    host.await_progress();
                }
            }
            (CLOSE, _) => *clients.at(socket) = None,
            _ => {
                let Some(client) = clients.open(socket, host) else {
                    continue;
                };
                let expects_reply = !message.header.no_reply && socket.speaks_vfio_user();
                match client.exchange(bytes, &fds, expects_reply) {
                    Exchange::Answered { refused: false } => reached("answered"),
                    Exchange::Answered { refused: true } => reached("refused"),
                    Exchange::Sent => reached("sent"),
                    Exchange::Closed => *clients.at(socket) = None,
                }
            }
        }
    }
}

impl Socket {
    fn speaks_vfio_user(self) -> bool {
        matches!(self, Self::Disk | Self::Net | Self::Iommu)
    }
}

/// Sends the input to a vhost-user back-end, message by message: each has a byte about descriptors,
/// a header of 12 bytes and as many bytes as the header's length says, at most 4096.
fn vhost_user(data: &[u8], files: &Files, host: &Host, reached: OutcomeHook<'_>) {
    let Some(mut client) = host.connect(Socket::Disk) else {
        return;
    };
    let mut rest = data;
    while let Some((about, after)) = rest.split_first() {
        let length = after.get(8..12).and_then(|bytes| bytes.try_into().ok());
        let length = length.map_or(0, u32::from_le_bytes) & 0xfff;
        let end = (12 + length as usize).min(after.len());
        let (bytes, after) = after.split_at(end);
        rest = after;
        if client.exchange(bytes, &files.descriptors(*about), false) == Exchange::Closed {
            return;
        }
    }
    if client.drain() {
        reached("vhost-user: answered");
    }
}
