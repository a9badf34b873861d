//! Devices that may access nothing.

use ringfence_hw::{Geometry, Prefetch};
use ringfence_riommu_device::{Config, ConfigError, RiommuDevice, register};
use ringfence_types::{Access, FaultReason, RequesterId};

use crate::rig::{DISK, READ, ROOT, Rig, cached, riova};

#[test]
fn all_devices_are_blocked_until_translation_is_enabled() {
    let mut rig = Rig::new(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    rig.device.write(register::ROOT, 8, ROOT);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Err(FaultReason::Blocked));
    rig.device
        .write(register::CTRL, 4, register::TRANSLATE.into());
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    rig.device.write(register::CTRL, 4, 0);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Err(FaultReason::Blocked));
}

#[test]
fn translation_begins_without_cached_entries() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    let control = rig.device.read(register::CTRL, 4);
    rig.device.write(register::CTRL, 4, 0);
    rig.clear(0, 0);
    rig.device.write(register::CTRL, 4, control);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Err(FaultReason::NotPresent));
}

#[test]
fn devices_that_are_not_listed_are_blocked() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    let other = RequesterId::new(DISK.get() + 1);
    let iova = riova(0, 0, 0);
    let stopped = rig
        .device
        .translate(&rig.memory, other, iova, 4, Access::Read);
    assert_eq!(stopped.unwrap_err().reason, FaultReason::Blocked);
    assert_eq!(rig.take_faults()[0].device(), other);
}

#[test]
fn a_reset_blocks_and_clears_the_registers() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    rig.device.reset();
    assert_eq!(rig.device.save(), Default::default());
    rig.clear(0, 0);
    rig.device.write(register::ROOT, 8, ROOT);
    rig.device
        .write(register::CTRL, 4, register::TRANSLATE.into());
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Err(FaultReason::NotPresent));
}

#[test]
fn invalid_lists_of_devices_are_refused() {
    let config = Config::default();
    let twice = RiommuDevice::new(&config, &[DISK, RequesterId::new(1), DISK]);
    assert_eq!(twice.err(), Some(ConfigError::Twice { device: DISK }));
    let many: Vec<RequesterId> = (0..=register::MAX_DEVICES as u16)
        .map(RequesterId::new)
        .collect();
    let count = many.len();
    let error = RiommuDevice::new(&config, &many).err();
    assert_eq!(error, Some(ConfigError::TooManyDevices { count }));
    let most = RiommuDevice::new(&config, &many[1..]).unwrap();
    // The last ID ends at the end of the BAR.
    let last = register::BAR_BYTES - 4;
    assert_eq!(most.read(last, 4), register::MAX_DEVICES as u64);
}

#[test]
fn default_caches_hold_nothing() {
    let mut rig = Rig::started(&Config::default());
    assert_eq!(Config::default().riotlb, Geometry::ABSENT);
    assert_eq!(Config::default().prefetch, Prefetch::Absent);
    rig.map(0, 0, 0x8000, 64, READ);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    rig.clear(0, 0);
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Err(FaultReason::NotPresent));
}
