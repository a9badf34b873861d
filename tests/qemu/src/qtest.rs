//! The qtest protocol: a line of text per command and per reply. Several commands in one message
//! cost one round trip.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

/// Most seconds that QEMU may take for one message.
const LIMIT: Duration = Duration::from_secs(120);

/// Most bytes of a line.
const LINE: u64 = 1 << 20;

/// A connection to QEMU.
#[derive(Debug)]
pub struct Qtest {
    stream: RefCell<BufReader<UnixStream>>,
    failed: Cell<bool>,
    /// Commands that the next message begins with.
    deferred: RefCell<Commands>,
    /// Replies to posted commands that were not read yet.
    posted: Cell<usize>,
    round_trips: Cell<u64>,
    prefetched: RefCell<Prefetched>,
}

/// Values that registers had after an access, in ascending order of use.
#[derive(Debug, Default)]
pub struct Prefetched {
    values: Vec<(RegisterRead, u64)>,
    /// Posted commands do not change the registers.
    survives_posts: bool,
}

/// Reads of registers among [`Commands`].
#[derive(Debug, Default)]
pub struct Prefetch(Vec<(RegisterRead, usize)>);

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

    /// Adds reads of registers. Reads of the same register share a command.
    pub fn prefetch(&mut self, reads: &[RegisterRead]) -> Prefetch {
        let mut found: Vec<(RegisterRead, usize)> = Vec::new();
        for read in reads {
            let same = found.iter().find(|(known, _)| known == read);
            let index = match same {
                Some((_, index)) => *index,
                None => self.read(*read),
            };
            found.push((*read, index));
        }
        Prefetch(found)
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

impl Prefetch {
    /// Adds later reads.
    pub fn append(&mut self, mut later: Self) {
        self.0.append(&mut later.0);
    }
}

impl Prefetched {
    fn take(&mut self, read: RegisterRead) -> Option<u64> {
        let index = self.values.iter().position(|(known, _)| *known == read)?;
        Some(self.values.remove(index).1)
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

    /// Returns the values that `prefetch` read, for [`Qtest::prefetched`].
    ///
    /// # Errors
    /// A reply is no number.
    pub fn prefetched(
        &self,
        prefetch: &Prefetch,
        survives_posts: bool,
    ) -> anyhow::Result<Prefetched> {
        let values = prefetch.0.iter();
        let values = values.map(|(read, index)| Ok((*read, self.number(*index)?)));
        Ok(Prefetched {
            values: values.collect::<anyhow::Result<_>>()?,
            survives_posts,
        })
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
            deferred: RefCell::default(),
            posted: Cell::new(0),
            round_trips: Cell::new(0),
            prefetched: RefCell::default(),
        })
    }

    /// Sends all deferred commands and `commands` in one message, and waits for all replies.
    ///
    /// # Errors
    /// QEMU ended, rejected a command, or did not reply in time. This connection then fails for
    /// ever.
    pub fn send(&self, commands: &Commands) -> anyhow::Result<Replies> {
        ensure!(!self.failed.get(), "the connection to QEMU failed earlier");
        self.prefetched.take();
        let replies = self.exchange(commands);
        self.failed.set(replies.is_err());
        self.round_trips.set(self.round_trips.get() + 1);
        replies
    }

    /// Adds `commands` to the front of the next message. They neither read nor write RAM.
    pub fn defer(&self, commands: &Commands) {
        let mut prefetched = self.prefetched.borrow_mut();
        if !prefetched.survives_posts {
            prefetched.values.clear();
        }
        let mut deferred = self.deferred.borrow_mut();
        deferred.text.push_str(&commands.text);
        deferred.count += commands.count;
    }

    /// Sends `commands` without waiting for their replies. A failure is reported by the next
    /// [`send`](Self::send).
    pub fn post(&self, commands: &Commands) {
        self.defer(commands);
        let message = self.deferred.take();
        let mut stream = self.stream.borrow_mut();
        let written = stream.get_mut().write_all(message.text.as_bytes());
        self.posted.set(self.posted.get() + message.count);
        self.failed.set(self.failed.get() || written.is_err());
    }

    /// Lets each of the values answer one later [`read`](Self::read), as long as no message is
    /// sent.
    pub fn prefetched(&self, prefetched: Prefetched) {
        self.prefetched.replace(prefetched);
    }

    /// Reads a register.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn read(&self, read: RegisterRead) -> anyhow::Result<u64> {
        if let Some(value) = self.prefetched.borrow_mut().take(read) {
            return Ok(value);
        }
        let mut commands = Commands::default();
        let index = commands.read(read);
        self.send(&commands)?.number(index)
    }

    /// Waits until all posted commands have taken effect.
    pub fn settle(&self) {
        if self.posted.get() != 0 {
            let replies = self.exchange(&Commands::default());
            self.failed.set(self.failed.get() || replies.is_err());
            self.round_trips.set(self.round_trips.get() + 1);
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
        let mut message = self.deferred.take();
        message.text.push_str(&commands.text);
        stream.get_mut().write_all(message.text.as_bytes())?;
        for _ in 0..self.posted.take() + message.count {
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
