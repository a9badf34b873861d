//! Formats without write-only pages: the device also reads the slots that it writes.

use std::cell::RefCell;

use ringfence_dma::Dma;
use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    FromDevice, Paged, PlainTable, Rounding, ShadowPolicy, ShadowPool, ShadowSpace,
};
use ringfence_pgtable::{Coherency, FirstStage, Table};
use ringfence_types::{Access, Direction, Iova, PhysAddr};

use super::machine::*;
use crate::rig::*;

#[test]
fn a_device_that_reads_its_receive_slots_finds_no_earlier_buffer() {
    for from_device in [FromDevice::Kept, FromDevice::Unspecified] {
        let policy = ShadowPolicy {
            from_device,
            ..POLICY
        };
        let mut board = Board::new();
        let mut dma = Dma::new(Strict);
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let (format, coherency) = (FirstStage::FOUR_LEVELS, Coherency::Coherent);
                let table = Table::new(format, domain, coherency, &*board.arena, &board.frames);
                let table = PlainTable(table.unwrap());
                let paged =
                    Paged::new(Accounts::new(Tree::make(LAST_PAGE)), table, Rounding::Exact);
                let pool = ShadowPool::new(memory(POOL, 16 * PAGE), RefCell::new).unwrap();
                Ok::<_, ()>(ShadowSpace::new(paged, pool, policy))
            })
            .unwrap();
        let mut cpu = dma.cpu();
        let direction = Direction::FromDevice;
        // The driver's buffer holds earlier data of its own, and a map that fails leaves none.
        board
            .arena
            .write_bytes(PhysAddr::new(0x1000), &pattern(PAGE as usize, 9))
            .unwrap();
        let earlier = memory(0x1000, PAGE);
        let (earlier, _) = dma
            .map_single(&mut cpu, &mut board, &at, 1, earlier, direction)
            .unwrap();
        let _ = dma
            .unmap_single(&mut cpu, &mut board, &at, earlier)
            .unwrap();
        let next = memory(0x5100, 0x10);
        let (next, _) = dma
            .map_single(&mut cpu, &mut board, &at, 2, next, direction)
            .unwrap();
        let page = next.iova().align_down(PAGE);
        let table = &dma.space(&at).unwrap().paged().table().0;
        let leaf = table.lookup(&*board.arena, page).unwrap();
        assert!(
            leaf.permissions.allows(Access::Read),
            "the format has no such page"
        );
        let mut seen = vec![0xff; PAGE as usize];
        board.arena.read_bytes(leaf.base, &mut seen).unwrap();
        assert_eq!(
            seen,
            vec![0; PAGE as usize],
            "{from_device:?}: the device reads an earlier buffer"
        );
        let _ = dma.unmap_single(&mut cpu, &mut board, &at, next).unwrap();
    }
}
