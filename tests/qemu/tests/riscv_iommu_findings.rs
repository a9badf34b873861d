//! Differences between QEMU's RISC-V IOMMU and the specification (`findings/riscv-iommu.md`). A
//! test fails when QEMU changes: then the exception in `family/riscv_iommu.rs` can go.

use ringfence_pgtable::{Coherency, Levels, MapRequest, RiscV, Table};
use ringfence_qemu_judge::family::riscv_iommu::registers;
use ringfence_qemu_judge::{Board, GuestRam, Machine, QtestRegisters, Setup, Verdict};
use ringfence_riscv_iommu::{
    Cause, FaultEvent, FaultRecord, GuestFirstStage, MsiAddresses, MsiPageTable, Options,
    PageTable, ProcessBits, Translation, Unit,
};
use ringfence_types::{
    DomainId, GuestPhysAddr, Invalidation, InvalidationError, Invalidator, Iova, PageSize,
    Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, Registers, RequesterId,
};
use std::rc::Rc;
use std::sync::atomic::Ordering;

const WRITER: RequesterId = RequesterId::new(0x20);
const READER: RequesterId = RequesterId::new(0x40);
const DOMAIN: DomainId = DomainId::new(1);
const IOVA: Iova = Iova::new(0x5000);

fn machine(device: &str) -> Machine {
    Machine::start(&Setup {
        board: Board::RiscvVirt,
        options: "acpi=off",
        arguments: &["-cpu", "max", "-device", device],
        devices: &[0x20],
        readers: &[0x40],
    })
    .unwrap()
}

fn unit(machine: &Machine) -> Unit<QtestRegisters, Rc<GuestRam>> {
    let registers = registers(machine).unwrap();
    Unit::new(
        registers,
        machine.ram(),
        machine.frames(),
        Options::default(),
    )
    .unwrap()
}

/// A table that maps `pages` pages from `iova`.
fn table(
    machine: &Machine,
    format: RiscV,
    iova: Iova,
    pa: PhysAddr,
    pages: u64,
    permissions: Permissions,
) -> Table<RiscV> {
    let (ram, frames) = (machine.ram(), machine.frames());
    let root = frames.alloc_contiguous(4).unwrap();
    let table = Table::at(format, DOMAIN, Coherency::Coherent, &ram, root).unwrap();
    let request = MapRequest {
        iova,
        pa,
        pages,
        permissions,
    };
    table.map(&ram, frames, request).unwrap();
    table
}

fn first(table: &Table<RiscV>, levels: Levels) -> Translation {
    Translation::FirstStage(PageTable {
        root: table.root(),
        levels,
    })
}

/// Returns the only fault, however often QEMU reports it.
fn fault(unit: &mut Unit<QtestRegisters, Rc<GuestRam>>) -> FaultRecord {
    let mut found = None;
    while let Some(event) = unit.next_fault() {
        let FaultEvent::Record(record) = event else {
            panic!("{event:x?}");
        };
        found.get_or_insert(record);
    }
    found.expect("no fault")
}

#[test]
fn capabilities_of_the_model() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let raw = registers(&machine).unwrap().read64(0);
    assert_eq!(raw, 0x78_c2cf_4f10);
}

/// F1: `iotval2` repeats the address, though the fault is not a guest-page fault.
#[test]
fn iotval2_is_not_zero() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let pa = machine.buffers().start();
    let format = RiscV::first_stage(Levels::Three);
    let table = table(&machine, format, IOVA, pa, 1, Permissions::READ_WRITE);
    let translation = first(&table, Levels::Three);
    unit.attach(machine.frames(), READER, DOMAIN, &translation)
        .unwrap();
    machine.readers()[0].read(Iova::new(0x7008), 8).unwrap();
    // The specification defines the field for guest-page faults only.
    assert_eq!(fault(&mut unit).raw, [0x4008_0000_000d, 0, 0x7008, 0x7008]);
}

/// F2: an access that the permissions of a cached entry stop has no record.
#[test]
fn permission_faults_of_cached_entries_are_silent() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let pa = machine.buffers().start();
    let format = RiscV::first_stage(Levels::Three);
    let table = table(&machine, format, IOVA, pa, 1, Permissions::READ);
    let translation = first(&table, Levels::Three);
    for device in [WRITER, READER] {
        unit.attach(machine.frames(), device, DOMAIN, &translation)
            .unwrap();
    }
    let write = || machine.devices()[0].write(IOVA, 4).unwrap();
    assert_eq!(write(), Verdict::Stopped);
    assert_eq!(fault(&mut unit).cause, Cause::WritePage);
    machine.readers()[0].read(IOVA, 8).unwrap();
    assert_eq!(write(), Verdict::Stopped);
    // The specification: the same record.
    assert_eq!(unit.next_fault(), None);
}

