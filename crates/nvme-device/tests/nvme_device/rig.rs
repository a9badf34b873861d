//! A host with 1 MiB of memory, an admin queue pair and one I/O queue pair, and a namespace in
//! memory.

use ringfence_nvme_device::{
    BLOCK_BYTES, Blocked, Config, Controller, Medium, MediumError, Memory, NvmeCompletion,
    NvmeStatus, Opcode, Segment, Step, register,
};
use ringfence_types::Iova;

pub(crate) const MEMORY: usize = 1 << 20;
pub(crate) const BLOCKS: u64 = 1024;
pub(crate) const ADMIN_SQ: u64 = 0x1000;
pub(crate) const ADMIN_CQ: u64 = 0x2000;
pub(crate) const IO_SQ: u64 = 0x3000;
pub(crate) const IO_CQ: u64 = 0x4000;
/// Entries of each queue of the rig.
pub(crate) const ENTRIES: u32 = 8;
/// `CC` with 64-byte and 16-byte entries, and `EN`.
pub(crate) const ENABLED: u64 = 0x0046_0001;

pub(crate) struct Host {
    pub(crate) bytes: Vec<u8>,
    /// Accesses to this page are stopped.
    pub(crate) blocked: Option<u64>,
    /// Buffers of the last transfer.
    pub(crate) seen: Option<(Opcode, Vec<Segment>)>,
    /// Addresses and lengths of all writes, in order.
    pub(crate) writes: Vec<(u64, usize)>,
}

impl Host {
    fn range(&self, at: Iova, bytes: usize) -> Result<std::ops::Range<usize>, Blocked> {
        let start = usize::try_from(at.get()).map_err(|_| Blocked)?;
        let end = start.checked_add(bytes).ok_or(Blocked)?;
        let hit = |page: u64| start < page as usize + 4096 && end > page as usize;
        if end > self.bytes.len() || self.blocked.is_some_and(hit) {
            return Err(Blocked);
        }
        Ok(start..end)
    }

    pub(crate) fn store(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn load(&self, at: u64, bytes: usize) -> &[u8] {
        &self.bytes[at as usize..at as usize + bytes]
    }
}

impl Memory for Host {
    fn read(&mut self, at: Iova, data: &mut [u8]) -> Result<(), Blocked> {
        let range = self.range(at, data.len())?;
        data.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    fn write(&mut self, at: Iova, data: &[u8]) -> Result<(), Blocked> {
        let range = self.range(at, data.len())?;
        self.writes.push((at.get(), data.len()));
        self.bytes[range].copy_from_slice(data);
        Ok(())
    }

    fn before_transfer(&mut self, kind: Opcode, buffers: &[Segment]) {
        self.seen = Some((kind, buffers.to_vec()));
    }
}

pub(crate) struct Blocks {
    pub(crate) bytes: Vec<u8>,
    pub(crate) flushes: u32,
    pub(crate) is_broken: bool,
}

impl Blocks {
    fn part(&mut self, block: u64, bytes: usize) -> Result<&mut [u8], MediumError> {
        if self.is_broken {
            return Err(MediumError);
        }
        let start = (block * BLOCK_BYTES) as usize;
        Ok(&mut self.bytes[start..start + bytes])
    }
}

impl Medium for Blocks {
    fn read(&mut self, block: u64, data: &mut [u8]) -> Result<(), MediumError> {
        data.copy_from_slice(self.part(block, data.len())?);
        Ok(())
    }

    fn write(&mut self, block: u64, data: &[u8]) -> Result<(), MediumError> {
        self.part(block, data.len())?.copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), MediumError> {
        self.flushes += 1;
        if self.is_broken {
            Err(MediumError)
        } else {
            Ok(())
        }
    }
}

/// The host's side of a queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) number: u64,
    pub(crate) submissions: u64,
    pub(crate) completions: u64,
    tail: u32,
    head: u32,
}

pub(crate) struct Rig {
    pub(crate) controller: Controller,
    pub(crate) host: Host,
    pub(crate) blocks: Blocks,
    pub(crate) admin: Pair,
    pub(crate) io: Pair,
}

/// A submission queue entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Command {
    pub(crate) opcode: u8,
    pub(crate) flags: u8,
    pub(crate) id: u16,
    pub(crate) namespace: u32,
    pub(crate) prps: [u64; 2],
    /// Dwords 10 to 15.
    pub(crate) words: [u32; 6],
}

impl Command {
    pub(crate) fn new(opcode: u8) -> Self {
        Self {
            opcode,
            id: 0x1234,
            ..Self::default()
        }
    }

    /// A read or a write of `blocks` blocks.
    pub(crate) fn transfer(opcode: u8, block: u64, blocks: u32, prps: [u64; 2]) -> Self {
        Self {
            namespace: 1,
            prps,
            words: [block as u32, (block >> 32) as u32, blocks - 1, 0, 0, 0],
            ..Self::new(opcode)
        }
    }

