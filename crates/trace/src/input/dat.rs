//! Reads trace-cmd's binary recordings through `trace-cmd report`. The format depends on the format
//! descriptions of the recording kernel, and trace-cmd keeps up with them.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

use super::source::ReadError;
use crate::error::TraceError;

/// First bytes of a recording (trace-cmd.dat(5), "INITIAL FORMAT").
pub(super) const MAGIC: &[u8] = b"\x17\x08\x44tracing";

/// Maximum number of bytes of standard error kept for the error message.
const MESSAGE_BYTES: u64 = 4096;

/// A running `trace-cmd report`.
#[derive(Debug)]
pub(super) struct Report {
    file: PathBuf,
    child: Child,
    output: ChildStdout,
    /// True if it has printed anything.
    printed: bool,
    /// Thread that drains standard error, so that the child never blocks on it.
    message: Option<JoinHandle<String>>,
}

impl Report {
    pub(super) fn of(file: &Path) -> Result<Self, TraceError> {
        Self::run("trace-cmd".as_ref(), file)
    }

    fn run(program: &Path, file: &Path) -> Result<Self, TraceError> {
        let missing = |source| TraceError::TraceCmdMissing {
            file: file.to_owned(),
            source,
        };
        let mut child = Command::new(program)
            .args(["report", "-i"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(missing)?;
        let (Some(output), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(missing(io::Error::other("no pipe")));
        };
        let message = std::thread::spawn(move || {
            let mut head = Vec::new();
            // A failure here loses only the message.
            let _ = errors.by_ref().take(MESSAGE_BYTES).read_to_end(&mut head);
            let _ = io::copy(&mut errors, &mut io::sink());
            String::from_utf8_lossy(&head).trim().to_owned()
        });
        Ok(Self {
            file: file.to_owned(),
            child,
            output,
            printed: false,
            message: Some(message),
        })
    }
}

impl Read for Report {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let count = self.output.read(space)?;
        if count > 0 || space.is_empty() {
            self.printed |= count > 0;
            return Ok(count);
        }
        let status = self.child.wait()?;
        let message = self.message.take().and_then(|thread| thread.join().ok());
        if status.success() && self.printed {
            return Ok(0);
        }
        let message = message.filter(|text| !text.is_empty());
        Err(io::Error::other(ReadError::Report(
            TraceError::TraceCmdFailed {
                file: self.file.clone(),
                message: message.unwrap_or_else(|| match status.success() {
                    // A report begins with the number of processors even if there are no events.
                    // For a truncated file, trace-cmd 3.1 prints nothing and exits with success.
                    true => "trace-cmd printed nothing: the file is truncated or \
                    damaged"
                        .to_owned(),
                    false => status.to_string(),
                }),
            },
        )))
    }
}

impl Drop for Report {
    /// Kills a child whose output is no longer needed.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_gives_advice() {
        let error = Report::run("no-such-trace-cmd".as_ref(), "x.dat".as_ref()).unwrap_err();
        assert!(matches!(error, TraceError::TraceCmdMissing { .. }));
        assert!(error.to_string().contains("install trace-cmd"), "{error}");
    }

    #[test]
    fn a_failing_program_is_an_error_at_the_end() {
        // `false` fails, `true` succeeds without output, and `echo` prints its arguments.
        let mut text = String::new();
        for program in ["false", "true"] {
            let mut report = Report::run(program.as_ref(), "x.dat".as_ref()).unwrap();
            assert!(report.read_to_string(&mut text).is_err(), "{program}");
        }
        let mut report = Report::run("echo".as_ref(), "x.dat".as_ref()).unwrap();
        assert!(report.read_to_string(&mut text).is_ok());
        assert!(text.contains("x.dat"));
    }
}
