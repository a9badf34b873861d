//! The qtest protocol: a line of text per command and per reply. Several commands in one message
//! cost one round trip.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

/// Most seconds that QEMU may take for one message.
const LIMIT: Duration = Duration::from_secs(20);

/// Most bytes of a line.
const LINE: u64 = 1 << 20;

/// A connection to QEMU.
#[derive(Debug)]
pub struct Qtest {
    stream: RefCell<BufReader<UnixStream>>,
    failed: Cell<bool>,
    /// Replies to posted commands that were not read yet.
    posted: Cell<usize>,
    round_trips: Cell<u64>,
    /// Values that registers had after the last command, in ascending order of use.
    prefetched: RefCell<Vec<(RegisterRead, u64)>>,
}

/// A read of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterRead {
    /// 8 bits at an address.
    Byte(u64),
    /// 16 bits at an address.
    Half(u64),
    /// 32 bits at an address.
    Word(u64),
    /// 64 bits at an address.
    Double(u64),
}

/// Commands that are sent together.
#[derive(Debug, Default)]
pub struct Commands {
    text: String,
    count: usize,
}

/// The replies to [`Commands`], in their order.
#[derive(Debug)]
pub struct Replies(Vec<String>);

impl Commands {
    fn add(&mut self, command: std::fmt::Arguments<'_>) -> usize {
        let _ = writeln!(self.text, "{command}");
        self.count += 1;
        self.count - 1
    }

    /// Adds a write of 8 bits.
    pub fn write8(&mut self, at: u64, value: u8) -> usize {
        self.add(format_args!("writeb {at:#x} {value:#x}"))
    }

    /// Adds a write of 16 bits.
    pub fn write16(&mut self, at: u64, value: u16) -> usize {
        self.add(format_args!("writew {at:#x} {value:#x}"))
    }

    /// Adds a write of 32 bits.
    pub fn write32(&mut self, at: u64, value: u32) -> usize {
        self.add(format_args!("writel {at:#x} {value:#x}"))
    }

    /// Adds a write of 64 bits.
    pub fn write64(&mut self, at: u64, value: u64) -> usize {
        self.add(format_args!("writeq {at:#x} {value:#x}"))
    }

    /// Adds a read of 32 bits.
    pub fn read32(&mut self, at: u64) -> usize {
        self.add(format_args!("readl {at:#x}"))
    }

    /// Adds a read of 64 bits.
    pub fn read64(&mut self, at: u64) -> usize {
        self.add(format_args!("readq {at:#x}"))
    }

    /// Adds a read.
    pub fn read(&mut self, read: RegisterRead) -> usize {
        match read {
            RegisterRead::Byte(at) => self.add(format_args!("readb {at:#x}")),
            RegisterRead::Half(at) => self.add(format_args!("readw {at:#x}")),
            RegisterRead::Word(at) => self.read32(at),
            RegisterRead::Double(at) => self.read64(at),
        }
    }

    /// Adds a write of consecutive 32-bit registers, lowest first.
    pub fn write_many(&mut self, at: u64, values: &[u32]) -> usize {
        let _ = write!(self.text, "write {at:#x} {:#x} 0x", values.len() * 4);
        for byte in values.iter().flat_map(|value| value.to_le_bytes()) {
            let _ = write!(self.text, "{byte:02x}");
        }
        self.add(format_args!(""))
    }

    /// Adds a read of `count` consecutive 32-bit registers, lowest first.
    pub fn read_many(&mut self, at: u64, count: usize) -> usize {
        self.add(format_args!("read {at:#x} {:#x}", count * 4))
    }

    /// Adds a write of 32 bits to an I/O port.
    pub fn out32(&mut self, port: u16, value: u32) -> usize {
        self.add(format_args!("outl {port:#x} {value:#x}"))
    }

    /// Adds a read of 32 bits from an I/O port.
    pub fn in32(&mut self, port: u16) -> usize {
        self.add(format_args!("inl {port:#x}"))
    }

    /// Adds a step of the virtual clock, in nanoseconds.
    pub fn step_clock(&mut self, nanoseconds: u64) -> usize {
        self.add(format_args!("clock_step {nanoseconds}"))
    }
}

impl Replies {
    /// Returns the number in the reply of command `index`, as the method that added it returned.
    ///
    /// # Errors
    /// The command has no reply, or it is no number.
    pub fn number(&self, index: usize) -> anyhow::Result<u64> {
        let word = self.word(index)?;
        u64::from_str_radix(word.trim_start_matches("0x"), 16).with_context(|| word.to_owned())
    }

