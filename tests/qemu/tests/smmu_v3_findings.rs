//! Differences between QEMU's SMMUv3 and the specification (`findings/smmu-v3.md`). A test fails
//! when QEMU changes: then the exception in `family/smmu_v3.rs` or in the cases of the judge can
//! go.

use std::rc::Rc;

use ringfence_pgtable::{Arm, Coherency, Granule4K, MapRequest, Table};
use ringfence_qemu_judge::family::smmu_v3::{JudgedUnit, SmmuRegisters, stream_table};
use ringfence_qemu_judge::{Board, GuestRam, Machine, Setup, Verdict};
use ringfence_smmu_v3::{
    EventRecord, EventType, FaultEvent, Loss, Options, PageTable, Translation, Unit,
};
use ringfence_types::{
    DomainId, Iova, PageSize, Permissions, PhysAddr, PhysMemory, Registers, RequesterId,
};

const WRITER: RequesterId = RequesterId::new(0x20);
const READER: RequesterId = RequesterId::new(0x28);
const DOMAIN: DomainId = DomainId::new(1);
const IOVA: Iova = Iova::new(0x5000);
const GERROR: u64 = 0x60;
const EVENTQ_PROD: u64 = 0x1_00a8;

fn machine() -> Machine {
    Machine::start(&Setup {
        board: Board::ArmVirt,
        options: "acpi=off,gic-version=3,iommu=smmuv3",
        arguments: &["-cpu", "max"],
        devices: &[0x20],
        readers: &[0x28],
    })
    .unwrap()
}

fn unit(machine: &Machine, bits: u32) -> JudgedUnit<'_> {
    let registers = SmmuRegisters::new(machine, true);
    let table = stream_table(machine, &registers, bits).unwrap();
    let options = Options::new(table, bits);
    Unit::new(registers, machine.ram(), machine.frames(), &options).unwrap()
}

/// A table of stage 2 for addresses of `width` bits.
fn table(machine: &Machine, width: u32) -> Table<Arm<Granule4K>> {
    let format = Arm::<Granule4K>::stage2(width).unwrap();
    let frames = Table::root_bytes_of(&format).div_ceil(PageSize::Size4K.bytes());
    let root = machine.frames().alloc_contiguous(frames).unwrap();
    Table::at(format, DOMAIN, Coherency::Coherent, &machine.ram(), root).unwrap()
}

fn map(
    machine: &Machine,
    table: &Table<Arm<Granule4K>>,
    iova: Iova,
    pa: PhysAddr,
    permissions: Permissions,
) {
    let request = MapRequest {
        iova,
        pa,
        pages: 1,
        permissions,
    };
    table
        .map(&machine.ram(), machine.frames(), request)
        .unwrap();
}

fn translation(table: &Table<Arm<Granule4K>>) -> Translation {
    Translation::Stage2(PageTable::of(table))
}

/// Returns the first record, and removes all.
fn fault(unit: &mut JudgedUnit<'_>) -> Option<EventRecord> {
    let mut found = None;
    while let Some(event) = unit.next_fault() {
        let FaultEvent::Record(record) = event else {
            panic!("{event:x?}");
        };
        found.get_or_insert(record);
    }
    found
}

fn word(ram: &Rc<GuestRam>, at: PhysAddr) -> u64 {
    ram.word(at)
        .unwrap()
        .load(std::sync::atomic::Ordering::Acquire)
}

#[test]
fn registers_of_the_model() {
    let machine = machine();
    let registers = SmmuRegisters::new(&machine, true);
    let words = [0x0, 0x4, 0xc, 0x14].map(|offset| registers.read32(offset));
    assert_eq!(words, [0x0d44_101b, 0x0273_0010, 0x1414, 0x74]);
}

