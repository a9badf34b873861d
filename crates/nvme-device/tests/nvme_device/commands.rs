//! Admin commands (base specification, section 5).

use ringfence_nvme_device::{Config, NvmeStatus, register};

use super::rig::{BLOCKS, Command, Rig, code, delete};

const BUFFER: u64 = 0x10000;

fn identify(cns: u32, namespace: u32) -> Command {
    Command {
        namespace,
        prps: [BUFFER, 0],
        words: [cns, 0, 0, 0, 0, 0],
        ..Command::new(0x06)
    }
}

fn feature(opcode: u8, identifier: u32, value: u32) -> Command {
    Command {
        words: [identifier, value, 0, 0, 0, 0],
        ..Command::new(opcode)
    }
}

fn log(page: u32, words: u32, offset: u32) -> Command {
    Command {
        prps: [BUFFER, BUFFER + 0x1000],
        words: [(words - 1) << 16 | page, 0, offset, 0, 0, 0],
        ..Command::new(0x02)
    }
}

#[test]
fn the_controller_identifies_itself() {
    let mut rig = Rig::started();
    assert_eq!(rig.admin(identify(1, 0)).0, 0);
    let data = rig.host.load(BUFFER, 4096).to_vec();
    assert_eq!(data[24..38], *b"Ringfence NVMe");
    assert_eq!(data[38..64], [b' '; 26]);
    assert_eq!(data[77], 8, "MDTS: 1 MiB");
    assert_eq!(data[80..84], 0x0001_0400u32.to_le_bytes());
    assert_eq!(data[512..514], [0x66, 0x44]);
    assert_eq!(data[516..520], 1u32.to_le_bytes());
    assert_eq!(data[525] & 1, 1, "a volatile write cache");
    assert!(data[768..].starts_with(b"nqn.2014-08.org.nvmexpress:uuid:"));
}

#[test]
fn the_namespace_has_its_blocks() {
    for read_only in [false, true] {
        let config = Config {
            read_only,
            ..Config::new(BLOCKS)
        };
        let mut rig = Rig::off(&config);
        rig.enable();
        assert_eq!(rig.admin(identify(0, 1)).0, 0);
        let data = rig.host.load(BUFFER, 4096);
        for at in [0, 8, 16] {
            assert_eq!(data[at..at + 8], BLOCKS.to_le_bytes());
        }
        assert_eq!(data[99], u8::from(read_only));
        assert_eq!(data[128..132], [0, 0, 9, 0], "512 bytes without metadata");
    }
}

#[test]
fn namespaces_are_listed() {
    let mut rig = Rig::started();
    for (after, first) in [(0, 1u32), (1, 0), (0xffff_fffd, 0)] {
        assert_eq!(rig.admin(identify(2, after)).0, 0);
        assert_eq!(
            *rig.host.load(BUFFER, 4),
            first.to_le_bytes(),
            "after {after}"
        );
    }
    assert_eq!(rig.admin(identify(3, 1)).0, 0);
    let data = rig.host.load(BUFFER, 24);
    assert_eq!(data[..4], [3, 16, 0, 0]);
    // A UUID of version 8 and variant 10b.
    assert_eq!((data[10] >> 4, data[12] >> 6), (8, 2));
    assert_eq!(data[20..], [0; 4]);
    for (cns, namespace, status) in [
        (0, 0, NvmeStatus::InvalidNamespace),
        (0, 2, NvmeStatus::InvalidNamespace),
        (0, u32::MAX, NvmeStatus::InvalidNamespace),
        (2, u32::MAX, NvmeStatus::InvalidNamespace),
        (3, 2, NvmeStatus::InvalidNamespace),
        (4, 1, NvmeStatus::InvalidField),
        (0x10, 1, NvmeStatus::InvalidField),
        (0xff, 0, NvmeStatus::InvalidField),
    ] {
        assert_eq!(
            rig.admin(identify(cns, namespace)).0,
            code(status),
            "{cns} {namespace}"
        );
    }
    let mut stopped = identify(1, 0);
    stopped.prps[0] = !0xfff;
    assert_eq!(rig.admin(stopped).0, code(NvmeStatus::DataTransferError));
}

