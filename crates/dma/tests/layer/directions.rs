//! A mapping's direction determines its permissions in the table, for every kind of mapping.

use ringfence_dma::flush::Strict;
use ringfence_dma::{DmaSegment, MapMultiRequest, SgLimits, SgRequest};
use ringfence_types::{Direction, Iova, IovaRange, Permissions};

use crate::rig::*;

#[test]
fn directions_become_permissions() {
    for (direction, expected) in [
        (Direction::ToDevice, Permissions::READ),
        (Direction::FromDevice, Permissions::WRITE),
        (Direction::Bidirectional, Permissions::READ_WRITE),
    ] {
        let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
        let (board, dma, cpu, at) = rig.parts();
        let pieces = [memory(0x10_0000, 64), memory(0x20_0000, 64)];
        let (single, _) = dma
            .map_single(cpu, board, at, 1, pieces[0], direction)
            .unwrap();
        let range = IovaRange::new(Iova::ZERO, 1).unwrap();
        let mut out = [DmaSegment { range }; 2];
        let limits = SgLimits::default();
        let (list, _) = dma
            .map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 2,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            )
            .unwrap();
        let request = MapMultiRequest {
            buffer: 3,
            memory: pieces[0],
            direction,
        };
        let multi = dma.map_multi(cpu, board, at, vec![request]).unwrap();
        let table = &rig.space().table().0;
        for iova in [
            single.iova(),
            out[0].range.start(),
            out[1].range.start(),
            multi[0].iova(),
        ] {
            let leaf = table.lookup(&*rig.board.arena, iova).unwrap();
            assert_eq!(leaf.permissions, expected, "{direction}");
        }
        assert_eq!(
            (single.direction(), list.direction()),
            (direction, direction)
        );
        let (board, dma, cpu, at) = rig.parts();
        let rings = dma.alloc_coherent(cpu, board, at, 1).unwrap();
        let leaf = rig
            .space()
            .table()
            .0
            .lookup(&*rig.board.arena, rings.range().start());
        assert_eq!(leaf.unwrap().permissions, Permissions::READ_WRITE);
    }
    // Each buffer of a batch keeps its own direction.
    let directions = [
        Direction::ToDevice,
        Direction::FromDevice,
        Direction::Bidirectional,
    ];
    let mut rig = Rig::<Product, Cached, _, u64>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let requests = directions.iter().zip(0_u64..);
    let requests = requests.map(|(direction, number)| MapMultiRequest {
        buffer: number,
        memory: memory(0x10_0000 + number * PAGE, 64),
        direction: *direction,
    });
    let mappings = dma.map_multi(cpu, board, at, requests.collect()).unwrap();
    assert_eq!(mappings.len(), directions.len());
    let table = &rig.space().table().0;
    for (mapping, direction) in mappings.iter().zip(directions) {
        assert_eq!(mapping.direction(), direction);
        let leaf = table.lookup(&*rig.board.arena, mapping.iova()).unwrap();
        assert_eq!(leaf.permissions, direction.permissions(), "{direction}");
    }
}