/// F3: addresses that differ only in bits 56 to 63 share a cached entry. With Sv57 both halves of
/// the address space are affected, and with any mode addresses that are not canonical.
#[test]
fn cached_entries_lack_the_highest_address_bits() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let pa = machine.buffers().start();
    let format = RiscV::first_stage(Levels::Five);
    let table = table(&machine, format, IOVA, pa, 1, Permissions::READ_WRITE);
    let translation = first(&table, Levels::Five);
    unit.attach(machine.frames(), WRITER, DOMAIN, &translation)
        .unwrap();
    let write = |iova| machine.devices()[0].write(Iova::new(iova), 4).unwrap();
    let alias = 0xff00_0000_0000_5000;
    assert_eq!(write(alias), Verdict::Stopped);
    assert_eq!(write(0x5000), Verdict::Landed);
    // The specification: stopped.
    assert_eq!(write(alias), Verdict::Landed);
    assert_eq!(write(1 << 60 | 0x5000), Verdict::Landed);
}

/// F4: `IOTINVAL.GVMA` of a guest-physical page leaves entries of both stages whose IOVA is another
/// page. The driver's invalidation of that page removes them.
#[test]
fn pages_of_a_second_stage_are_compared_with_the_iova() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let ram = machine.ram();
    let pa = machine.buffers().start();
    let all = Permissions::READ_WRITE;
    let guest_page = Iova::new(0x9000);
    let first_stage = RiscV::first_stage(Levels::Three);
    let inner = PhysAddr::new(guest_page.get());
    let inner = table(&machine, first_stage, IOVA, inner, 1, all);
    let second_stage = RiscV::second_stage(Levels::Three).with_pages_up_to(PageSize::Size2M);
    let (start, bytes) = (ram.range().start(), ram.range().bytes());
    let (iova, pages) = (Iova::new(start.get()), bytes / PageSize::Size4K.bytes());
    let outer = table(&machine, second_stage, iova, start, pages, all);
    let request = MapRequest {
        iova: guest_page,
        pa,
        pages: 1,
        permissions: all,
    };
    let translation = Translation::SecondStage {
        table: PageTable {
            root: outer.root(),
            levels: Levels::Three,
        },
        guest: GuestFirstStage::Table {
            root: GuestPhysAddr::new(inner.root().get()),
            levels: Levels::Three,
            space: 3,
        },
        msi: None,
    };
    unit.attach(machine.frames(), WRITER, DOMAIN, &translation)
        .unwrap();
    let write = || machine.devices()[0].write(IOVA, 4).unwrap();
    let range = PfnRange::new(Pfn::containing(guest_page), 1).unwrap();
    outer.map(&ram, machine.frames(), request).unwrap();
    assert_eq!(write(), Verdict::Landed);
    let (unmapped, levels) = outer.unmap(&ram, range).unwrap();
    // Opcode 1, func3 1, AV, GV, GSCID 1; the page 9.
    let registers = registers(&machine).unwrap();
    let (queue, tail) = (registers.read64(24) >> 10 << 12, registers.read32(36));
    let at = PhysAddr::new(queue + u64::from(tail) * 16);
    let words = ram.words(at, 2).unwrap();
    words[0].store(1 << 44 | 1 << 33 | 1 << 10 | 1 << 7 | 1, Ordering::SeqCst);
    words[1].store(9 << 10, Ordering::SeqCst);
    registers.write32(36, tail + 1);
    assert_eq!(registers.read32(32), tail + 1);
    // The specification: stopped.
    assert_eq!(write(), Verdict::Landed);
    let ticket = unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(write(), Verdict::Stopped);
    outer.map(&ram, machine.frames(), request).unwrap();
    assert_eq!(write(), Verdict::Landed);
    drop((unmapped, levels, outer.unmap(&ram, range).unwrap()));
    let request = Invalidation::Pages {
        domain: DOMAIN,
        range,
        levels,
    };
    let ticket = unit.submit(request).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(write(), Verdict::Stopped);
}