/// F1: of the concatenated tables at the root of stage 2, the first is walked for all addresses.
#[test]
fn the_first_of_the_concatenated_tables_translates_all_addresses() {
    let machine = machine();
    let mut unit = unit(&machine, 6);
    let table = table(&machine, 40);
    unit.attach(WRITER, DOMAIN, &translation(&table)).unwrap();
    let (low, high) = (Iova::new(0x4000_0000), Iova::new(1 << 39 | 0x4000_0000));
    let pa = machine.buffers().start();
    map(&machine, &table, high, pa, Permissions::READ_WRITE);
    let device = &machine.devices()[0];
    // The specification: lands, in the page of `high`.
    assert_eq!(device.write(high, 4).unwrap(), Verdict::Stopped);
    assert_eq!(fault(&mut unit).unwrap().event_type, EventType::Translation);
    // The specification: lands in the page of `high`, not of `low`.
    map(
        &machine,
        &table,
        low,
        pa.wrapping_add(0x1000),
        Permissions::READ_WRITE,
    );
    assert_eq!(device.write(high, 4).unwrap(), Verdict::Landed);
    assert_eq!(word(&machine.ram(), pa), 0);
    assert_ne!(word(&machine.ram(), pa.wrapping_add(0x1000)), 0);
}

/// F2: a read that a cached write-only entry of stage 2 stops has no record.
#[test]
fn reads_of_cached_write_only_pages_are_silent() {
    let machine = machine();
    let mut unit = unit(&machine, 6);
    let table = table(&machine, 39);
    for device in [WRITER, READER] {
        unit.attach(device, DOMAIN, &translation(&table)).unwrap();
    }
    map(
        &machine,
        &table,
        IOVA,
        machine.buffers().start(),
        Permissions::WRITE,
    );
    machine.readers()[0].read(IOVA, 8).unwrap();
    assert_eq!(fault(&mut unit).unwrap().event_type, EventType::Permission);
    assert_eq!(
        machine.devices()[0].write(IOVA, 4).unwrap(),
        Verdict::Landed
    );
    machine.readers()[0].read(IOVA, 8).unwrap();
    assert_eq!(fault(&mut unit), None);
}

/// F3: an address beyond the intermediate addresses has no record if stage 1 is bypassed.
#[test]
fn addresses_beyond_stage_2_are_silent() {
    let machine = machine();
    let mut unit = unit(&machine, 6);
    let table = table(&machine, 39);
    unit.attach(WRITER, DOMAIN, &translation(&table)).unwrap();
    let device = &machine.devices()[0];
    assert_eq!(
        device.write(Iova::new(1 << 43), 4).unwrap(),
        Verdict::Stopped
    );
    let found = fault(&mut unit).unwrap();
    assert_eq!(found.event_type, EventType::Translation);
    assert!(found.stage.unwrap().is_stage2);
    // The specification: F_ADDR_SIZE of stage 1.
    assert_eq!(
        device.write(Iova::new(1 << 44), 4).unwrap(),
        Verdict::Stopped
    );
    assert_eq!(fault(&mut unit), None);
}

/// F4: a full event queue is reported as an aborted write.
#[test]
fn a_full_event_queue_is_an_aborted_write() {
    let machine = machine();
    let mut unit = unit(&machine, 6);
    let device = &machine.devices()[0];
    let registers = SmmuRegisters::new(&machine, true);
    assert_eq!(device.write(IOVA, 4 * 200).unwrap(), Verdict::Stopped);
    // The specification: OVFLG, bit 31 of EVENTQ_PROD, and no error.
    assert_eq!(registers.read32(EVENTQ_PROD), 0x80);
    assert_eq!(registers.read32(GERROR), 1 << 2);
    for _ in 0..128 {
        assert!(matches!(unit.next_fault(), Some(FaultEvent::Record(_))));
    }
    assert_eq!(unit.next_fault(), Some(FaultEvent::Lost(Loss::Abort)));
    assert_eq!(unit.next_fault(), None);
}

/// F5: a stream table of two levels stays one when a linear one replaces it.
#[test]
fn a_stream_table_of_two_levels_stays_one() {
    let machine = machine();
    let first = unit(&machine, 16);
    first.disable().map_err(|(_, error)| error).unwrap();
    let mut second = unit(&machine, 6);
    second.pass_through(WRITER).unwrap();
    let pa = machine.buffers().start();
    // The specification: lands.
    let verdict = machine.devices()[0].write(Iova::new(pa.get()), 4).unwrap();
    assert_eq!(verdict, Verdict::Stopped);
    assert_eq!(
        fault(&mut second).unwrap().event_type,
        EventType::BadStreamId
    );
}
