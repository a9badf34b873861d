//! Starts a sandbox process and verifies that it is confined.

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

use super::wire::{DeviceCommand, DeviceResponse, MAX_BYTES, MAX_INJECTED};
use crate::counters::DeviceCounters;
use crate::dma_fault_injection::InjectedDma;
use crate::grants::child::ChildProcess;
use crate::grants::control_region::ControlRegion;
use crate::grants::supervisor::Supervisor;
use crate::grants::{Grants, ProtocolViolation};
use crate::limits::GuestLimits;
use crate::privileges::NO_PRIVILEGES;

/// Time limit for all startup steps together. The daemon kills a process that exceeds it.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// The program to run in the process. It must call
/// [`run_sandboxed_device`](super::run_sandboxed_device).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxProgram {
    /// Path of the executable.
    pub path: PathBuf,
    /// Arguments of the program, without its name.
    pub arguments: Vec<OsString>,
}

/// The disk that a process serves.
#[derive(Debug)]
pub struct SandboxDisk<'a> {
    /// The image; the process receives the descriptor.
    pub file: BorrowedFd<'a>,
    /// True if the device must not write the image.
    pub read_only: bool,
    /// Limits of the guest. The disk uses the queue size and the request size.
    pub limits: GuestLimits,
    /// DMA accesses to inject, for tests.
    pub injected: &'a [InjectedDma],
}

/// The socket and the handle of a running process.
#[derive(Debug)]
pub struct SandboxLink {
    pub(super) socket: OwnedFd,
    pub(super) child: Arc<ChildProcess>,
    /// Number of injected DMA accesses that the process has not reported yet.
    pub(super) injected: usize,
}

/// Starts a process that serves `image`. `counters` counts its mapping round trips. On return the
/// process is confined and has no guest memory.
///
/// The process dies with the thread that calls this function.
///
/// # Errors
/// [`ProtocolViolation`]: the process could not be started or did not confine itself.
pub fn start(
    program: &SandboxProgram,
    image: &SandboxDisk<'_>,
    counters: &Arc<DeviceCounters>,
) -> Result<(Grants, SandboxLink), ProtocolViolation> {
    let until = Instant::now() + READY_WITHIN;
    let control = Arc::new(ControlRegion::create()?);
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
    let child = Arc::new(ChildProcess::new(child)?);
    let setup = DeviceCommand::Setup {
        read_only: image.read_only,
        queue_size: image.limits.queue_size,
        request_bytes: image.limits.request_bytes,
        injected: image.injected.iter().copied().take(MAX_INJECTED).collect(),
    };
    let file = control.file().ok_or(ProtocolViolation::Exited)?;
    send_with(&ours, &setup.encode(), &[file.as_fd(), image.file])?;
    let (report, mut fds) = next(&ours, until)?;
    let (DeviceResponse::Ready, Some(listener), true) = (report, fds.pop(), fds.is_empty()) else {
        return Err(ProtocolViolation::MalformedMessage);
    };
    let (DeviceResponse::Confined, true) =
        next(&ours, until).map(|(report, fds)| (report, fds.is_empty()))?
    else {
        return Err(ProtocolViolation::MalformedMessage);
    };
    let supervisor = Supervisor::new(
        listener,
        Arc::clone(&control),
        Arc::clone(&child),
        Arc::clone(counters),
        until,
    )?;
    verify(child.pid())?;
    let grants = Grants::new(control, supervisor)?;
    let link = SandboxLink {
        socket: ours,
        child,
        injected: image.injected.len(),
    };
    Ok((grants, link))
}

fn next(
    socket: &OwnedFd,
    until: Instant,
) -> Result<(DeviceResponse, Vec<OwnedFd>), ProtocolViolation> {
    let mut ready = [PollFd::new(socket, PollFlags::IN)];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut ready, Some(&left)) {
            Ok(0) => return Err(ProtocolViolation::Late),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(ProtocolViolation::Io(error.into())),
        }
    }
    let (bytes, fds) = receive_with(socket)?;
    if bytes.is_empty() {
        return Err(ProtocolViolation::Exited);
    }
    let report = DeviceResponse::decode(&bytes).ok_or(ProtocolViolation::MalformedMessage)?;
    Ok((report, fds))
}

/// Checks in `/proc` that the process has exactly two threads and two descriptors. Each thread must
/// be unprivileged and under a seccomp filter, which it cannot remove.
///
/// Until this check the process has run only trusted code and has seen no guest data.
fn verify(number: u32) -> Result<(), ProtocolViolation> {
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{number}/task"))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        let says = |line: &str| status.lines().any(|other| other == line);
        if !says("Seccomp:\t2") || !NO_PRIVILEGES.into_iter().all(says) {
            return Err(ProtocolViolation::Unconfined);
        }
        threads += 1;
    }
    let descriptors = fs::read_dir(format!("/proc/{number}/fd"))?.count();
    if threads != 2 || descriptors != 2 {
        return Err(ProtocolViolation::Unconfined);
    }
    Ok(())
}

/// Sends one packet with descriptors.
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

/// Receives one packet with descriptors; the packet is empty at the end of the stream.
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
