//! QEMU's monitor (QMP): stops the guest, reads registers, ends QEMU.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, ensure};
use ringfence_types::PhysAddr;

#[derive(Debug)]
pub(super) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Begins a conversation. QEMU's greeting precedes the first answer.
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// Executes a command without arguments.
    pub(super) fn execute(&mut self, command: &str) -> anyhow::Result<String> {
        self.ask(&format!("{{\"execute\":\"{command}\"}}"))
    }

    /// Reads a register of `bytes` bytes, 4 or 8.
    pub(super) fn register(&mut self, at: PhysAddr, bytes: u32) -> anyhow::Result<u64> {
        let size = if bytes == 4 { 'w' } else { 'g' };
        let answer = self.ask(&format!(
            "{{\"execute\":\"human-monitor-command\",\"arguments\":\
             {{\"command-line\":\"xp /1x{size} {:#x}\"}}}}",
            at.get()
        ))?;
        let value = answer
            .split(|c: char| !c.is_ascii_alphanumeric())
            .find_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
        value.with_context(|| format!("no value in {answer:?}"))
    }

    /// Sends a command and returns the line with its answer. Other lines are events.
    fn ask(&mut self, command: &str) -> anyhow::Result<String> {
        writeln!(self.stream.get_mut(), "{command}")?;
        loop {
            let mut line = String::new();
            let length = self.stream.read_line(&mut line)?;
            ensure!(length != 0, "QEMU has ended");
            ensure!(
                !line.starts_with("{\"error\""),
                "{command} is answered by {line}"
            );
            if line.starts_with("{\"return\"") {
                return Ok(line);
            }
        }
    }
}
