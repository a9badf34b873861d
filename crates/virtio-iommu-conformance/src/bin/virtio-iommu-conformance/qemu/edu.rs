//! Accesses by QEMU's `edu`: a PCI device that copies between an address and a buffer of its own.
//!
//! Each word of the memory holds its own address, so that a read shows where it came from and a
//! write shows where it went. The device's buffer is filled and copied out through the region of
//! MSIs: QEMU translates it to itself for every attached endpoint, and here it is RAM.

use std::sync::LazyLock;

use ringfence_virtio_iommu_conformance::{Access, Outcome};

use super::process::{Commands, Process};

/// Memory that accesses reach.
pub(super) const MEMORY: u64 = 0x8200_0000;
const MEMORY_BYTES: usize = 0x2_0000;
/// Places in the region of MSIs: the mark, and where the buffer is copied out.
pub(super) const WINDOW: u64 = 0xfee0_0000;
const OUT: u64 = WINDOW + 64;

/// Registers, and the address of the buffer.
const SOURCE: u64 = 0x80;
const TARGET: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
const BUFFER: u64 = 0x4_0000;
/// Time of a copy in nanoseconds.
const COPY: u64 = 100_000_000;

/// Content of the buffer before each access, or zeros. No byte of the memory is equal.
const MARK: [u8; 8] = [0x11; 8];
/// Content of the window before the buffer is copied out.
const CLEAR: [u8; 8] = [0x22; 8];

/// The word of 8 bytes with number `index`: each byte has bit 7 and 7 bits of the number.
const fn word(index: usize) -> [u8; 8] {
    let mut bytes = [0x80; 8];
    bytes[0] |= (index & 0x7f) as u8;
    bytes[1] |= (index >> 7 & 0x7f) as u8;
    bytes[2] |= (index >> 14 & 0x7f) as u8;
    bytes
}

/// Returns the address of a word.
fn address(bytes: [u8; 8]) -> Option<u64> {
    let part = |at: usize| u64::from(bytes[at] & 0x7f) << (7 * at);
    let index = part(0) | part(1) | part(2);
    (word(index as usize) == bytes).then_some(MEMORY + 8 * index)
}

/// Returns the content of the memory.
fn content() -> &'static [u8] {
    static CONTENT: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..MEMORY_BYTES / 8).flat_map(word).collect());
    &CONTENT
}

/// Fills the memory and the window.
pub(super) fn fill(process: &Process) {
    process.write(MEMORY, content());
    process.write(WINDOW, &MARK);
}

/// The device whose registers are at `bar`.
pub(super) struct Edu {
    pub(super) bar: u64,
}

impl Edu {
    /// Adds a copy between IOVAs and the buffer.
    fn copy(&self, commands: &mut Commands, access: Access, iova: u64, bytes: u64) {
        let (source, target, command) = match access {
            Access::Read => (iova, BUFFER, 1),
            Access::Write => (BUFFER, iova, 3),
        };
        for (register, value) in [
            (SOURCE, source),
            (TARGET, target),
            (COUNT, bytes),
            (COMMAND, command),
        ] {
            commands.add(format_args!("writeq {:#x} {value:#x}", self.bar + register));
        }
        commands.add(format_args!("clock_step {COPY}"));
    }

    /// Accesses one byte.
    pub(super) fn access(&self, process: &mut Process, iova: u64, access: Access) -> Outcome {
        let outcome = match access {
            Access::Read => self.read(process, iova),
            Access::Write => self.write(process, iova),
        };
        outcome.unwrap_or(Outcome::Unobservable("QEMU has ended"))
    }

    fn write(&self, process: &mut Process, iova: u64) -> Option<Outcome> {
        let mut commands = Commands::default();
        self.copy(&mut commands, Access::Write, iova, 1);
        process.run(&commands)?;
        let expected = content();
        let mut found = vec![0; expected.len()];
        process.read(MEMORY, &mut found);
        if found == expected {
            return Some(Outcome::Blocked);
        }
        let mut both = found.iter().zip(expected);
        let offset = both.position(|(one, other)| one != other)?;
        process.write(MEMORY, expected);
        Some(Outcome::Reached(MEMORY + offset as u64))
    }

    fn read(&self, process: &mut Process, iova: u64) -> Option<Outcome> {
        // One byte shows whether the access is allowed.
        let [first, ..] = self.read_bytes(process, iova, 1)?;
        if first == CLEAR[0] {
            return Some(Outcome::Unobservable(
                "the adapter cannot observe reads of an unattached endpoint",
            ));
        }
        // QEMU reads zeros where nothing is.
        if first == MARK[0] || first == 0 {
            return Some(Outcome::Blocked);
        }
        let bytes = self.read_bytes(process, iova & !7, 8)?;
        let mut commands = Commands::default();
        self.copy(&mut commands, Access::Read, WINDOW, 8);
        process.run(&commands)?;
        Some(match address(bytes) {
            Some(at) => Outcome::Reached(at + (iova & 7)),
            None => Outcome::Unobservable("a read reaches bytes outside the memory"),
        })
    }

    /// Reads into the buffer and copies it out.
    fn read_bytes(&self, process: &mut Process, iova: u64, bytes: u64) -> Option<[u8; 8]> {
        process.write(OUT, &CLEAR);
        let mut commands = Commands::default();
        self.copy(&mut commands, Access::Read, WINDOW, 8);
        self.copy(&mut commands, Access::Read, iova, bytes);
        self.copy(&mut commands, Access::Write, OUT, bytes);
        process.run(&commands)?;
        let mut found = [0; 8];
        process.read(OUT, &mut found);
        Some(found)
    }
}
