//! Registers, reset and shutdown (base specification, sections 3.1, 7.3 and 7.6).

use ringfence_nvme_device::{Config, FatalError, MediumError, StartError, Step, register};
use ringfence_types::Iova;

use super::rig::{ADMIN_CQ, BLOCKS, ENABLED, Rig, create_cq};

#[test]
fn capabilities_are_those_of_the_queues() {
    let rig = Rig::off(&Config::new(BLOCKS));
    let cap = rig.controller.read(register::CAP, 8);
    assert_eq!(cap & 0xffff, 255, "MQES");
    assert_eq!(cap >> 16 & 1, 1, "CQR");
    assert_eq!(cap >> 24 & 0xff, 10, "TO");
    assert_eq!(cap >> 32 & 0xf, 0, "DSTRD");
    assert_eq!(cap >> 37 & 0xff, 1, "CSS");
    assert_eq!(cap >> 48, 0, "MPSMIN and MPSMAX");
    // Linux reads the halves.
    let [low, high] = [0, 4].map(|at| rig.controller.read(register::CAP + at, 4));
    assert_eq!(high << 32 | low, cap);
    assert_eq!(rig.controller.read(register::VS, 4), 0x0001_0400);
    for (offset, bytes) in [
        (register::CAP, 1),
        (register::CAP + 2, 4),
        (0x1000, 4),
        (0x24, 8),
    ] {
        assert_eq!(rig.controller.read(offset, bytes), 0, "{offset:#x} {bytes}");
    }
}

#[test]
fn base_addresses_are_written_in_halves() {
    let mut rig = Rig::off(&Config::new(BLOCKS));
    rig.write(register::ASQ, 4, 0x1234_5000);
    rig.write(register::ASQ + 4, 4, 0x9);
    rig.write(register::ACQ, 8, 0xa_bcde_f000);
    assert_eq!(rig.controller.read(register::ASQ, 8), 0x9_1234_5000);
    assert_eq!(rig.controller.read(register::ACQ, 8), 0xa_bcde_f000);
}

#[test]
fn wrong_configurations_are_fatal_until_the_reset() {
    let cases = [
        (
            register::CC,
            ENABLED | 1 << 7,
            StartError::Configuration(0x0046_0081),
        ),
        (
            register::CC,
            ENABLED | 1 << 4,
            StartError::Configuration(0x0046_0011),
        ),
        (
            register::CC,
            ENABLED | 1 << 11,
            StartError::Configuration(0x0046_0801),
        ),
        (register::CC, 1, StartError::Configuration(1)),
        (
            register::AQA,
            0x0007_0000,
            StartError::QueueSize(0x0007_0000),
        ),
        (
            register::AQA,
            0x0000_0007,
            StartError::QueueSize(0x0000_0007),
        ),
        (register::ASQ, 0x1004, StartError::Base(Iova::new(0x1004))),
        (register::ACQ, 0x2800, StartError::Base(Iova::new(0x2800))),
    ];
    for (wrong, value, error) in cases {
        let mut rig = Rig::started();
        rig.write(register::CC, 4, ENABLED & !1);
        let old = rig.controller.read(wrong, 4);
        rig.write(wrong, 4, value);
        if wrong != register::CC {
            rig.write(register::CC, 4, ENABLED);
        }
        assert_eq!(rig.controller.read(register::CSTS, 4), 2, "{error:?}");
        assert_eq!(rig.step(), Step::Failed(FatalError::Start(error)));
        assert_eq!(rig.step(), Step::Idle);
        // The host disables the controller, and repairs the register.
        rig.write(register::CC, 4, 0);
        assert_eq!(rig.controller.read(register::CSTS, 4), 0, "{error:?}");
        if wrong != register::CC {
            rig.write(wrong, 4, old);
        }
        rig.enable();
    }
}

#[test]
fn a_controller_reset_deletes_all_queues() {
    let mut rig = Rig::ready();
    rig.write(register::CC, 4, ENABLED & !1);
    assert_eq!(rig.controller.read(register::CSTS, 4), 0);
    // Doorbells of a disabled controller have no effect.
    rig.write(register::DOORBELLS + 8, 4, 3);
    assert_eq!(rig.controller.read(register::ACQ, 8), ADMIN_CQ);
    rig.enable();
    assert_eq!(rig.step(), Step::Idle);
    // The queue can be created again.
    rig.create_pair();
    assert_ne!(rig.admin(create_cq(1, 0x4000)).0, 0);
}

#[test]
fn a_shutdown_flushes_and_stops() {
    for notification in [1 << 14, 2 << 14] {
        let mut rig = Rig::ready();
        rig.write(register::CC, 4, ENABLED | notification);
        assert_eq!(rig.blocks.flushes, 1);
        assert_eq!(rig.controller.read(register::CSTS, 4), 1 | 2 << 2);
        rig.submit(|rig| &mut rig.io, super::rig::Command::new(0));
        assert_eq!(rig.step(), Step::Idle);
        // A reset ends the shutdown.
        rig.write(register::CC, 4, 0);
        rig.enable();
    }
}

#[test]
fn a_shutdown_reports_a_failed_flush() {
    let mut rig = Rig::ready();
    rig.blocks.is_broken = true;
    rig.write(register::CC, 4, ENABLED | 1 << 14);
    // Ready, fatal status, shutdown complete.
    assert_eq!(rig.controller.read(register::CSTS, 4), 1 | 1 << 1 | 2 << 2);
    let error = FatalError::Shutdown(MediumError);
    assert_eq!(rig.step(), Step::Failed(error));
    assert!(error.to_string().contains("could not be flushed"));
}
