//! QEMU's monitor (QMP), used to stop and continue the guest's CPU.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest time for QEMU to complete a line that it has begun.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let mut monitor = Self {
            stream: BufReader::new(stream),
        };
        // The greeting precedes the first reply.
        monitor.ask("qmp_capabilities")?;
        while !monitor.answered()? {}
        Ok(monitor)
    }

    /// Sends a command. [`answered`](Self::answered) returns true for its reply.
    pub(super) fn ask(&mut self, command: &str) -> io::Result<()> {
        writeln!(self.stream.get_mut(), "{{\"execute\":\"{command}\"}}")
    }

    /// Reads a line. Returns true if it is the reply to the command; other lines are events.
    pub(super) fn answered(&mut self) -> io::Result<bool> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.starts_with("{\"error\"") {
            return Err(io::Error::other(line));
        }
        Ok(line.starts_with("{\"return\""))
    }

    /// Returns true if a complete line is buffered.
    pub(super) fn has_line(&self) -> bool {
        self.stream.buffer().contains(&b'\n')
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}
