//! Tables that QEMU makes. Each file of `tests/data` begins with its command line.

mod common;

use common::{fixture, rid};
use ringfence_firmware::{
    DeviceEntryKind, DeviceTree, Dmar, IommuLocation, Iort, IortNodeKind, Ivrs, NoBridges, Rimt,
    ScopeKind, SpecialDevice, UnitKind, UnitLocation, Viot, ViotUnit,
};
use ringfence_types::{PhysAddr, PhysRange, RequesterId};

#[test]
fn dmar_of_q35() {
    // QEMU 11 enables interrupt remapping unless the command line disables it.
    for name in ["dmar-q35", "dmar-q35-plain"] {
        let table = fixture(name);
        let table = Dmar::new(&table).expect("a valid table");
        assert_eq!(table.header.oem_id, *b"BOCHS ");
        assert_eq!(table.host_address_width, 48, "{name}");
        assert!(table.flags.interrupt_remapping(), "{name}");
        let unit = table.units().next().expect("a unit");
        assert_eq!(unit.registers, PhysAddr::new(0xfed9_0000));
        assert_eq!(unit.register_bytes, 4096);
        assert!(!unit.include_pci_all);
        // The I/O APIC has the bus and device numbers of QEMU's pseudo device ff:00.0.
        let ioapic = unit.devices.iter().next().expect("a scope");
        assert_eq!(ioapic.kind, ScopeKind::IoApic);
        assert_eq!(ioapic.resolve(0, &NoBridges), Some(rid(0xff, 0, 0)));
        let lpc = table.unit_of(0, rid(0, 0x1f, 0), &NoBridges);
        assert_eq!(lpc, Some(unit));
        // The scopes name the devices of the command line; this one is not there.
        assert_eq!(table.unit_of(0, rid(0, 0x1e, 0), &NoBridges), None);
        assert_eq!(table.unit_of(1, rid(0, 0x1f, 0), &NoBridges), None);
    }
}

#[test]
fn ivrs_of_q35() {
    let table = fixture("ivrs-q35");
    let table = Ivrs::new(&table).expect("a valid table");
    assert_eq!(
        (table.info.physical_width(), table.info.virtual_width()),
        (40, 0)
    );
    assert_eq!(table.blocks().count(), 2);
    let units: Vec<_> = table.units().collect();
    assert_eq!(units.len(), 1);
    assert_eq!((units[0].kind, units[0].device), (0x11, rid(0, 1, 0)));
    assert_eq!(units[0].registers, PhysAddr::new(0xfed8_0000));
    assert_eq!(units[0].efr, Some([0x29d3, 0]));
    let special = DeviceEntryKind::Special {
        handle: 0,
        alias: rid(0, 0x14, 0),
        variety: SpecialDevice::IoApic,
    };
    assert_eq!(
        units[0].devices().last().map(|entry| entry.kind),
        Some(special)
    );
    // Firmware has not numbered the buses yet, so QEMU names bus 0 for the bus of both bridges:
    // the alias of the conventional bridge is on top of the devices of bus 0.
    let alias = |device| table.unit_of(0, device).map(|found| found.alias);
    assert_eq!(alias(rid(0, 3, 0)), Some(rid(0, 0, 0)));
    assert_eq!(alias(rid(0, 5, 0)), Some(rid(0, 0, 0)));
    assert_eq!(alias(rid(0, 0x1f, 2)), Some(rid(0, 0x1f, 2)));
    assert_eq!(alias(rid(1, 0, 0)), None);
    let table = fixture("ivrs-q35-xtsup");
    let table = Ivrs::new(&table).expect("a valid table");
    assert_eq!(
        table.unit_of(0, rid(0, 0, 0)).map(|found| found.unit.kind),
        Some(0x11)
    );
}

#[test]
fn iort_of_virt() {
    let table = fixture("iort-virt-smmuv3");
    let table = Iort::new(&table).expect("a valid table");
    let unit = table
        .unit_of(0, rid(0, 4, 0))
        .expect("a sound way")
        .expect("a unit");
    let IortNodeKind::SmmuV3(smmu) = unit.unit.kind else {
        panic!("{unit:?}");
    };
    assert_eq!(smmu.registers, PhysAddr::new(0x0905_0000));
    assert_eq!((smmu.flags & 1, smmu.gsivs), (1, [0x6a, 0x6b, 0x6d, 0x6c]));
    assert_eq!(unit.id, 0x20);
    // The second host bridge bypasses the SMMU.
    let behind = rid(0x40, 0, 0);
    assert_eq!(table.unit_of(0, behind), Ok(None));
    for device in [behind, rid(0, 4, 0)] {
        let its = table
            .its_of(0, device)
            .expect("a sound way")
            .expect("an ITS group");
        assert_eq!(its.id, u32::from(device.get()));
        assert_eq!(its.unit.identifiers().collect::<Vec<_>>(), [0]);
    }
}