    /// Returns the 32-bit registers in the reply of a [`Commands::read_many`].
    ///
    /// # Errors
    /// The command has no such reply.
    pub fn many(&self, index: usize) -> anyhow::Result<Vec<u32>> {
        let word = self.word(index)?;
        let digits = word.trim_start_matches("0x").as_bytes();
        let registers = digits.chunks_exact(8).map(|register| {
            let text = std::str::from_utf8(register)?;
            Ok(u32::from_str_radix(text, 16)?.swap_bytes())
        });
        registers.collect()
    }

    fn word(&self, index: usize) -> anyhow::Result<&str> {
        let reply = self.0.get(index).context("no such command")?;
        reply.split_whitespace().nth(1).context("no value")
    }
}

impl Qtest {
    /// Speaks qtest over `stream`.
    ///
    /// # Errors
    /// The socket accepts no time-out.
    pub(crate) fn new(stream: UnixStream) -> anyhow::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        Ok(Self {
            stream: RefCell::new(BufReader::new(stream)),
            failed: Cell::new(false),
            posted: Cell::new(0),
            round_trips: Cell::new(0),
            prefetched: RefCell::new(Vec::new()),
        })
    }

    /// Sends `commands` in one message and waits for all replies.
    ///
    /// # Errors
    /// QEMU ended, rejected a command, or did not reply in time. This connection then fails for
    /// ever.
    pub fn send(&self, commands: &Commands) -> anyhow::Result<Replies> {
        ensure!(!self.failed.get(), "the connection to QEMU failed earlier");
        self.prefetched.borrow_mut().clear();
        let replies = self.exchange(commands);
        self.failed.set(replies.is_err());
        self.round_trips.set(self.round_trips.get() + 1);
        replies
    }

    /// Sends `commands` without waiting for their replies. A failure is reported by the next
    /// [`send`](Self::send).
    pub fn post(&self, commands: &Commands) {
        self.prefetched.borrow_mut().clear();
        let mut stream = self.stream.borrow_mut();
        let written = stream.get_mut().write_all(commands.text.as_bytes());
        self.posted.set(self.posted.get() + commands.count);
        self.failed.set(self.failed.get() || written.is_err());
    }

    /// Sends `commands`, and `reads` in the same message. Each value answers one later
    /// [`read`](Self::read), as long as no other command is sent.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn send_and_prefetch(
        &self,
        mut commands: Commands,
        reads: &[RegisterRead],
    ) -> anyhow::Result<Replies> {
        let indices: Vec<_> = reads.iter().map(|read| commands.read(*read)).collect();
        let replies = self.send(&commands)?;
        for (read, index) in reads.iter().zip(indices) {
            let value = replies.number(index)?;
            self.prefetched.borrow_mut().push((*read, value));
        }
        Ok(replies)
    }

    /// Reads a register.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn read(&self, read: RegisterRead) -> anyhow::Result<u64> {
        let mut prefetched = self.prefetched.borrow_mut();
        if let Some(found) = prefetched.iter().position(|(known, _)| *known == read) {
            return Ok(prefetched.remove(found).1);
        }
        drop(prefetched);
        let mut commands = Commands::default();
        let index = commands.read(read);
        self.send(&commands)?.number(index)
    }

    /// Waits until all posted commands have taken effect.
    pub fn settle(&self) {
        if self.posted.get() != 0 {
            // The connection remembers a failure.
            let _ = self.send(&Commands::default());
        }
    }

    /// Returns the number of messages sent.
    pub fn round_trips(&self) -> u64 {
        self.round_trips.get()
    }

    /// Returns true if a command failed. Reads of registers return all ones since.
    pub fn has_failed(&self) -> bool {
        self.failed.get()
    }

    fn exchange(&self, commands: &Commands) -> anyhow::Result<Replies> {
        let mut stream = self.stream.borrow_mut();
        stream.get_mut().write_all(commands.text.as_bytes())?;
        for _ in 0..self.posted.take() {
            read_reply(&mut stream)?;
        }
        let replies: anyhow::Result<_> = (0..commands.count)
            .map(|_| read_reply(&mut stream))
            .collect();
        Ok(Replies(replies?))
    }
}

/// Reads a line that begins with OK. Skips messages about interrupt lines.
fn read_reply(stream: &mut BufReader<UnixStream>) -> anyhow::Result<String> {
    loop {
        let mut line = String::new();
        let bytes = stream.take(LINE).read_line(&mut line)?;
        ensure!(bytes != 0, "QEMU closed the connection");
        match line.split_whitespace().next() {
            Some("OK") => return Ok(line),
            Some("IRQ") => {}
            _ => bail!("QEMU replied {line:?}"),
        }
    }
}
