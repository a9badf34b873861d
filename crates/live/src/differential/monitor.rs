//! QEMU's monitor (QMP): the guest's processor is stopped and goes on.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest time that QEMU may take for a line that it has begun.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

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
        // The greeting comes first and is no answer.
        monitor.ask("qmp_capabilities")?;
        while !monitor.answered()? {}
        Ok(monitor)
    }

    /// Sends a command. [`answered`](Self::answered) says when it has been carried out.
    pub(super) fn ask(&mut self, command: &str) -> io::Result<()> {
        writeln!(self.stream.get_mut(), "{{\"execute\":\"{command}\"}}")
    }

    /// Reads a line; whether it says that the command was carried out. Others tell of events.
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

    /// Whether a line is here already.
    pub(super) fn has_line(&self) -> bool {
        self.stream.buffer().contains(&b'\n')
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}
