//! Linux's choice of DMA operations for a machine and a bus (CG04), and the layers that it selects.

use ringfence_dma::dma_ops_choice::{
    BufferPath, CalgaryBuses, DmaOpsConfig, DmaOpsKind, IommuOption,
};
use ringfence_dma::flush::{Never, Strict};
use ringfence_dma::space::{Identity, Paged, PlainTable, Rounding};
use ringfence_dma::{BouncePool, Dma, MapReason};
use ringfence_pgtable::{CalgaryTce, Coherency, Table};
use ringfence_types::{Direction, Iova, PhysAddr, RequesterId};

use crate::rig::*;

const MIB_512: u64 = (512 << 20) - 1;
const GIB_8: u64 = (8 << 30) - 1;

fn on(bus: u8) -> RequesterId {
    RequesterId::new(u16::from(bus) << 8)
}

/// Buses 1 to 4 have host bridges; the user disabled bus 3.
fn machine(last_memory: u64, gart: bool, calgary: bool, option: IommuOption) -> DmaOpsConfig {
    DmaOpsConfig {
        last_memory,
        gart,
        calgary: calgary.then(|| CalgaryBuses::new(1..=4, &[3])),
        option,
    }
}

#[test]
fn each_bus_gets_the_operations_that_linux_chose() {
    use DmaOpsKind::{Calgary as C, Gart as G, NoMmu as N, Swiotlb as S};
    use IommuOption::{Force, Off, Soft, Unset};
    // Memory, GART, Calgary, option; operations on bus 2, on disabled bus 3, and on buses that
    // differ from bus 2 in one bit.
    let cases = [
        (MIB_512, false, false, Unset, [N, N, N]),
        (GIB_8, false, false, Unset, [S, S, S]),
        (MIB_512, true, false, Unset, [N, N, N]),
        (MIB_512, true, false, Force, [G, G, G]),
        (GIB_8, true, false, Unset, [G, G, G]),
        (MIB_512, false, true, Unset, [C, N, N]),
        (GIB_8, false, true, Unset, [C, S, S]),
        (GIB_8, false, true, Force, [C, S, S]),
        // The GART's detection comes first.
        (GIB_8, true, true, Unset, [G, G, G]),
        (GIB_8, true, true, Soft, [S, S, S]),
        (GIB_8, false, true, Soft, [S, S, S]),
        (MIB_512, false, false, Soft, [S, S, S]),
        (GIB_8, true, true, Off, [N, N, N]),
        (GIB_8, false, true, Off, [N, N, N]),
    ];
    for (memory, gart, calgary, option, expected) in cases {
        let machine = machine(memory, gart, calgary, option);
        for other in [0, 6, 10, 18, 34, 66, 130] {
            let found = [2, 3, other].map(|bus| machine.choose(on(bus)));
            assert_eq!(found, expected, "{machine:?}, bus {other}");
        }
    }
    assert_eq!(
        [N, S, G, C].map(DmaOpsKind::isolates),
        [false, false, false, true]
    );
}

#[test]
fn a_buffer_takes_the_path_of_its_operations() {
    use BufferPath::{Bounced, Direct, Refused, Remapped};
    let mask = Iova::new(0xffff_ffff);
    let (low, high) = (memory(0x1000, 64), memory(1 << 32, 64));
    let across = memory((1 << 32) - 32, 64);
    for (kind, below, beyond) in [
        (DmaOpsKind::NoMmu, Direct, Refused),
        (DmaOpsKind::Swiotlb, Direct, Bounced),
        (DmaOpsKind::Gart, Direct, Remapped),
        (DmaOpsKind::Calgary, Remapped, Remapped),
    ] {
        assert_eq!(kind.path(&low, mask), below, "{kind:?}");
        assert_eq!(kind.path(&high, mask), beyond, "{kind:?}");
        assert_eq!(kind.path(&across, mask), beyond, "{kind:?}");
    }
}

/// Each layer maps by the chosen path. One machine has a device below a translated bridge and a
/// device on the disabled bus.
#[test]
fn the_chosen_layers_map_as_the_path_says() {
    const REACH: u64 = 4 << 20;
    let mask = Iova::new(REACH - 1);
    let (low, high) = (memory(0x3000, 100), memory(8 << 20, 100));
    for option in [IommuOption::Unset, IommuOption::Off] {
        let machine = machine(GIB_8, false, true, option);
        for bus in [2, 3] {
            let kind = machine.choose(on(bus));
            for buffer in [low, high] {
                let expected = kind.path(&buffer, mask);
                let found = match kind {
                    DmaOpsKind::Calgary => remapped(on(bus), mask, buffer),
                    kind => direct(on(bus), mask, buffer, kind == DmaOpsKind::Swiotlb),
                };
                assert_eq!(found, expected, "{kind:?} {buffer}");
            }
        }
    }
}

fn direct(
    device: RequesterId,
    mask: Iova,
    buffer: ringfence_types::PhysRange,
    bounces: bool,
) -> BufferPath {
    let mut board = Board::new();
    let mut dma = Dma::<Identity, Never, u64>::new(Never);
    if bounces {
        dma = dma.with_bounce(BouncePool::new(memory(1 << 20, 128 << 10)).unwrap());
    }
    let at = dma
        .attach(device, mask, |domain| Ok::<_, ()>(Identity::new(domain)))
        .unwrap();
    let mut cpu = dma.cpu();
    match dma.map_single(&mut cpu, &mut board, &at, 0, buffer, Direction::ToDevice) {
        Ok((mapping, _)) if mapping.bounce().is_some() => BufferPath::Bounced,
        Ok((mapping, _)) => {
            assert_eq!(mapping.iova().get(), buffer.start().get());
            BufferPath::Direct
        }
        Err((_, error)) => {
            assert!(matches!(error.reason, MapReason::BeyondMask));
            BufferPath::Refused
        }
    }
}

fn remapped(device: RequesterId, mask: Iova, buffer: ringfence_types::PhysRange) -> BufferPath {
    let mut board = Board::new();
    let format = CalgaryTce::new(25).unwrap();
    let root = PhysAddr::new(2 << 20);
    let mut dma = Dma::<Paged<Tree, PlainTable<CalgaryTce>>, Strict, u64>::new(Strict);
    let at = dma
        .attach(device, mask, |domain| {
            let table = Table::at(format, domain, Coherency::Coherent, &board.arena, root);
            let table = PlainTable(table.map_err(drop)?);
            Ok::<_, ()>(Paged::new(Tree::make(LAST_PAGE), table, Rounding::Exact))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    let (mapping, _) = dma
        .map_single(&mut cpu, &mut board, &at, 0, buffer, Direction::ToDevice)
        .unwrap();
    assert!(mapping.range().last() <= mask);
    let table = Table::at(
        format,
        mapping.domain(),
        Coherency::Coherent,
        &board.arena,
        root,
    );
    assert!(table.is_err(), "the map stored an entry");
    BufferPath::Remapped
}
