//! Registers and memory with any values: every call ends, and none panics.

mod common;

use std::cell::Cell;

use common::{FRAME, MEMORY, Machine, device, options, table};
use proptest::prelude::*;
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    Ats, Capabilities, FaultRecord, GuestFirstStage, MsiAddresses, MsiPageTable, MsiTranslation,
    Options, PageRequest, PageResponse, PageTable, Privilege, ProcessBits, Translation, Unit,
};
use ringfence_types::{
    CachedLevels, DomainId, GuestPhysAddr, Invalidation, Invalidator, Pfn, PfnRange, PhysAddr,
    PhysMemory, Registers,
};
use std::sync::atomic::Ordering;

/// Registers that keep the promises of the start, and then answer anything.
struct Hostile {
    capabilities: u64,
    last: [Cell<u64>; 16],
    honest: Cell<bool>,
    random: Cell<u64>,
}

impl Hostile {
    fn next(&self) -> u64 {
        let mut x = self.random.get() | 1;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.set(x);
        match x >> 60 {
            0..4 => u64::MAX,
            4..6 => 0,
            6..9 => x & 0xff,
            9..12 => 1 << 16 | x & 0x300,
            _ => x,
        }
    }
}

impl Registers for Hostile {
    fn read32(&self, offset: u64) -> u32 {
        if !self.honest.get() {
            return self.next() as u32;
        }
        match offset {
            72 | 76 | 80 => {
                let value = self.last[(offset / 8) as usize].get() as u32;
                value & 3 | (value & 1) << 16
            }
            _ => 0,
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        match offset {
            0 => self.capabilities,
            _ if self.honest.get() => self.last[(offset / 8) as usize].get(),
            _ => self.next(),
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        // 72 and 76 share a slot: both queues are switched alike.
        self.write64(offset, value.into());
    }

    fn write64(&self, offset: u64, value: u64) {
        if let Some(slot) = self.last.get((offset / 8) as usize) {
            slot.set(value);
        }
    }
}

fn translations() -> impl Strategy<Value = Translation> {
    let levels = prop_oneof![Just(Levels::Three), Just(Levels::Four), Just(Levels::Five)];
    let root = prop_oneof![(0..64_u64).prop_map(|frame| frame * 0x4000), any::<u64>()];
    let bits = prop_oneof![
        Just(ProcessBits::Eight),
        Just(ProcessBits::Seventeen),
        Just(ProcessBits::Twenty)
    ];
    (0..6, root, levels, bits, any::<u32>(), any::<[u64; 3]>()).prop_map(
        |(kind, root, levels, bits, space, [msi, mask, pattern])| {
            let outer = table(root, levels);
            let guest = GuestPhysAddr::new(root);
            let second = |guest, msi| Translation::SecondStage {
                table: outer,
                guest,
                msi,
            };
            match kind {
                0 => Translation::PassThrough,
                1 => Translation::FirstStage(outer),
                2 => Translation::Processes(bits),
                3 => second(
                    GuestFirstStage::Table {
                        root: guest,
                        levels,
                        space,
                    },
                    None,
                ),
                4 => second(
                    GuestFirstStage::Processes {
                        root: guest,
                        bits,
                        default_process: space & 1 != 0,
                    },
                    None,
                ),
                _ => second(
                    GuestFirstStage::Bare,
                    Some(MsiTranslation {
                        table: PhysAddr::new(msi),
                        mask,
                        pattern,
                    }),
                ),
            }
        },
    )
}

fn call(unit: &mut Unit<&Hostile, &ringfence_memory::Arena>, request: Invalidation) {
    if let Ok(ticket) = unit.submit(request) {
        for _ in 0..4 {
            let _ = unit.poll(ticket);
        }
    }
    for _ in 0..4 {
        let _ = unit.next_fault();
        let _ = unit.next_page_request();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_unit_with_any_registers_cannot_break_the_driver(
        capabilities in prop_oneof![
            any::<u64>(),
            (any::<u64>()).prop_map(|raw| raw & !0xff | 0x10)
        ],
        seed in any::<u64>(),
        bits in 0..=32_u32,
        id in any::<u16>(),
        process in any::<u32>(),
        translation in translations(),
        pages in any::<(u64, u64)>(),
        words in proptest::collection::vec(any::<(u64, u64)>(), 0..64),
        honest_start in any::<bool>(),
    ) {
        let machine = Machine::new();
        let frames = machine.frames();
        let registers = Hostile {
            capabilities,
            last: std::array::from_fn(|_| Cell::new(0)),
            honest: Cell::new(false),
            random: Cell::new(seed),
        };
        let options = Options {
            device_id_bits: bits,
            page_request_entries: (seed & 1 != 0).then_some(4),
            fault_entries: 4,
            poll_limit: 3,
            ..options()
        };
        registers.honest.set(honest_start);
        let unit = Unit::new(&registers, &machine.memory, &frames, options);
        registers.honest.set(false);
        let Ok(mut unit) = unit else { return Ok(()) };
        let domain = DomainId::new(1);
        let ats = Ats { page_requests: true, ..Ats::default() };
        let _ = unit.attach(&frames, device(id), domain, &translation);
        let _ = unit.attach_with_ats(&frames, device(id ^ 1), domain, &translation, Some(ats));
        // The directories and queues hold anything, except that frames stay in memory.
        for (at, word) in words {
            let at = PhysAddr::new(at % (MEMORY / 8) * 8);
            machine.memory.word(at).unwrap().store(word, Ordering::SeqCst);
        }
        let root = PageTable { root: PhysAddr::new(FRAME), levels: Levels::Three };
        let _ = unit.attach_process(&frames, device(id), process, domain, root, Privilege::User);
        let _ = unit.detach_process(&frames, device(id), process);
        let lo = Pfn::new(pages.0);
        if let Some(range) = PfnRange::new(lo, pages.1.max(1)) {
            let levels = CachedLevels::All;
            call(&mut unit, Invalidation::Pages { domain, range, levels });
            let _ = unit.submit_guest_first_stage(domain, Some(process), Some(range), levels);
        }
        call(&mut unit, Invalidation::Global);
        call(&mut unit, Invalidation::Context(device(id)));
        let _ = unit.submit_guest_process(device(id), process);
        if let Some(request) = PageRequest::decode([u64::from(id) << 40, seed]) {
            let _ = unit.respond(&request, PageResponse::Success);
        }
        unit.acknowledge_interrupts();
        let _ = unit.recover();
        let _ = unit.detach(&frames, device(id));
    }

    #[test]
    fn records_and_capabilities_may_hold_anything(raw in any::<[u64; 4]>()) {
        let [a, b, ..] = raw;
        let _ = Capabilities::decode(a).guest_address_bits();
        let _ = FaultRecord::decode(raw).map(|record| record.is_implicit());
        let _ = PageRequest::decode([a, b]).map(|request| request.is_stop_marker());
    }

    #[test]
    fn msi_tables_take_any_mask(
        mask in any::<u64>(),
        narrow in any::<bool>(),
        pattern in any::<u64>(),
        page in any::<u64>(),
    ) {
        let machine = Machine::new();
        let frames = machine.frames();
        let (mask, pattern) = if narrow {
            (mask & mask << 20 & mask >> 20 & 0xff, pattern >> 12)
        } else {
            (mask, pattern)
        };
        let memory = &&machine.memory;
        let addresses = MsiAddresses { mask, pattern };
        if let Ok(msi) = MsiPageTable::new(memory, &frames, DomainId::new(1), addresses) {
            let page = GuestPhysAddr::new(page);
            prop_assert!(msi.file(page).is_none_or(|file| file < 256));
            let _ = msi.map(memory, page, PhysAddr::new(0x1000));
            let _ = msi.unmap(memory, page);
        }
    }
}
