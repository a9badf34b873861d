//! How a device's process comes into being, and how it is told from one that is not confined.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::board::Board;
use super::grants::Grants;
use super::life::Life;
use super::supervisor::{Breach, Supervisor};
use super::wire::{MAX_BYTES, Order, Report};
use crate::caps::Caps;
use crate::counters::DeviceCounters;
use crate::errant::Errant;
use crate::privileges::NO_PRIVILEGES;

/// A process that is not ready and confined by then is ended: one time for all of its steps.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// What to run in the process: a program that calls [`simulate`](super::simulate).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its file.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// A disk for a process.
#[derive(Debug)]
pub struct Image<'a> {
    /// Its file, which the process gets.
    pub file: BorrowedFd<'a>,
    /// Nothing is written to it.
    pub read_only: bool,
    /// Of these, what the disk keeps within itself: the sizes of its queue and of a request.
    pub caps: Caps,
    /// For tests: how it misbehaves.
    pub errant: &'a [Errant],
}

/// The socket of a process that runs, and its life.
#[derive(Debug)]
pub struct Link {
    pub(super) socket: OwnedFd,
    pub(super) life: Arc<Life>,
    /// Misbehaviours that it was told to, and has not spoken of yet.
    pub(super) errant: usize,
}

/// Starts a process for `image`, whose round trips are counted in `counters`. It is confined when this returns, and reaches nothing.
///
/// The process dies with the thread that calls this.
///
/// # Errors
/// [`Breach`]: it could not be started, or did not confine itself.
pub fn start(
    program: &Program,
    image: &Image<'_>,
    counters: &Arc<DeviceCounters>,
) -> Result<(Grants, Link), Breach> {
    let until = Instant::now() + READY_WITHIN;
    let board = Arc::new(Board::create()?);
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(io::Error::from)?;
    let child = Command::new(&program.path)
        .args(&program.arguments)
        .env_clear()
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()?;
    let life = Arc::new(Life::new(child)?);
    let setup = Order::Setup {
        read_only: image.read_only,
        queue_size: image.caps.queue_size,
        request_bytes: image.caps.request_bytes,
        errant: image.errant.to_vec(),
    };
    let file = board.file().ok_or(Breach::Gone)?;
    send_with(&ours, &setup.encode(), &[file.as_fd(), image.file])?;
    let (report, mut fds) = next(&ours, until)?;
    let (Report::Ready, Some(listener), true) = (report, fds.pop(), fds.is_empty()) else {
        return Err(Breach::Protocol);
    };
    let (Report::Confined, true) =
        next(&ours, until).map(|(report, fds)| (report, fds.is_empty()))?
    else {
        return Err(Breach::Protocol);
    };
    let supervisor = Supervisor::new(
        listener,
        Arc::clone(&board),
        Arc::clone(&life),
        Arc::clone(counters),
        until,
    )?;
    verify(life.number())?;
    let grants = Grants::new(board, supervisor)?;
    let link = Link {
        socket: ours,
        life,
        errant: image.errant.len(),
    };
    Ok((grants, link))
}

fn next(socket: &OwnedFd, until: Instant) -> Result<(Report, Vec<OwnedFd>), Breach> {
    let mut ready = [PollFd::new(socket, PollFlags::IN)];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut ready, Some(&left)) {
            Ok(0) => return Err(Breach::Late),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Breach::Io(error.into())),
        }
    }
    let (bytes, fds) = receive_with(socket)?;
    if bytes.is_empty() {
        return Err(Breach::Gone);
    }
    let report = Report::decode(&bytes).ok_or(Breach::Protocol)?;
    Ok((report, fds))
}

/// Asks the kernel: two threads, each without privileges and under a filter that it can never leave,
/// and two descriptors.
///
/// Up to here the process has run code of ours only, on nothing of the guest's.
fn verify(number: u32) -> Result<(), Breach> {
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{number}/task"))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        let says = |line: &str| status.lines().any(|other| other == line);
        if !says("Seccomp:\t2") || !NO_PRIVILEGES.into_iter().all(says) {
            return Err(Breach::Unconfined);
        }
        threads += 1;
    }
    let descriptors = fs::read_dir(format!("/proc/{number}/fd"))?.count();
    if threads != 2 || descriptors != 2 {
        return Err(Breach::Unconfined);
    }
    Ok(())
}

/// Sends one packet and descriptors.
pub(super) fn send_with(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [io::IoSlice::new(bytes)];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one packet and descriptors; empty at the end.
pub(super) fn receive_with(socket: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(
        socket,
        &mut [io::IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = fds.flatten().collect();
    bytes.truncate(got.bytes);
    Ok((bytes, fds))
}
