//! Reads and writes, and their PRPs (base specification, section 4.3).

use ringfence_nvme_device::{BLOCK_BYTES, Config, NvmeStatus, Opcode, Segment};
use ringfence_types::Iova;

use super::rig::{BLOCKS, Command, Rig, code};

const READ: u8 = 2;
const WRITE: u8 = 1;
const LIST: u64 = 0x8000;

/// Stores page addresses at `at`.
fn store_list(rig: &mut Rig, at: u64, pages: &[u64]) {
    let raw: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    rig.host.store(at, &raw);
}

/// The first bytes of the namespace from `block` on.
fn content(rig: &Rig, block: u64, bytes: usize) -> Vec<u8> {
    let start = (block * BLOCK_BYTES) as usize;
    rig.blocks.bytes[start..start + bytes].to_vec()
}

fn segment(start: u64, bytes: u64) -> Segment {
    let start = Iova::new(start);
    Segment { start, bytes }
}

#[test]
fn one_and_two_pages_need_no_list() {
    let mut rig = Rig::ready();
    let cases = [
        (0x10000, 0, 1, vec![segment(0x10000, 512)]),
        (
            0x10ffc,
            0x20000,
            1,
            vec![segment(0x10ffc, 4), segment(0x20000, 508)],
        ),
        (
            0x10000,
            0x20000,
            9,
            vec![segment(0x10000, 4096), segment(0x20000, 512)],
        ),
        (
            0x10e00,
            0x20000,
            9,
            vec![segment(0x10e00, 512), segment(0x20000, 4096)],
        ),
        // Adjacent pages are one segment.
        (0x10200, 0x11000, 8, vec![segment(0x10200, 4096)]),
    ];
    for (first, second, blocks, expected) in cases {
        let read = Command::transfer(READ, 5, blocks, [first, second]);
        assert_eq!(rig.io(read), 0, "{first:#x}");
        assert_eq!(rig.host.seen.take(), Some((Opcode::Read, expected.clone())));
        let stored: Vec<u8> = expected
            .iter()
            .flat_map(|part| {
                rig.host
                    .load(part.start.get(), part.bytes as usize)
                    .to_vec()
            })
            .collect();
        assert_eq!(stored, content(&rig, 5, stored.len()));
        // The same buffers, to other blocks.
        let write = Command::transfer(WRITE, 500, blocks, [first, second]);
        assert_eq!(rig.io(write), 0);
        assert_eq!(content(&rig, 500, stored.len()), stored);
    }
}

#[test]
fn lists_may_begin_within_a_page_and_continue_on_another() {
    for offset in [0, 8, 0xf00, 0xff0, 0xff8] {
        let mut rig = Rig::ready();
        // 130 pages, backwards, so that none is adjacent to the one before.
        let pages: Vec<u64> = (0..130).map(|n| 0x10000 + (129 - n) * 0x1000).collect();
        let (first, rest) = pages.split_first().unwrap();
        let slots = (0x1000 - offset as usize) / 8;
        if rest.len() <= slots {
            store_list(&mut rig, LIST + offset, rest);
        } else {
            let (here, there) = rest.split_at(slots - 1);
            store_list(&mut rig, LIST + offset, here);
            store_list(&mut rig, LIST + 0xff8, &[0x9000]);
            store_list(&mut rig, 0x9000, there);
        }
        let read = Command::transfer(READ, 0, 130 * 8 - 16, [*first, LIST + offset]);
        assert_eq!(rig.io(read), 0, "{offset:#x}");
        for (page, block) in pages.iter().zip((0..).step_by(8)).take(128) {
            assert_eq!(rig.host.load(*page, 4096), content(&rig, block, 4096));
        }
    }
}

#[test]
fn wrong_prps_are_refused() {
    use NvmeStatus as S;
    let nowhere = !0xfff_u64;
    let cases = [
        (1, [0x10002, 0], S::PrpOffsetInvalid),
        (9, [0x10000, 0x20004], S::PrpOffsetInvalid),
        (17, [0x10000, LIST + 4], S::PrpOffsetInvalid),
        (1, [nowhere, 0], S::DataTransferError),
        (1, [!3, 0], S::DataTransferError),
        (9, [0x10000, nowhere], S::DataTransferError),
        (17, [0x10000, nowhere], S::DataTransferError),
    ];
    for opcode in [READ, WRITE] {
        for (blocks, prps, status) in cases {
            let mut rig = Rig::ready();
            let command = Command::transfer(opcode, 0, blocks, prps);
            assert_eq!(rig.io(command), code(status), "{command:x?}");
            // The queue continues.
            assert_eq!(rig.io(Command::transfer(opcode, 0, 1, [0x10000, 0])), 0);
        }
    }
    // An entry within a page, and a list that continues within a page.
    for (entries, at) in [([0x10000, 0x10008], LIST), ([0x9008, 0], LIST + 0xff8)] {
        let mut rig = Rig::ready();
        store_list(&mut rig, at, &entries[..if at == LIST { 2 } else { 1 }]);
        let read = Command::transfer(READ, 0, 17 + 8, [0x20000, at]);
        assert_eq!(rig.io(read), code(S::PrpOffsetInvalid));
    }
}

