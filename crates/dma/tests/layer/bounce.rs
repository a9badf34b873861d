//! Bounce buffers (HW15, OS17) compared with a plain copy, in all directions and at all alignments.

use proptest::prelude::*;

use ringfence_dma::flush::{Never, Strict};
use ringfence_dma::space::{Identity, Paged, Rounding};
use ringfence_dma::{
    Attachment, BouncePool, Cpu, Dma, DmaSegment, MapMultiRequest, MapReason, Released, SgLimits,
    SgRequest,
};
use ringfence_types::{
    Direction, Iova, IovaRange, PageSize, Pfn, PhysAddr, PhysRange, RequesterId,
};

use crate::rig::*;

/// The device reaches 4 MiB. The pool is at 1 MiB; buffers lie above 8 MiB.
const REACH: u64 = 4 << 20;
const POOL: u64 = 1 << 20;
const HIGH: u64 = 8 << 20;
const SLOT: u64 = 2048;

struct Bounced {
    board: Board,
    dma: Dma<Identity, Never, u64>,
    cpu: Cpu<Identity, Never, u64>,
    at: Attachment,
}

fn rig(pool_bytes: u64) -> Bounced {
    let pool = BouncePool::new(memory(POOL, pool_bytes)).unwrap();
    let mut dma = Dma::new(Never).with_bounce(pool);
    let at = dma
        .attach(DEVICE, Iova::new(REACH - 1), |domain| {
            Ok::<_, ()>(Identity::new(domain))
        })
        .unwrap();
    Bounced {
        board: Board::new(),
        cpu: dma.cpu(),
        dma,
        at,
    }
}

fn fill(board: &Board, start: u64, bytes: usize, seed: u8) -> Vec<u8> {
    let data: Vec<u8> = (0..bytes)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed)
        .collect();
    board
        .arena
        .write_bytes(PhysAddr::new(start), &data)
        .unwrap();
    data
}

fn read(board: &Board, range: PhysRange) -> Vec<u8> {
    let mut data = vec![0; range.bytes() as usize];
    board.arena.read_bytes(range.start(), &mut data).unwrap();
    data
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn bytes_are_copied_right(
        offset in 0_u64..3 * SLOT,
        bytes in 1_u64..5 * SLOT,
        direction in prop::sample::select(Direction::ALL.to_vec()),
        (from, to) in (0.0_f64..1.0, 0.0_f64..1.0),
        sync in any::<bool>(),
    ) {
        let mut rig = rig(128 << 10);
        let Bounced { board, dma, cpu, at } = &mut rig;
        // Data of an earlier user fills the pool. The frame around the buffer must not change.
        fill(board, POOL, 128 << 10, 0xee);
        let around = memory(HIGH, 16 * SLOT);
        fill(board, HIGH, 16 * SLOT as usize, 0x55);
        let buffer = memory(HIGH + SLOT + offset, bytes);
        let mut expected = read(board, around);
        let at_byte = (buffer.start().get() - HIGH) as usize;

        let (mapping, placed) = dma.map_single(cpu, board, at, 7, buffer, direction).unwrap();
        prop_assert_eq!(mapping.bounce().is_some(), true);
        let slot = *mapping.bounce().unwrap();
        prop_assert_eq!(placed.range.start().get(), slot.copy().start().get());
        prop_assert!(mapping.range().last().get() < REACH);
        // The low bits are the same, the number of slots is exact, and the device sees the buffer's
        // bytes with zeroes around them (A34).
        prop_assert_eq!(mapping.iova().offset_in(SLOT), buffer.start().offset_in(SLOT));
        let slots = (buffer.start().offset_in(SLOT) + bytes).div_ceil(SLOT);
        let run = memory(slot.copy().start().get() / SLOT * SLOT, slots * SLOT);
        let seen = read(board, run);
        let lead = buffer.start().offset_in(SLOT) as usize;
        prop_assert!(seen[..lead].iter().all(|b| *b == 0));
        prop_assert_eq!(&seen[lead..lead + bytes as usize], &read(board, buffer)[..]);
        prop_assert!(seen[lead + bytes as usize..].iter().all(|b| *b == 0));

        // The device writes a part of the buffer. The CPU must find that part, and only that part,
        // changed.
        let (a, b) = ((from * bytes as f64) as usize, (to * bytes as f64) as usize);
        let (a, b) = (a.min(b), a.max(b));
        let written = fill(board, slot.copy().start().get() + a as u64, b - a, 0xaa);
        if direction != Direction::ToDevice {
            expected[at_byte + a..at_byte + b].copy_from_slice(&written);
        }
        if sync {
            dma.sync_for_cpu(&*board, &mapping);
            prop_assert_eq!(read(board, around), expected.clone());
            if direction != Direction::FromDevice {
                // The CPU owns the buffer, then the device again.
                let ours = fill(board, buffer.start().get(), bytes as usize, 0x77);
                dma.sync_for_device(&*board, &mapping);
                prop_assert_eq!(read(board, slot.copy()), ours.clone());
                expected[at_byte..at_byte + bytes as usize].copy_from_slice(&ours);
            }
        }
        let _ = dma.unmap_single(cpu, board, at, mapping).unwrap();
        prop_assert_eq!(read(board, around), expected);
        // The slots are free: the pool accepts its longest mapping again.
        let whole = memory(HIGH, 128 << 10);
        let (mapping, _) = dma.map_single(cpu, board, at, 8, whole, direction).unwrap();
        prop_assert_eq!(mapping.bounce().unwrap().copy().start().get(), POOL);
    }
}

