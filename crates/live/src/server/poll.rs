//! Waits for a client, a host descriptor, a pause request or the stop signal.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::ServeEvent;
use crate::access::SocketAccess;
use crate::event::PollSource;

/// Pause before the next client is accepted when the host lacks resources.
const NO_ROOM: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Signals threads to stop. Clones share the signal.
#[derive(Clone, Debug)]
pub struct StopSignal(Arc<OwnedFd>);

impl StopSignal {
    /// Creates a signal.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)))
    }

    /// Returns a descriptor that is readable after the signal.
    pub fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Waits for the next client. `None` if the stop signal comes first.
    ///
    /// # Errors
    /// Listening or polling failed.
    pub fn accept(
        &self,
        listener: &UnixListener,
        access: SocketAccess,
        mut report: impl FnMut(ServeEvent<'_>),
    ) -> io::Result<Option<UnixStream>> {
        loop {
            if wait(Some(listener.as_fd()), None, self, false)?.stop {
                return Ok(None);
            }
            if let Some(stream) = self.take(listener, access, &mut report)? {
                return Ok(Some(stream));
            }
        }
    }

    /// Accepts the client that has connected. `None` if it may not connect, has disconnected, or
    /// the host lacks resources for it. A lack of resources is temporary.
    pub(super) fn take(
        &self,
        listener: &UnixListener,
        access: SocketAccess,
        report: &mut impl FnMut(ServeEvent<'_>),
    ) -> io::Result<Option<UnixStream>> {
        use rustix::io::Errno;
        let error = match listener.accept() {
            Ok((stream, _)) => match access.admit(&stream) {
                Ok(()) => return Ok(Some(stream)),
                Err(stranger) => {
                    report(ServeEvent::Refused(&stranger));
                    return Ok(None);
                }
            },
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            Some(Errno::CONNABORTED | Errno::INTR | Errno::AGAIN) => {}
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                report(ServeEvent::Closed(&error));
                let _ = poll(&mut [PollFd::new(&*self.0, PollFlags::IN)], Some(&NO_ROOM));
            }
            _ => return Err(error),
        }
        Ok(None)
    }

    /// Sends the signal.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// Reason why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServeEnd {
    /// The stop signal was sent.
    Stop,
    /// A pause was requested; serving can continue later.
    PauseRequested,
}

/// Descriptors that became ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitResult {
    pub(crate) stop: bool,
    pub(crate) main: bool,
    pub(crate) extra: bool,
    pause: bool,
}

impl WaitResult {
    pub(super) fn serve_end(self) -> Option<ServeEnd> {
        let wake_fd = self.pause.then_some(ServeEnd::PauseRequested);
        if self.stop {
            Some(ServeEnd::Stop)
        } else {
            wake_fd
        }
    }
}

/// Waits for any of the descriptors. With `busy` it only polls, because the caller has other work.
pub(crate) fn wait(
    main: Option<BorrowedFd<'_>>,
    extra: Option<PollSource<'_>>,
    stop: &StopSignal,
    busy: bool,
) -> io::Result<WaitResult> {
    wait_or_pause(main, extra, stop, None, busy.then_some(Duration::ZERO))
}

/// Like [`wait`], also for a pause request. Waits for `limit` at most, if there is one.
pub(super) fn wait_or_pause(
    main: Option<BorrowedFd<'_>>,
    extra: Option<PollSource<'_>>,
    stop: &StopSignal,
    wake_fd: Option<BorrowedFd<'_>>,
    limit: Option<Duration>,
) -> io::Result<WaitResult> {
    let mut fds = vec![PollFd::new(&*stop.0, PollFlags::IN)];
    fds.extend(main.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    fds.extend(wake_fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    if let Some(PollSource { fd, input, output }) = extra {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, input);
        flags.set(PollFlags::OUT, output);
        // poll would report a hang-up even for a descriptor without requested events.
        if !flags.is_empty() {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
    }
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    loop {
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // In the order in which they were pushed.
        let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = |asked: bool| asked && came.next().unwrap_or(false);
        return Ok(WaitResult {
            stop: next(true),
            main: next(main.is_some()),
            pause: next(wake_fd.is_some()),
            extra: next(true),
        });
    }
}
