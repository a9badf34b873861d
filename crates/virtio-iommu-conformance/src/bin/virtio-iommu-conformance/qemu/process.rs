//! A QEMU process without a guest: its RAM is a file, and its registers are read and written
//! through the qtest protocol.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::NamedTempFile;

/// Address and size of the RAM of RISC-V's `virt`.
const RAM: u64 = 0x8000_0000;
const RAM_BYTES: u64 = 1 << 31;
/// Longest time for one message. A process that needs longer has ended.
const LIMIT: Duration = Duration::from_secs(60);
/// Most bytes of a reply.
const LINE: u64 = 1 << 12;

/// A running QEMU. Dropping it ends the process.
pub(super) struct Process {
    child: Child,
    stream: BufReader<UnixStream>,
    ram: NamedTempFile,
    ended: bool,
}

/// Commands of one message.
#[derive(Default)]
pub(super) struct Commands(String, usize);

impl Commands {
    /// Adds a command. Returns the index of its value in the replies.
    pub(super) fn add(&mut self, command: std::fmt::Arguments<'_>) -> usize {
        use std::fmt::Write as _;
        let _ = writeln!(self.0, "{command}");
        self.1 += 1;
        self.1 - 1
    }
}

/// Returns a command that starts `program`. A directory holds Debian's packages, unpacked; their
/// programs run with their own dynamic loader and libraries.
pub(super) fn command(program: &Path) -> Command {
    if !program.is_dir() {
        return Command::new(program);
    }
    let libraries = program.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(program.join("usr/lib64/ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries);
    command.arg(program.join("usr/bin/qemu-system-riscv64"));
    command.arg("-L").arg(program.join("usr/share/qemu"));
    command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
    command
}

impl Process {
    /// Starts QEMU with `devices`, each an object in JSON.
    pub(super) fn start(program: &Path, devices: &[String]) -> anyhow::Result<Self> {
        let ram = NamedTempFile::new()?;
        ram.as_file().set_len(RAM_BYTES)?;
        let log = tempfile::tempfile()?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(LIMIT))?;
        ours.set_write_timeout(Some(LIMIT))?;
        let mut command = command(program);
        command.args(["-machine", "virt,memory-backend=ram", "-bios", "none"]);
        command.args(["-m", &format!("{RAM_BYTES}B"), "-object"]);
        command.arg(format!(
            "memory-backend-file,id=ram,size={RAM_BYTES},share=on,mem-path={}",
            ram.path().display()
        ));
        command.args(["-chardev", "socket,id=qtest,fd=0"]);
        command.args(["-qtest", "chardev:qtest", "-qtest-log", "none"]);
        command.args(["-accel", "qtest", "-display", "none", "-nodefaults"]);
        for device in devices {
            command.args(["-device", device]);
        }
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(log.try_clone()?);
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {}", program.display()))?;
        // The child alone holds the other end, so that its end is seen.
        drop(command);
        let mut process = Self {
            child,
            stream: BufReader::new(ours),
            ram,
            ended: false,
        };
        let started = process.run(&Commands::default());
        let mut probe = Commands::default();
        probe.add(format_args!("readl {RAM:#x}"));
        if started.is_none() || process.run(&probe).is_none() {
            bail!("QEMU ends at once: {}", text(log)?);
        }
        Ok(process)
    }

    /// Sends `commands` in one message. Returns a value for each, 0 for those without; `None` if
    /// the process has ended.
    pub(super) fn run(&mut self, commands: &Commands) -> Option<Vec<u64>> {
        if self.ended {
            return None;
        }
        let replies = self.exchange(commands);
        self.ended = replies.is_err();
        replies.ok()
    }

    fn exchange(&mut self, commands: &Commands) -> anyhow::Result<Vec<u64>> {
        self.stream.get_mut().write_all(commands.0.as_bytes())?;
        (0..commands.1).map(|_| self.reply()).collect()
    }

    fn reply(&mut self) -> anyhow::Result<u64> {
        loop {
            let mut line = String::new();
            let bytes = (&mut self.stream).take(LINE).read_line(&mut line)?;
            ensure!(bytes != 0, "QEMU closed the connection");
            let mut words = line.split_whitespace();
            match words.next() {
                Some("OK") => {
                    let value = words.next().map(|word| word.trim_start_matches("0x"));
                    return Ok(value.map_or(Ok(0), |word| u64::from_str_radix(word, 16))?);
                }
                // A message about an interrupt line.
                Some("IRQ") => {}
                _ => bail!("QEMU replied {line:?}"),
            }
        }
    }

    /// Reads RAM at a guest-physical address.
    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) {
        let done = self.ram.as_file().read_exact_at(bytes, at - RAM);
        done.expect("an address in RAM");
    }

    /// Writes RAM at a guest-physical address.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        let done = self.ram.as_file().write_all_at(bytes, at - RAM);
        done.expect("an address in RAM");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the text of a log.
fn text(mut log: File) -> anyhow::Result<String> {
    use std::io::Seek;
    let mut text = String::new();
    log.rewind()?;
    log.take(LINE).read_to_string(&mut text)?;
    Ok(text.trim().to_owned())
}

/// Returns the first line that QEMU prints about its version.
pub(crate) fn version(program: &Path) -> anyhow::Result<String> {
    let output = command(program).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let number = text.split("version ").nth(1);
    let number = number.and_then(|rest| rest.split_whitespace().next());
    let number = number.context("QEMU prints no version")?;
    Ok(number.to_owned())
}