#[test]
fn iort_of_virt_with_two_units() {
    let table = fixture("iort-virt-two");
    let table = Iort::new(&table).expect("a valid table");
    assert_eq!(table.units().count(), 2);
    let registers = |device| {
        let found = table.unit_of(0, device).expect("a sound way")?;
        match found.unit.kind {
            IortNodeKind::SmmuV3(smmu) => Some((smmu.registers.get(), found.id)),
            _ => None,
        }
    };
    assert_eq!(registers(rid(0, 4, 0)), Some((0x0c00_0000, 0x20)));
    assert_eq!(registers(rid(0x40, 1, 0)), Some((0x0c02_0000, 0x4008)));
    assert_eq!(registers(rid(0x41, 0, 0)), None);
    assert!(
        table
            .its_of(0, rid(0x41, 0, 0))
            .expect("a sound way")
            .is_some()
    );
}

#[test]
fn viot_of_both_machines() {
    for (name, pxb) in [("viot-q35", true), ("viot-virt", false)] {
        let table = fixture(name);
        let table = Viot::new(&table).expect("a valid table");
        let unit = ViotUnit::Pci {
            segment: 0,
            device: rid(0, 4, 0),
        };
        assert_eq!(table.units().collect::<Vec<_>>(), [unit], "{name}");
        let id = |device| {
            let found = table.unit_of(0, device).expect("sound references");
            found.map(|found| found.id)
        };
        assert_eq!(id(rid(0, 5, 0)), Some(0x28));
        assert_eq!(id(rid(0, 4, 0)), None);
        assert_eq!(id(rid(0x40, 0, 1)), pxb.then_some(0x4001));
        assert_eq!(id(rid(0x41, 0, 0)), None);
    }
}

#[test]
fn rimt_of_virt() {
    let lookup = |name: &str, device: RequesterId| {
        let table = fixture(name);
        let table = Rimt::new(&table).expect("a valid table");
        let found = table.unit_of(0, device).expect("sound references")?;
        Some((found.unit.location, found.id))
    };
    let platform = IommuLocation::Platform(PhysAddr::new(0x0301_0000));
    assert_eq!(lookup("rimt-virt-sys", rid(0, 1, 0)), Some((platform, 8)));
    let pcie = IommuLocation::Pcie {
        segment: 0,
        device: rid(0, 1, 0),
    };
    assert_eq!(lookup("rimt-virt-pci", rid(0, 2, 0)), Some((pcie, 0x10)));
    assert_eq!(
        lookup("rimt-virt-pci", rid(255, 31, 7)),
        Some((pcie, 0xffff))
    );
    assert_eq!(lookup("rimt-virt-pci", rid(0, 1, 0)), None);
}

#[test]
fn device_trees() {
    let mmio = |start, bytes| {
        UnitLocation::Mmio(PhysRange::new(PhysAddr::new(start), bytes).expect("a range"))
    };
    let cases = [
        (
            "tree-riscv-iommu-sys",
            UnitKind::RiscV,
            mmio(0x0301_0000, 0x1000),
        ),
        (
            "tree-riscv-iommu-pci",
            UnitKind::RiscV,
            UnitLocation::Pci(rid(0, 1, 0)),
        ),
        (
            "tree-arm-smmuv3",
            UnitKind::SmmuV3,
            mmio(0x0905_0000, 0x2_0000),
        ),
        (
            "tree-arm-virtio-iommu",
            UnitKind::VirtioPci,
            UnitLocation::Pci(rid(0, 4, 0)),
        ),
    ];
    for (name, kind, location) in cases {
        let tree = fixture(name);
        let tree = DeviceTree::new(&tree).expect("a valid tree");
        let units: Vec<_> = tree.units().collect();
        assert_eq!(units.len(), 1, "{name}");
        assert_eq!(
            (units[0].kind, units[0].location),
            (kind, location),
            "{name}"
        );
        for device in [rid(0, 0, 0), rid(0, 6, 0), rid(255, 31, 7)] {
            let found = tree
                .unit_of(0, device)
                .expect("sound references")
                .expect("a unit");
            assert_eq!(
                (found.unit, found.id),
                (units[0], u32::from(device.get())),
                "{name}"
            );
        }
        // A unit on the bus does not translate its own accesses.
        if let UnitLocation::Pci(own) = location {
            assert_eq!(tree.unit_of(0, own), Ok(None), "{name}");
        }
        assert_eq!(tree.unit_of(1, rid(0, 0, 0)), Ok(None), "{name}");
    }
}
