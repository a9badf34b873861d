//! Tokens of another layer, device or domain, and devices that are attached twice.

use ringfence_dma::flush::Strict;
use ringfence_dma::{AttachError, FreeCoherentError, MapReason, Mapping, UnmapReason};
use ringfence_types::{Iova, IovaRange, RequesterId};

use super::DIRECTION;
use crate::rig::*;

#[test]
fn attachments_of_another_layer_and_mappings_of_another_device() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let mut second = Rig::<Tree, Plain, _, u64>::new(Strict);
    let board = &second.board;
    let other = second
        .dma
        .attach(RequesterId::new(0x20), Iova::new(u64::MAX), |domain| {
            let accounts = Accounts::new(Tree::make(LAST_PAGE));
            let rounding = ringfence_dma::space::Rounding::Exact;
            Ok::<_, ()>(ringfence_dma::space::Paged::new(
                accounts,
                Plain::make(board, domain),
                rounding,
            ))
        })
        .unwrap();
    // The first layer has no second domain.
    let buffer = memory(0x10_0000, 1);
    let (board, dma, cpu, at) = rig.parts();
    let (back, error) = dma
        .map_single(cpu, board, &other, 1, buffer, DIRECTION)
        .unwrap_err();
    assert_eq!((back, error.reason), (1, MapReason::NotAttached));
    assert_eq!(error.device, other.device());
    let mapping = Mapping::claim(
        &other,
        IovaRange::new(Iova::new(0x1000), 1).unwrap(),
        DIRECTION,
        2,
    );
    let error = dma.unmap_single(cpu, board, &other, mapping).unwrap_err();
    assert!(matches!(error.reason, UnmapReason::NotAttached(b) if *b.buffer() == 2));
    assert_eq!(
        dma.alloc_coherent(cpu, board, &other, 1)
            .unwrap_err()
            .reason,
        MapReason::NotAttached
    );
    assert!(dma.space(&other).is_none());
    dma.flush(cpu, board, &other).unwrap();
    dma.end_burst(cpu, board, &other, DIRECTION, |_| {})
        .unwrap();
    assert_eq!(
        dma.attach_to(RequesterId::new(1), Iova::new(u64::MAX), &other),
        Err(AttachError::NoSuchDomain)
    );
    assert!(dma.space(at).is_some());

    // Two devices of one layer, each with a mapping at the same address.
    let (board, dma, cpu, at) = second.parts();
    let (mine, _) = dma
        .map_single(cpu, board, at, 1, buffer, DIRECTION)
        .unwrap();
    let (theirs, _) = dma
        .map_single(cpu, board, &other, 2, buffer, DIRECTION)
        .unwrap();
    assert_eq!(mine.iova(), theirs.iova());
    let range = mine.range();
    let error = dma.unmap_single(cpu, board, &other, mine).unwrap_err();
    match error.reason {
        UnmapReason::OtherDomain(domain, buffer) => {
            assert_eq!((domain, buffer.into_buffer()), (at.domain(), 1));
        }
        other => panic!("{other:?}"),
    }
    let rings = dma.alloc_coherent(cpu, board, at, 1).unwrap();
    let (error, rings) = dma.free_coherent(cpu, board, &other, rings).unwrap_err();
    assert_eq!(error, FreeCoherentError::NotMapped);
    dma.free_coherent(cpu, board, at, rings).unwrap();
    // Both mappings are still live.
    let error = dma
        .unmap_multi(cpu, board, at, vec![theirs], |_| {})
        .unwrap_err();
    assert!(matches!(
        error.refused.unwrap().reason,
        UnmapReason::OtherDomain(_, buffer) if *buffer.buffer() == 2
    ));
    for (at, buffer) in [(*at, 1), (other, 2)] {
        let claim = Mapping::claim(&at, range, DIRECTION, buffer);
        assert_eq!(dma.unmap_single(cpu, board, &at, claim).unwrap().0, buffer);
    }
}

#[test]
fn attaching() {
    let mut rig = Rig::<Tree, Plain, _, u64>::new(Strict);
    let attach = |rig: &mut Rig<Tree, Plain, Strict, u64>, mask, result| {
        let made = rig
            .dma
            .attach(RequesterId::new(1), Iova::new(mask), |_| result);
        made.err()
    };
    for mask in [0, 1, 0xffe] {
        let error = attach(&mut rig, mask, Err(()));
        assert_eq!(error, Some(AttachError::BadMask), "{mask:#x}");
    }
    assert_eq!(
        attach(&mut rig, 0xfff, Err(())),
        Some(AttachError::Space(()))
    );
    // A space that belongs to a domain other than the next one.
    let stray = {
        let accounts = Accounts::new(Tree::make(1));
        let table = Plain::make(&rig.board, ringfence_types::DomainId::new(9));
        ringfence_dma::space::Paged::new(accounts, table, ringfence_dma::space::Rounding::Exact)
    };
    assert_eq!(
        attach(&mut rig, 0xfff, Ok(stray)),
        Some(AttachError::WrongDomain)
    );
}
