//! A RISC-V IOMMU for tests: registers, queues, and caches that keep entries until a command
//! names them.

#![allow(dead_code, unreachable_pub, unused_imports)] // each test uses a part

pub mod cache;
pub mod model;
pub mod walk;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    GuestFirstStage, MsiTranslation, Options, PageTable, Translation, Unit,
};
use ringfence_types::{DomainId, PhysAddr, PhysMemory, PhysRange, RequesterId};
use std::sync::atomic::Ordering;

pub use model::{Behaviour, Model};

/// Version 1.0, Sv39, Sv48, Sv57 and their x4 forms, PAS 56, PD8, PD17, PD20.
pub const BASE: u64 = 0x01f8_000e_0e10;
pub const MSI_FLAT: u64 = 1 << 22;
pub const ATS: u64 = 1 << 25;
pub const T2GPA: u64 = 1 << 26;
pub const END: u64 = 1 << 27;
pub const IGS_BOTH: u64 = 2 << 28;
pub const NL: u64 = 1 << 42;
pub const S: u64 = 1 << 43;

pub const FRAME: u64 = 4096;
pub const MEMORY: u64 = 8 << 20;
const FRAMES: u64 = 1 << 20;

/// Memory, and the frames above the first MiB.
pub struct Machine {
    pub memory: Arena,
}

impl Machine {
    pub fn new() -> Self {
        Self {
            memory: Arena::new(MEMORY).unwrap(),
        }
    }

    pub fn frames(&self) -> Frames<&Arena> {
        let region = PhysRange::new(PhysAddr::new(FRAMES), MEMORY - FRAMES).unwrap();
        Frames::new(&self.memory, region)
    }

    pub fn word(&self, at: u64) -> u64 {
        let word = self.memory.word(PhysAddr::new(at)).unwrap();
        word.load(Ordering::SeqCst)
    }

    pub fn set(&self, at: u64, value: u64) {
        let word = self.memory.word(PhysAddr::new(at)).unwrap();
        word.store(value, Ordering::SeqCst);
    }
}

pub type TestUnit<'a> = Unit<&'a Model<'a>, &'a Arena>;

/// Options whose limit of polls is soon reached.
pub fn options() -> Options {
    Options {
        poll_limit: 40,
        ..Options::default()
    }
}

pub fn start<'a>(
    machine: &'a Machine,
    model: &'a Model<'a>,
    frames: &Frames<&'a Arena>,
    options: Options,
) -> TestUnit<'a> {
    Unit::new(model, &machine.memory, frames, options).unwrap()
}

pub const fn device(id: u16) -> RequesterId {
    RequesterId::new(id)
}

pub const fn table(root: u64, levels: Levels) -> PageTable {
    PageTable {
        root: PhysAddr::new(root),
        levels,
    }
}

/// Tables that the tests write below the frames. Each maps some addresses at 3 levels.
pub const FIRST: u64 = 0x1_0000;
pub const OTHER: u64 = 0x2_0000;
pub const SECOND: u64 = 0x3_0000;

/// Writes a table of three levels at `root`, four frames apart, that maps `address`.
pub fn map(machine: &Machine, root: u64, address: u64, to: u64) {
    let mut table = root;
    for level in [2, 1] {
        let at = table + (address >> (12 + 9 * level) & 0x7ff) * 8;
        let next = root + 0x4000 * (3 - level);
        machine.set(at, next >> 12 << 10 | 1);
        table = next;
    }
    machine.set(table + (address >> 12 & 0x1ff) * 8, to >> 12 << 10 | 0xd7);
}

pub fn first(root: u64) -> Translation {
    Translation::FirstStage(table(root, Levels::Three))
}

pub fn second(guest: GuestFirstStage, msi: Option<MsiTranslation>) -> Translation {
    Translation::SecondStage {
        table: table(SECOND, Levels::Three),
        guest,
        msi,
    }
}

pub const fn domain(id: u16) -> DomainId {
    DomainId::new(id)
}
