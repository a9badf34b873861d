//! Waiting for a client, for something of the host's, for a bell and for the end, whichever comes
//! first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::ServeEvent;
use crate::access::SocketAccess;
use crate::virtio::PollSource;

/// How long a client waits that the host has no room for.
const NO_ROOM: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Tells threads to end. Clones tell the same.
#[derive(Clone, Debug)]
pub struct StopSignal(Arc<OwnedFd>);

impl StopSignal {
    /// A new one.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)))
    }

    /// Readable once it was told.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// The next client, if one comes before the stop.
    pub(crate) fn accept(
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

    /// The client that has come. None if it may not, if it has gone again, or if the host has no
    /// room for it: that is another one's doing, and passes.
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

    /// Tells them.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// Why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServeEnd {
    /// Told to stop.
    Stop,
    /// The bell rings: it can be gone on with.
    PauseRequested,
}

/// What has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitResult {
    pub(crate) stop: bool,
    pub(crate) main: bool,
    pub(crate) extra: bool,
    pause: bool,
}

impl WaitResult {
    pub(super) fn serve_end(self) -> Option<ServeEnd> {
        let bell = self.pause.then_some(ServeEnd::PauseRequested);
        if self.stop {
            Some(ServeEnd::Stop)
        } else {
            bell
        }
    }
}

/// `busy`: there is other work to do, so only look.
pub(crate) fn wait(
    main: Option<BorrowedFd<'_>>,
    extra: Option<PollSource<'_>>,
    stop: &StopSignal,
    busy: bool,
) -> io::Result<WaitResult> {
    wait_or_pause(main, extra, stop, None, busy)
}

pub(super) fn wait_or_pause(
    main: Option<BorrowedFd<'_>>,
    extra: Option<PollSource<'_>>,
    stop: &StopSignal,
    bell: Option<BorrowedFd<'_>>,
    busy: bool,
) -> io::Result<WaitResult> {
    let mut fds = vec![PollFd::new(&*stop.0, PollFlags::IN)];
    fds.extend(main.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    fds.extend(bell.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    if let Some(PollSource { fd, input, output }) = extra {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, input);
        flags.set(PollFlags::OUT, output);
        // Of a descriptor that nothing is wanted from, poll would still say that its other side has
        // gone.
        if !flags.is_empty() {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
    }
    let at_once = Timespec::default();
    loop {
        match poll(&mut fds, busy.then_some(&at_once)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // In the order in which they were put there.
        let mut came = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = |asked: bool| asked && came.next().unwrap_or(false);
        return Ok(WaitResult {
            stop: next(true),
            main: next(main.is_some()),
            pause: next(bell.is_some()),
            extra: next(true),
        });
    }
}