#[test]
fn features_are_kept_until_the_reset() {
    let mut rig = Rig::started();
    // Sixteen queues of each kind, whatever the host asks for.
    for asked in [0, 0x0003_0003, 0xfffe_fffe] {
        assert_eq!(rig.admin(feature(0x09, 7, asked)), (0, 0x000f_000f));
    }
    assert_eq!(rig.admin(feature(0x0a, 7, 0)), (0, 0x000f_000f));
    for wrong in [0xffff, 0xffff_0000] {
        let status = rig.admin(feature(0x09, 7, wrong)).0;
        assert_eq!(status, code(NvmeStatus::InvalidField));
    }
    assert_eq!(rig.admin(feature(0x0a, 6, 0)), (0, 1), "the cache is on");
    for identifier in [1, 2, 4, 5, 6, 8, 10, 11] {
        assert_eq!(rig.admin(feature(0x09, identifier, 0x101)), (0, 0));
        assert_eq!(rig.admin(feature(0x0a, identifier, 0)), (0, 0x101));
    }
    for identifier in [0, 3, 12, 0x80, 0xff] {
        for opcode in [0x09, 0x0a] {
            let status = rig.admin(feature(opcode, identifier, 0)).0;
            assert_eq!(status, code(NvmeStatus::InvalidField), "{identifier}");
        }
    }
    let saved = rig.admin(feature(0x09, 1 << 31 | 6, 0)).0;
    assert_eq!(saved, code(NvmeStatus::FeatureNotSaveable));
    rig.create_pair();
    let late = rig.admin(feature(0x09, 7, 0)).0;
    assert_eq!(late, code(NvmeStatus::SequenceError));
    rig.write(register::CC, 4, 0);
    rig.enable();
    assert_eq!(rig.admin(feature(0x0a, 8, 0)), (0, 0));
}

#[test]
fn log_pages_have_bounds() {
    let mut rig = Rig::started();
    rig.host.store(BUFFER, &[0xee; 0x2000]);
    assert_eq!(rig.admin(log(2, 128, 0)).0, 0);
    assert_eq!(rig.host.load(BUFFER + 1, 4), [0x36, 0x01, 100, 10]);
    assert_eq!(rig.host.load(BUFFER + 512, 1), [0xee]);
    // Two dwords from offset 4, then zeros behind the end.
    assert_eq!(rig.admin(log(2, 2, 4)).0, 0);
    assert_eq!(rig.host.load(BUFFER, 9), [10, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.admin(log(3, 0x400, 508)).0, 0);
    assert_eq!(*rig.host.load(BUFFER, 0x1000), [0; 0x1000]);
    for (command, status) in [
        (log(2, 1, 2), NvmeStatus::InvalidField),
        (log(2, 1, 516), NvmeStatus::InvalidField),
        (log(2, 0x8000, 0), NvmeStatus::PrpOffsetInvalid),
        (log(4, 1, 0), NvmeStatus::InvalidLogPage),
    ] {
        assert_eq!(rig.admin(command).0, code(status), "{command:x?}");
    }
    let mut long = log(2, 0x10000, 0);
    long.words[1] = 0xffff;
    assert_eq!(rig.admin(long).0, code(NvmeStatus::InvalidField));
}

#[test]
fn unknown_commands_are_refused() {
    let mut rig = Rig::ready();
    let known = [0, 1, 2, 4, 5, 6, 8, 9, 0x0a, 0x0c];
    for opcode in (0..=255).filter(|opcode| !known.contains(opcode)) {
        let status = rig.admin(Command::new(opcode)).0;
        assert_eq!(status, code(NvmeStatus::InvalidOpcode), "{opcode}");
    }
    for opcode in 3..=255 {
        let status = rig.io(Command::new(opcode));
        assert_eq!(status, code(NvmeStatus::InvalidOpcode), "{opcode}");
    }
    // Fused commands and SGLs.
    for flags in [1, 2, 0x40, 0x80, 0xc0] {
        let fused = Command {
            flags,
            ..identify(1, 0)
        };
        assert_eq!(rig.admin(fused).0, code(NvmeStatus::InvalidField));
        let fused = Command {
            flags,
            namespace: 1,
            ..Command::new(0)
        };
        assert_eq!(rig.io(fused), code(NvmeStatus::InvalidField));
    }
}

#[test]
fn completed_commands_are_not_aborted() {
    let mut rig = Rig::ready();
    for number in [0, 1, 7] {
        assert_eq!(rig.admin(delete(0x08, 0x1234 << 16 | number)), (0, 1));
    }
}

/// A command that can never succeed is not repeated; one that a fault of the IOMMU or the medium
/// stopped may be.
#[test]
fn invalid_commands_are_not_retried() {
    assert_eq!(NvmeStatus::InvalidField.field(), 0x4002);
    assert_eq!(NvmeStatus::InvalidQueueIdentifier.field(), 0x4101);
    assert_eq!(NvmeStatus::DataTransferError.field(), 0x0004);
    assert_eq!(NvmeStatus::UnrecoveredRead.field(), 0x0281);
    assert_eq!(NvmeStatus::Success.field(), 0);
}