/// Lists with pieces inside and outside the device's reach, compared with a plain copy.
#[test]
fn lists_are_copied_piece_by_piece() {
    for direction in Direction::ALL {
        let mut rig = rig(128 << 10);
        let Bounced {
            board,
            dma,
            cpu,
            at,
        } = &mut rig;
        let pieces = [
            memory(REACH - 3000, 3000),
            memory(REACH, 100),
            memory(HIGH + 13, 5000),
            memory(0x3000, 64),
            memory(HIGH + 0x10_0007, 9),
        ];
        let before: Vec<_> = pieces
            .iter()
            .map(|piece| fill(board, piece.start().get(), piece.bytes() as usize, 0x33))
            .collect();
        let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
        let mut out = [DmaSegment { range: nothing }; 5];
        let limits = SgLimits::default();
        // If the output array is too short, no slot stays allocated.
        for room in 0..5 {
            let out = &mut out[..room];
            let (buffer, error) = dma
                .map_sg(
                    cpu,
                    board,
                    at,
                    SgRequest {
                        buffer: 1,
                        pieces: &pieces,
                        direction,
                        limits,
                        out,
                    },
                )
                .unwrap_err();
            assert_eq!((buffer, error.reason), (1, MapReason::TooManySegments));
        }
        let (mapping, count) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 1,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        assert_eq!(count, 5);
        for ((segment, piece), bytes) in out.iter().zip(&pieces).zip(&before) {
            let range = segment.range;
            assert!(range.last().get() < REACH && range.bytes() == piece.bytes());
            let direct = piece.last().get() < REACH;
            assert_eq!(direct, range.start().get() == piece.start().get());
            let seen = memory(range.start().get(), range.bytes());
            assert_eq!(&read(board, seen), bytes);
            // The device writes its answer into the first half.
            fill(board, range.start().get(), bytes.len() / 2, 0x99);
        }
        let check = |board: &Board| {
            for (piece, old) in pieces.iter().zip(&before) {
                let copied = piece.last().get() >= REACH;
                let mut expected = old.clone();
                if !copied || direction != Direction::ToDevice {
                    let half = old.len() / 2;
                    let new: Vec<u8> = (0..half)
                        .map(|i| (i as u8).wrapping_mul(31) ^ 0x99)
                        .collect();
                    expected[..half].copy_from_slice(&new);
                }
                assert_eq!(read(board, *piece), expected, "{direction} {piece}");
            }
        };
        dma.sync_sg_for_cpu(&*board, &mapping);
        check(board);
        dma.sync_sg_for_device(&*board, &mapping);
        assert_eq!(dma.unmap_sg(cpu, board, at, mapping).unwrap().0, 1);
        check(board);
        // All slots are free again.
        let whole = memory(HIGH, 128 << 10);
        assert!(dma.map_single(cpu, board, at, 2, whole, direction).is_ok());
        // If no slot is free, the whole list is rejected.
        let (_, error) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 3,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap_err();
        assert_eq!(
            (error.reason, error.buffer),
            (MapReason::BeyondMask, Some(pieces[1]))
        );
    }
}