    pub(crate) fn encode(&self) -> [u8; 64] {
        let mut raw = [0; 64];
        raw[0] = self.opcode;
        raw[1] = self.flags;
        raw[2..4].copy_from_slice(&self.id.to_le_bytes());
        raw[4..8].copy_from_slice(&self.namespace.to_le_bytes());
        for (at, prp) in [24, 32].into_iter().zip(self.prps) {
            raw[at..at + 8].copy_from_slice(&prp.to_le_bytes());
        }
        for (at, word) in (40..).step_by(4).zip(self.words) {
            raw[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        raw
    }
}

fn pair(number: u64, submissions: u64, completions: u64) -> Pair {
    Pair {
        number,
        submissions,
        completions,
        tail: 0,
        head: 0,
    }
}

impl Rig {
    pub(crate) fn off(config: &Config) -> Self {
        let blocks = (0..BLOCKS * BLOCK_BYTES).map(|at| (at / 3) as u8).collect();
        Self {
            controller: Controller::new(config),
            host: Host {
                bytes: vec![0; MEMORY],
                blocked: None,
                seen: None,
                writes: Vec::new(),
            },
            blocks: Blocks {
                bytes: blocks,
                flushes: 0,
                is_broken: false,
            },
            admin: pair(0, ADMIN_SQ, ADMIN_CQ),
            io: pair(1, IO_SQ, IO_CQ),
        }
    }

    /// Enabled, with the admin queues.
    pub(crate) fn started() -> Self {
        let mut rig = Self::off(&Config::new(BLOCKS));
        rig.enable();
        rig
    }

    /// With I/O queue pair 1, whose completions signal vector 1.
    pub(crate) fn ready() -> Self {
        let mut rig = Self::started();
        rig.create_pair();
        rig
    }

    pub(crate) fn enable(&mut self) {
        let size = u64::from(ENTRIES - 1);
        self.write(register::AQA, 4, size << 16 | size);
        self.write(register::ASQ, 8, ADMIN_SQ);
        self.write(register::ACQ, 8, ADMIN_CQ);
        self.write(register::CC, 4, ENABLED);
        assert_eq!(self.controller.read(register::CSTS, 4), 1, "ready");
        // The host clears the completion queues, so that the phase of each entry is known.
        self.host.store(ADMIN_CQ, &[0; 0x1000]);
        self.host.store(IO_CQ, &[0; 0x1000]);
        self.admin = pair(0, ADMIN_SQ, ADMIN_CQ);
        self.io = pair(1, IO_SQ, IO_CQ);
    }

    pub(crate) fn create_pair(&mut self) {
        for command in [create_cq(1, IO_CQ), create_sq(1, IO_SQ)] {
            assert_eq!(self.admin(command).0, 0, "{command:?}");
        }
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: u64, value: u64) {
        self.controller
            .write(offset, bytes, value, &mut self.blocks);
    }

    pub(crate) fn step(&mut self) -> Step {
        self.controller.step(&mut self.host, &mut self.blocks)
    }

    /// Steps until the controller is idle.
    pub(crate) fn run(&mut self) -> Vec<Step> {
        let steps = std::iter::from_fn(|| Some(self.step()));
        steps
            .take_while(|step| *step != Step::Idle)
            .take(1000)
            .collect()
    }

    /// Adds a command to a queue and rings its doorbell.
    pub(crate) fn submit(&mut self, pair: fn(&mut Self) -> &mut Pair, command: Command) {
        let Pair {
            number,
            submissions,
            tail,
            ..
        } = *pair(self);
        self.host
            .store(submissions + u64::from(tail) * 64, &command.encode());
        let tail = (tail + 1) % ENTRIES;
        pair(self).tail = tail;
        self.write(register::DOORBELLS + number * 8, 4, tail.into());
    }

    /// Consumes the next completion. `None` if its phase is that of the previous pass.
    pub(crate) fn completion(
        &mut self,
        pair: fn(&mut Self) -> &mut Pair,
    ) -> Option<NvmeCompletion> {
        let Pair {
            number,
            completions,
            head,
            ..
        } = *pair(self);
        let raw: [u8; 16] = {
            let raw = self
                .host
                .load(completions + u64::from(head % ENTRIES) * 16, 16);
            raw.try_into().unwrap()
        };
        let phase = raw[14] & 1 == 1;
        if phase == (head / ENTRIES % 2 == 1) {
            return None;
        }
        pair(self).head += 1;
        let next = (head + 1) % ENTRIES;
        self.write(register::DOORBELLS + number * 8 + 4, 4, next.into());
        Some(NvmeCompletion::decode(&raw))
    }

    /// Executes an admin command. Returns the status without Do Not Retry, and the result.
    pub(crate) fn admin(&mut self, command: Command) -> (u16, u32) {
        self.execute(|rig| &mut rig.admin, command)
    }

    /// Executes an I/O command. Returns the status without Do Not Retry.
    pub(crate) fn io(&mut self, command: Command) -> u16 {
        self.execute(|rig| &mut rig.io, command).0
    }

    fn execute(&mut self, pair: fn(&mut Self) -> &mut Pair, command: Command) -> (u16, u32) {
        self.submit(pair, command);
        self.run();
        let done = self.completion(pair).expect("a completion");
        assert_eq!(done.id, command.id);
        assert_eq!(u64::from(done.queue), pair(self).number);
        assert_eq!(u32::from(done.head), pair(self).tail);
        (done.status & 0x7ff, done.result)
    }
}

pub(crate) fn create_cq(number: u32, base: u64) -> Command {
    Command {
        prps: [base, 0],
        words: [
            (ENTRIES - 1) << 16 | number,
            number << 16 | 0b11,
            0,
            0,
            0,
            0,
        ],
        ..Command::new(0x05)
    }
}

pub(crate) fn create_sq(number: u32, base: u64) -> Command {
    Command {
        prps: [base, 0],
        words: [(ENTRIES - 1) << 16 | number, number << 16 | 1, 0, 0, 0, 0],
        ..Command::new(0x01)
    }
}

/// A command of queue `number` whose only parameter is the queue.
pub(crate) fn delete(opcode: u8, number: u32) -> Command {
    Command {
        words: [number, 0, 0, 0, 0, 0],
        ..Command::new(opcode)
    }
}

pub(crate) fn code(status: NvmeStatus) -> u16 {
    status as u16
}