/// A command that QEMU rejects stops the queue; recovery restarts it.
#[test]
fn an_illegal_command_is_recovered() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let (ram, registers) = (machine.ram(), registers(&machine).unwrap());
    let (queue, tail) = (registers.read64(24) >> 10 << 12, registers.read32(36));
    // The next command has a reserved opcode: the driver writes the one behind it.
    let at = PhysAddr::new(queue + u64::from(tail) * 16);
    ram.words(at, 1).unwrap()[0].store(63, Ordering::SeqCst);
    registers.write32(36, tail + 1);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    let again = unit.recover().unwrap();
    assert_eq!(unit.poll(again), Ok(true));
    assert_eq!(unit.poll(ticket), Ok(true));
    let last = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(last), Ok(true));
}

/// The guest's process directory lies in guest memory: the model translates its address.
#[test]
fn process_directories_of_guests_are_translated() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let (ram, frames) = (machine.ram(), machine.frames());
    let pa = machine.buffers().start();
    let first_stage = RiscV::first_stage(Levels::Three);
    let inner = table(&machine, first_stage, IOVA, pa, 1, Permissions::READ_WRITE);
    // The second stage maps RAM to itself, except that the guest sees the directory elsewhere.
    let second_stage = RiscV::second_stage(Levels::Three).with_pages_up_to(PageSize::Size2M);
    let start = ram.range().start();
    let bytes = ram.range().bytes();
    let (iova, pages) = (Iova::new(start.get()), bytes / PageSize::Size4K.bytes());
    let outer = table(
        &machine,
        second_stage,
        iova,
        start,
        pages,
        Permissions::READ_WRITE,
    );
    let directory = frames.alloc_contiguous(1).unwrap();
    let guest_directory = GuestPhysAddr::new(0x10_0000);
    let request = MapRequest {
        iova: Iova::new(guest_directory.get()),
        pa: directory,
        pages: 1,
        permissions: Permissions::READ_WRITE,
    };
    outer.map(&ram, frames, request).unwrap();
    let words = ram.words(directory, 2).unwrap();
    words[1].store(8 << 60 | inner.root().get() >> 12, Ordering::SeqCst);
    words[0].store(1, Ordering::SeqCst);
    let mut attach = |root| {
        let translation = Translation::SecondStage {
            table: PageTable {
                root: outer.root(),
                levels: Levels::Three,
            },
            guest: GuestFirstStage::Processes {
                root,
                bits: ProcessBits::Eight,
                default_process: true,
            },
            msi: None,
        };
        unit.attach(frames, WRITER, DOMAIN, &translation).unwrap();
        machine.devices()[0].write(IOVA, 4).unwrap()
    };
    assert_eq!(attach(guest_directory), Verdict::Landed);
    let elsewhere = GuestPhysAddr::new(guest_directory.get() + 0x1000);
    assert_eq!(attach(elsewhere), Verdict::Stopped);
}

/// An MSI reaches the interrupt file that the MSI page table names.
#[test]
fn msis_reach_the_interrupt_file() {
    let machine = machine("riscv-iommu-pci,addr=1.0");
    let mut unit = unit(&machine);
    let (ram, frames) = (machine.ram(), machine.frames());
    let pa = machine.buffers().start();
    let format = RiscV::second_stage(Levels::Three);
    let table = table(&machine, format, IOVA, pa, 1, Permissions::READ_WRITE);
    let addresses = MsiAddresses {
        mask: 0x3,
        pattern: 0x2_8000,
    };
    let msi = MsiPageTable::new(&ram, frames, DOMAIN, addresses).unwrap();
    let file = GuestPhysAddr::new(0x2_8002 << 12);
    let to = PhysAddr::new(machine.buffers().start().get() + 0x4000);
    let translation = Translation::SecondStage {
        table: PageTable {
            root: table.root(),
            levels: Levels::Three,
        },
        guest: GuestFirstStage::Bare,
        msi: Some(msi.translation()),
    };
    // The model looks for the context of the requester in the attributes of the access; the test
    // device leaves it 0.
    for device in [WRITER, RequesterId::new(0)] {
        unit.attach(frames, device, DOMAIN, &translation).unwrap();
    }
    let write = || {
        machine.devices()[0]
            .write(Iova::new(file.get()), 4)
            .unwrap()
    };
    assert_eq!(write(), Verdict::Stopped);
    assert_eq!(fault(&mut unit).cause, Cause::MsiInvalid);
    msi.map(&ram, file, to).unwrap();
    assert_eq!(write(), Verdict::Landed);
    assert_eq!(ram.word(to).unwrap().load(Ordering::SeqCst), 0x1234_5678);
}