/// A list that continues with itself ends with the data.
#[test]
fn a_list_that_loops_ends() {
    let mut rig = Rig::ready();
    store_list(&mut rig, LIST, &[0x10000; 511]);
    store_list(&mut rig, LIST + 0xff8, &[LIST]);
    let read = Command::transfer(READ, 0, 1024, [0x10000, LIST + 0xff8]);
    assert_eq!(rig.io(read), 0);
}

#[test]
fn blocks_are_checked() {
    let mut rig = Rig::ready();
    for (block, blocks, status) in [
        (BLOCKS - 1, 1, NvmeStatus::Success),
        (BLOCKS - 1, 2, NvmeStatus::LbaOutOfRange),
        (BLOCKS, 1, NvmeStatus::LbaOutOfRange),
        (u64::MAX, 1, NvmeStatus::LbaOutOfRange),
        (u64::MAX - 1, 2, NvmeStatus::LbaOutOfRange),
        (1 << 55, 1, NvmeStatus::LbaOutOfRange),
        (0, 2049, NvmeStatus::InvalidField),
        (0, 0x10000, NvmeStatus::InvalidField),
    ] {
        for opcode in [READ, WRITE] {
            let command = Command::transfer(opcode, block, blocks, [0x10000, 0x11000]);
            assert_eq!(rig.io(command), code(status), "{block:#x} {blocks}");
        }
    }
    for namespace in [0, 2, u32::MAX] {
        let other = Command {
            namespace,
            ..Command::transfer(READ, 0, 1, [0x10000, 0])
        };
        assert_eq!(rig.io(other), code(NvmeStatus::InvalidNamespace));
    }
}

#[test]
fn a_read_only_namespace_is_not_written() {
    let config = Config {
        read_only: true,
        ..Config::new(BLOCKS)
    };
    let mut rig = Rig::off(&config);
    rig.enable();
    rig.create_pair();
    let before = rig.blocks.bytes.clone();
    let write = Command::transfer(WRITE, 0, 1, [0x10000, 0]);
    assert_eq!(rig.io(write), code(NvmeStatus::WriteProtected));
    assert!(rig.blocks.bytes == before);
    assert_eq!(rig.io(Command::transfer(READ, 0, 1, [0x10000, 0])), 0);
}

#[test]
fn writes_are_durable_after_a_flush_or_at_once() {
    let mut rig = Rig::ready();
    let write = Command::transfer(WRITE, 0, 1, [0x10000, 0]);
    assert_eq!((rig.io(write), rig.blocks.flushes), (0, 0));
    let flush = |namespace| Command {
        namespace,
        ..Command::new(0)
    };
    for (namespace, status) in [
        (1, 0),
        (u32::MAX, 0),
        (2, code(NvmeStatus::InvalidNamespace)),
    ] {
        assert_eq!(rig.io(flush(namespace)), status);
    }
    assert_eq!(rig.blocks.flushes, 2);
    let mut forced = write;
    forced.words[2] |= 1 << 30;
    assert_eq!((rig.io(forced), rig.blocks.flushes), (0, 3));
    // The command that turns the cache off flushes, and then every write does.
    assert_eq!(rig.admin(cache(0)), (0, 0));
    assert_eq!(rig.blocks.flushes, 4);
    assert_eq!((rig.io(write), rig.blocks.flushes), (0, 5));
}

/// Set Features of the volatile write cache.
fn cache(enable: u32) -> Command {
    Command {
        words: [6, enable, 0, 0, 0, 0],
        ..Command::new(0x09)
    }
}

#[test]
fn only_turning_the_cache_off_flushes() {
    let mut rig = Rig::ready();
    for (enable, flushes) in [(1, 0), (0, 1), (0, 1), (1, 1), (0, 2)] {
        assert_eq!(rig.admin(cache(enable)), (0, 0));
        assert_eq!(rig.blocks.flushes, flushes, "{enable}");
    }
}

/// The host learns that its writes are not durable, and the cache stays on.
#[test]
fn a_cache_that_cannot_be_flushed_stays_on() {
    let mut rig = Rig::ready();
    rig.blocks.is_broken = true;
    assert_eq!(rig.admin(cache(0)).0, code(NvmeStatus::WriteFault));
    let get = Command {
        opcode: 0x0a,
        ..cache(0)
    };
    assert_eq!(rig.admin(get), (0, 1));
    rig.blocks.is_broken = false;
    let write = Command::transfer(WRITE, 0, 1, [0x10000, 0]);
    assert_eq!((rig.io(write), rig.blocks.flushes), (0, 1));
}

#[test]
fn errors_of_the_medium_are_reported() {
    let mut rig = Rig::ready();
    rig.blocks.is_broken = true;
    for (opcode, status) in [
        (READ, NvmeStatus::UnrecoveredRead),
        (WRITE, NvmeStatus::WriteFault),
        (0, NvmeStatus::WriteFault),
    ] {
        let command = Command::transfer(opcode, 0, 1, [0x10000, 0]);
        assert_eq!(rig.io(command), code(status));
    }
    rig.blocks.is_broken = false;
    assert_eq!(rig.io(Command::transfer(READ, 0, 1, [0x10000, 0])), 0);
}
