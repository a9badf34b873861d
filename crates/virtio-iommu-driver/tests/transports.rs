//! The register accesses of both transports, against golden sequences from virtio 1.3, sections
//! 4.1.4.3 and 4.2.2.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use ringfence_types::{PhysAddr, Registers};
use ringfence_virtio_iommu_driver::{
    CapabilityError, Location, NarrowRegisters, PciCapabilities, QueueParts, Transport, VirtioMmio,
    VirtioPci,
};

/// Offset, number of bits, value.
type Write = (u64, u32, u64);

/// Registers that return fixed values and log writes.
#[derive(Debug, Default)]
struct Log {
    base: u64,
    values: HashMap<(u64, u32), u64>,
    writes: Rc<RefCell<Vec<Write>>>,
}

impl Log {
    fn read(&self, offset: u64, bits: u32) -> u64 {
        let key = (self.base + offset, bits);
        *self
            .values
            .get(&key)
            .unwrap_or_else(|| panic!("read of {key:x?}"))
    }

    fn write(&self, offset: u64, bits: u32, value: u64) {
        let write = (self.base + offset, bits, value);
        self.writes.borrow_mut().push(write);
    }
}

impl Registers for Log {
    fn read32(&self, offset: u64) -> u32 {
        self.read(offset, 32) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        panic!("64-bit read of {offset:x}")
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, 32, value.into());
    }

    fn write64(&self, offset: u64, _: u64) {
        panic!("64-bit write of {offset:x}")
    }
}

impl NarrowRegisters for Log {
    fn read8(&self, offset: u64) -> u8 {
        self.read(offset, 8) as u8
    }

    fn read16(&self, offset: u64) -> u16 {
        self.read(offset, 16) as u16
    }

    fn write8(&self, offset: u64, value: u8) {
        self.write(offset, 8, value.into());
    }

    fn write16(&self, offset: u64, value: u16) {
        self.write(offset, 16, value.into());
    }
}

const PARTS: QueueParts = QueueParts {
    size: 64,
    descriptors: PhysAddr::new(0x1_0002_0000),
    available: PhysAddr::new(0x1_0002_0400),
    used: PhysAddr::new(0x1_0002_048c),
};

/// Calls every method that writes.
fn drive(transport: &mut impl Transport) {
    transport.write_status(3);
    transport.accept_features(0x1_0000_0057);
    assert_eq!(transport.offered_features(), 0x99_0000_0099);
    assert_eq!(transport.queue_size(1), 256);
    transport.enable_queue(1, &PARTS);
    transport.notify(1);
    transport.write_config_byte(36, 0);
    assert_eq!(transport.read_config(8), 0x1234);
    assert_eq!(transport.read_config_byte(36), 7);
    assert_eq!(transport.config_generation(), 5);
    assert_eq!(transport.status(), 15);
}

#[test]
fn pci() {
    let writes = Rc::new(RefCell::new(Vec::new()));
    let values = HashMap::from([
        ((0x1004, 32), 0x99),
        ((0x1018, 16), 256),
        ((0x101e, 16), 3),
        ((0x3008, 32), 0x1234),
        ((0x3024, 8), 7),
        ((0x1015, 8), 5),
        ((0x1014, 8), 15),
    ]);
    let location = |offset: u32, bytes: u32| Location {
        bar: 4,
        offset,
        bytes,
    };
    let mut capabilities = PciCapabilities {
        common: location(0x1000, 0x38),
        notify: location(0x2000, 14),
        notify_multiplier: 4,
        isr: location(0x4000, 1),
        device: location(0x3000, 40),
    };
    let registers = |location: &Location| Log {
        base: location.offset.into(),
        values: values.clone(),
        writes: writes.clone(),
    };
    let mut transport = VirtioPci::new(&capabilities, registers);
    drive(&mut transport);
    let expected: [Write; 19] = [
        (0x1014, 8, 3),
        (0x1008, 32, 0),
        (0x100c, 32, 0x57),
        (0x1008, 32, 1),
        (0x100c, 32, 1),
        (0x1000, 32, 0),
        (0x1000, 32, 1),
        (0x1016, 16, 1),
        (0x1016, 16, 1),
        (0x1018, 16, 64),
        (0x1020, 32, 0x2_0000),
        (0x1024, 32, 1),
        (0x1028, 32, 0x2_0400),
        (0x102c, 32, 1),
        (0x1030, 32, 0x2_048c),
        (0x1034, 32, 1),
        (0x101c, 16, 1),
        // queue_notify_off times the multiplier.
        (0x200c, 16, 1),
        (0x3024, 8, 0),
    ];
    assert_eq!(writes.take(), expected);
    // A notification register that ends beyond its structure is not written.
    capabilities.notify.bytes = 13;
    let mut transport = VirtioPci::new(&capabilities, registers);
    transport.enable_queue(1, &PARTS);
    writes.take();
    transport.notify(1);
    assert_eq!(writes.take(), []);
}