#[test]
fn directly_mapped_buffers_are_not_bounced() {
    let mut rig = rig(128 << 10);
    let Bounced {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let last = memory(REACH - 100, 100);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, last, Direction::ToDevice)
        .unwrap();
    assert_eq!(
        (mapping.iova().get(), mapping.bounce()),
        (REACH - 100, None)
    );
    let across = memory(REACH - 100, 101);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, across, Direction::ToDevice)
        .unwrap();
    assert!(mapping.bounce().is_some());
}

/// A device with short addresses reaches high memory without a copy if a table translates for it
/// (HW15). The same device without a table needs the pool.
#[test]
fn a_table_makes_copies_unnecessary() {
    for bits in [22, 24, 30, 31, 32] {
        let mask = Iova::new((1 << bits) - 1);
        // Just above the device's reach, across its end, and in the last pages of 46-bit memory.
        let buffers = [
            memory(1 << bits, 1),
            memory((1 << bits) - 100, 3 * PAGE),
            memory((1 << 46) - 2 * PAGE, 2 * PAGE),
        ];
        let board = Board::new();
        let pool = BouncePool::new(memory(POOL, 128 << 10)).unwrap();
        let mut dma = Dma::<Space<Tree, Plain>, Strict, u64>::new(Strict).with_bounce(pool);
        let at = dma
            .attach(DEVICE, mask, |domain| {
                let accounts = Accounts::new(Tree::make(LAST_PAGE));
                let table = Plain::make(&board, domain);
                Ok::<_, ()>(Paged::new(accounts, table, Rounding::Exact))
            })
            .unwrap();
        let cpu = dma.cpu();
        let mut rig = Rig {
            board,
            dma,
            cpu,
            at,
        };
        let before = read(&rig.board, memory(POOL, 128 << 10));
        for (id, buffer) in (0..).zip(buffers) {
            let (board, dma, cpu, at) = rig.parts();
            let direction = Direction::Bidirectional;
            let (mapping, _) = dma
                .map_single(cpu, board, at, id, buffer, direction)
                .unwrap();
            assert_eq!(mapping.bounce(), None, "{bits} bits, {buffer}");
            assert!(mapping.range().last() <= mask, "{bits} bits, {buffer}");
            assert_eq!(mapping.range().bytes(), buffer.bytes());
            // Every page that the device addresses is the buffer's own.
            let first = mapping.iova();
            let pages = buffer.pages(PageSize::Size4K);
            for page in 0..pages {
                let iova = first.wrapping_add(page * PAGE).align_down(PAGE);
                let frame = buffer.start().wrapping_add(page * PAGE).align_down(PAGE);
                let leaf = rig.leaf(Pfn::containing(iova).get());
                assert_eq!(leaf, Some(frame), "{bits} bits, {buffer}");
            }
            let (board, dma, cpu, at) = rig.parts();
            let Released(back) = dma.unmap_single(cpu, board, at, mapping).unwrap();
            assert_eq!(back, id);
        }
        assert_eq!(read(&rig.board, memory(POOL, 128 << 10)), before);
    }
    // Without a table, a buffer above the reach is copied through the pool.
    let mut rig = rig(128 << 10);
    let Bounced {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let high = memory(HIGH, 100);
    let data = fill(board, HIGH, 100, 0x5a);
    let (mapping, _) = dma
        .map_single(cpu, board, at, 1, high, Direction::ToDevice)
        .unwrap();
    let copy = mapping.bounce().unwrap().copy();
    assert_eq!(
        (mapping.range().last().get() < REACH, read(board, copy)),
        (true, data)
    );
}

#[test]
fn a_pool_runs_out_and_recovers() {
    let mut rig = rig(128 << 10);
    let Bounced {
        board,
        dma,
        cpu,
        at,
    } = &mut rig;
    let direction = Direction::FromDevice;
    let mut live = Vec::new();
    // 64 slots, two per page.
    for id in 0..32 {
        let page = memory(HIGH + id * PAGE, PAGE);
        live.push(
            dma.map_single(cpu, board, at, id, page, direction)
                .unwrap()
                .0,
        );
    }
    let mut copies: Vec<_> = live.iter().map(|m| m.range()).collect();
    copies.sort();
    assert!(copies.windows(2).all(|pair| !pair[0].overlaps(&pair[1])));
    let (buffer, error) = dma
        .map_single(cpu, board, at, 99, memory(HIGH, 1), direction)
        .unwrap_err();
    assert_eq!((buffer, error.reason), (99, MapReason::BeyondMask));
    // Many buffers in one call: all or none.
    let _ = dma
        .unmap_single(cpu, board, at, live.pop().unwrap())
        .unwrap();
    let requests = |count| -> Vec<_> {
        (0..count)
            .map(|buffer| MapMultiRequest {
                buffer,
                memory: memory(HIGH + buffer * PAGE, 1),
                direction,
            })
            .collect()
    };
    for _ in 0..3 {
        let (back, error) = dma.map_multi(cpu, board, at, requests(3)).unwrap_err();
        assert_eq!((back.len(), error.reason), (3, MapReason::BeyondMask));
    }
    let made = dma.map_multi(cpu, board, at, requests(2)).unwrap();
    let mut back = Vec::new();
    dma.unmap_multi(cpu, board, at, made, |b| back.push(b))
        .unwrap();
    assert_eq!(back, [0, 1]);
    dma.unmap_multi(cpu, board, at, live, |_| {}).unwrap();
    // A buffer longer than a run never fits.
    let (_, error) = dma
        .map_single(cpu, board, at, 1, memory(HIGH, (128 << 10) + 1), direction)
        .unwrap_err();
    assert_eq!(error.reason, MapReason::BeyondMask);
    assert!(
        dma.map_single(cpu, board, at, 1, memory(HIGH, 128 << 10), direction)
            .is_ok()
    );
}

#[test]
fn without_a_pool_it_is_an_error() {
    let mut dma = Dma::<Identity, Never, u64>::new(Never);
    let mut board = Board::new();
    for bits in [24, 30, 31, 32] {
        let at = dma
            .attach(
                RequesterId::new(bits),
                Iova::new((1 << bits) - 1),
                |domain| Ok::<_, ()>(Identity::new(domain)),
            )
            .unwrap();
        let mut cpu = dma.cpu();
        let below = memory((1 << bits) - 1, 1);
        assert!(
            dma.map_single(&mut cpu, &mut board, &at, 1, below, Direction::ToDevice)
                .is_ok()
        );
        for beyond in [
            memory(1 << bits, 1),
            memory((1 << bits) - 1, 2),
            memory(0, u64::MAX),
        ] {
            let (buffer, error) = dma
                .map_single(&mut cpu, &mut board, &at, 2, beyond, Direction::ToDevice)
                .unwrap_err();
            assert_eq!(
                (buffer, error.reason, error.buffer),
                (2, MapReason::BeyondMask, Some(beyond))
            );
        }
    }
    // Invalid pools.
    for (start, bytes) in [(0, 1), (0, (128 << 10) - 1), (1024, 1 << 20), (1, u64::MAX)] {
        assert!(
            BouncePool::new(memory(start, bytes)).is_none(),
            "{start} {bytes}"
        );
    }
}