#[test]
fn mmio() {
    let registers = || Log {
        values: HashMap::from([
            ((0x000, 32), 0x7472_6976),
            ((0x004, 32), 2),
            ((0x008, 32), 23),
            ((0x010, 32), 0x99),
            ((0x034, 32), 256),
            ((0x108, 32), 0x1234),
            ((0x124, 8), 7),
            ((0x0fc, 32), 5),
            ((0x070, 32), 15),
        ]),
        ..Log::default()
    };
    let log = registers();
    let writes = log.writes.clone();
    let mut transport = VirtioMmio::new(log);
    assert!(transport.is_present());
    drive(&mut transport);
    let expected: [Write; 19] = [
        (0x070, 32, 3),
        (0x024, 32, 0),
        (0x020, 32, 0x57),
        (0x024, 32, 1),
        (0x020, 32, 1),
        (0x014, 32, 0),
        (0x014, 32, 1),
        (0x030, 32, 1),
        (0x030, 32, 1),
        (0x038, 32, 64),
        (0x080, 32, 0x2_0000),
        (0x084, 32, 1),
        (0x090, 32, 0x2_0400),
        (0x094, 32, 1),
        (0x0a0, 32, 0x2_048c),
        (0x0a4, 32, 1),
        (0x044, 32, 1),
        (0x050, 32, 1),
        (0x124, 8, 0),
    ];
    assert_eq!(writes.take(), expected);
    // Another magic, the legacy version, another device, nothing at all.
    for (offset, value) in [(0, 0), (4, 1), (8, 1), (0, u64::from(u32::MAX))] {
        let mut log = registers();
        log.values.insert((offset, 32), value);
        assert!(!VirtioMmio::new(log).is_present(), "{offset:x} {value:x}");
    }
}

/// Configuration space with a list of capabilities.
fn config_space() -> [u32; 64] {
    let mut space = [0; 64];
    space[0] = 0x1057_1af4;
    space[1] = 0x0010_0000;
    space[0x34 / 4] = 0x40;
    let mut capability = |at: usize, head: u32, rest: [u32; 4]| {
        space[at / 4] = head;
        space[at / 4 + 1..][..4].copy_from_slice(&rest);
    };
    // MSI-X, and then common, notify, ISR, device, and a second device structure.
    capability(0x40, 0x0000_5011, [1, 2, 3, 4]);
    capability(0x50, 0x0110_6409, [4, 0, 0x1000, 0]);
    capability(0x64, 0x0214_7809, [4, 0x3000, 0x1000, 4]);
    capability(0x78, 0x0310_8c09, [4, 0x1000, 0x1000, 0]);
    capability(0x8c, 0x0410_a009, [4, 0x2000, 0x1000, 0]);
    capability(0xa0, 0x0410_0009, [1, 0x7000, 0x1000, 0]);
    space
}

#[test]
fn capabilities() {
    let find = |space: &[u32; 64]| PciCapabilities::find(|offset| space[usize::from(offset) / 4]);
    let location = |offset: u32| Location {
        bar: 4,
        offset,
        bytes: 0x1000,
    };
    let expected = PciCapabilities {
        common: location(0),
        notify: location(0x3000),
        notify_multiplier: 4,
        isr: location(0x1000),
        device: location(0x2000),
    };
    assert_eq!(find(&config_space()), Ok(expected));
    let changed = |index: usize, value: u32| {
        let mut space = config_space();
        space[index / 4] = value;
        find(&space)
    };
    let id = 0x1041_1af4;
    assert_eq!(changed(0, id), Err(CapabilityError::OtherDevice { id }));
    assert_eq!(changed(4, 0), Err(CapabilityError::Missing(1)));
    assert_eq!(changed(0x5c, 0x37), Err(CapabilityError::Missing(1)));
    assert_eq!(changed(0x68, 6), Err(CapabilityError::Missing(2)));
    assert_eq!(changed(0x98, 39), Err(CapabilityError::Missing(4)));
    assert_eq!(changed(0xa0, 0x0410_4009), Err(CapabilityError::Endless));
    // The first structure of a type counts.
    assert_eq!(changed(0x8c, 0x0510_a009).unwrap().device.bar, 1);
    let nothing = PciCapabilities::find(|_| u32::MAX);
    let id = u32::MAX;
    assert_eq!(nothing, Err(CapabilityError::OtherDevice { id }));
}
