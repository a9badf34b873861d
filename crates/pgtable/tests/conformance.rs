//! Compares every format, depth, largest page size, front end and memory type with a brute-force
//! model.

mod common;
#[path = "common/interfaces.rs"]
mod interfaces;
#[path = "common/model.rs"]
mod model;
#[path = "common/suite.rs"]
mod suite;

use common::{DOMAIN, flushed, frames, memory, page};
use model::Shape;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    AmdV1, Arm, CalgaryTce, Coherency, FirstStage, Format, Granule, Granule4K, Granule16K,
    Granule64K, Level, Levels, MapError, MapRequest, MemoryType, RiscV, SecondStage, Table,
    TableError, UnmapError,
};
use ringfence_types::{FrameSource, Iova, PageSize, Permissions, PhysAddr, PhysMemory};
use suite::suite;

/// Leaves of one entry, up to `largest`.
fn plain_leaves(largest: PageSize) -> Vec<&'static [u32]> {
    let all: [&[u32]; 3] = [&[12], &[21], &[30]];
    let fit = all.into_iter().filter(|leaf| leaf[0] <= largest.shift());
    fit.collect()
}

fn second_stage(levels: Levels) {
    for largest in PageSize::ALL {
        let format = SecondStage::new(levels).with_pages_up_to(largest);
        let depth = usize::from(format.root_level().get());
        let shape = Shape::of(depth, &plain_leaves(largest));
        let seed = 0x5eed_0000 + u64::from(shape.width) * 256 + u64::from(largest.shift());
        suite(format, &shape, seed);
        // With the contiguous hint of level 1, with and without larger leaves.
        if largest != PageSize::Size1G {
            let mut leaves = plain_leaves(largest);
            leaves[0] = &[12, 16];
            let shape = Shape::of(depth, &leaves);
            suite(format.with_contiguous_hint(), &shape, seed + 1);
        }
    }
}

#[test]
fn three_levels() {
    second_stage(Levels::Three);
}

#[test]
fn four_levels() {
    second_stage(Levels::Four);
}

#[test]
fn five_levels() {
    second_stage(Levels::Five);
}

#[test]
fn first_stage() {
    for levels in [Levels::Four, Levels::Five] {
        for largest in [PageSize::Size4K, PageSize::Size1G] {
            let format = FirstStage::new(levels).expect("exists");
            let format = format.with_pages_up_to(largest);
            let depth = usize::from(format.root_level().get());
            let mut shape = Shape::of(depth, &plain_leaves(largest));
            (shape.sign_extended, shape.write_reads) = (true, true);
            shape.rubbish = 0x0000_0000_0066_6067;
            suite(format, &shape, 0xf157_0000 + u64::from(shape.width));
        }
    }
}

fn size(shift: u32) -> PageSize {
    PageSize::from_shift(shift).expect("a size")
}

/// Sizes of AMD-Vi pages: at each level, every power of two from one entry to half a table.
fn amd_v1(levels: u8, largest: u32) {
    let root = Level::new(levels).expect("1 to 6");
    let format = AmdV1::new(root).with_pages_up_to(size(largest));
    let leaves = [12, 21, 30]
        .map(|own: u32| -> Vec<u32> { (own..own + 9).filter(|shift| *shift <= largest).collect() });
    let leaves: Vec<&[u32]> = leaves.iter().map(Vec::as_slice).collect();
    let mut shape = Shape::of(usize::from(levels), &leaves);
    shape.width = shape.width.min(64);
    shape.rubbish = 0x6000_0000_0066_6001;
    suite(
        format,
        &shape,
        0xa3d0_0000 + u64::from(levels) * 256 + u64::from(largest),
    );
}

#[test]
fn amd_v1_of_one_to_three_levels() {
    for (levels, largest) in [(1, 15), (2, 24), (3, 12), (3, 38)] {
        amd_v1(levels, largest);
    }
}

#[test]
fn amd_v1_of_four_to_six_levels() {
    for (levels, largest) in [(4, 38), (5, 33), (6, 38)] {
        amd_v1(levels, largest);
    }
}

fn risc_v(format: RiscV, leaves: &[&[u32]], second_stage: bool) {
    let depth = usize::from(format.root_level().get());
    let mut shape = Shape::of(depth, leaves);
    (shape.physical_bits, shape.write_reads) = (56, true);
    shape.sign_extended = !second_stage;
    shape.width += if second_stage { 2 } else { 0 };
    // A page at every level, of which a second has the address bits of a table.
    shape.rubbish = 0x0000_0666_0000_00d7;
    suite(format, &shape, 0x5c39_0000 + u64::from(shape.width) * 256);
}

#[test]
fn risc_v_first_stage() {
    risc_v(RiscV::first_stage(Levels::Three), &[&[12]], false);
    for levels in Levels::ALL {
        let format = RiscV::first_stage(levels).with_pages_up_to(PageSize::Size1G);
        let format = format.with_memory_type(MemoryType::NonCacheable);
        risc_v(format.with_napot(), &[&[12, 16], &[21], &[30]], false);
    }
}

#[test]
fn risc_v_second_stage() {
    for levels in Levels::ALL {
        let format = RiscV::second_stage(levels).with_napot();
        let format = format.with_pages_up_to(PageSize::Size2M);
        risc_v(format, &[&[12, 16], &[21]], true);
    }
}

fn arm_4k(format: Option<Arm<Granule4K>>, shape: Shape, stage_2: bool) {
    let format = format.expect("exists");
    let mut shape = shape;
    (shape.physical_bits, shape.write_reads) = (48, !stage_2);
    shape.rubbish = match stage_2 {
        true => 0x0000_0000_0000_07fd,
        false => 0x0000_0000_0000_0f41,
    };
    suite(format, &shape, 0xa640_0000 + u64::from(shape.width) * 256);
}

/// Stage 1 and 2 of a larger granule: `bits` address bits a level, and leaves by level.
fn arm_large<G: Granule>(width: u32, bits: u32, leaves: &[&[u32]]) {
    let granule = G::SIZE.shift();
    for (stage_2, format) in [(false, Arm::<G>::stage1(width)), (true, Arm::stage2(width))] {
        let format = format.expect("exists").with_pages_up_to(size(34));
        let format = format.with_contiguous_hint();
        let levels = usize::from(format.root_level().get());
        let mut shape = of_width(width, levels, leaves);
        for (index, level) in shape.levels.iter_mut().enumerate() {
            level.shift = granule + bits * index as u32;
        }
        (shape.physical_bits, shape.write_reads) = (48, !stage_2);
        shape.rubbish = 0x0000_0000_0666_0fff;
        suite(
            format,
            &shape,
            0xa641_0000 + u64::from(granule * 256 + width),
        );
    }
}

#[test]
fn arm_with_16k_granule() {
    // Pages of 16 KiB, 128 of them; blocks of 32 MiB, 32 of them.
    for width in [36, 48] {
        arm_large::<Granule16K>(width, 11, &[&[14, 21], &[25, 30]]);
    }
}

#[test]
fn arm_with_64k_granule() {
    // Pages of 64 KiB, 32 of them; blocks of 512 MiB, 32 of them.
    arm_large::<Granule64K>(48, 13, &[&[16, 21], &[29, 34]]);
}

/// `levels` levels of 9 bits for addresses of `width` bits.
fn of_width(width: u32, levels: usize, leaves: &[&[u32]]) -> Shape {
    let mut shape = Shape::of(levels, leaves);
    shape.width = width;
    shape
}

/// With 4 KiB granule: contiguous leaves of 64 KiB, 32 MiB and 16 GiB.
const CONTIGUOUS_4K: [&[u32]; 3] = [&[12, 16], &[21, 25], &[30, 34]];

#[test]
fn arm_stage_1_with_4k_granule() {
    let largest = |format: Arm<Granule4K>, shift| format.with_pages_up_to(size(shift));
    let plain = Arm::stage1(48).map(|format| largest(format, 30));
    arm_4k(plain, Shape::of(4, &[&[12], &[21], &[30]]), false);
    for (width, levels) in [(48, 4), (39, 3)] {
        let format = Arm::stage1(width).map(|format| largest(format, 34).with_contiguous_hint());
        arm_4k(format, of_width(width, levels, &CONTIGUOUS_4K), false);
    }
    // The root has 8 entries: too few for a contiguous leaf of 16.
    let format = Arm::stage1(33).map(|format| largest(format, 34).with_contiguous_hint());
    arm_4k(
        format,
        of_width(33, 3, &[&[12, 16], &[21, 25], &[30]]),
        false,
    );
}

#[test]
fn arm_stage_2_with_4k_granule() {
    // 40 bits: two tables of level 3 are concatenated. 43 bits: sixteen.
    for (width, levels) in [(40, 3), (43, 3), (48, 4)] {
        let format = Arm::stage2(width).map(|format| format.with_contiguous_hint());
        let format = format.map(|format| format.with_pages_up_to(size(34)));
        arm_4k(format, of_width(width, levels, &CONTIGUOUS_4K), true);
    }
}

#[test]
fn flat() {
    // The smallest flat table (64 KiB) and one of 1 MiB.
    for bits in [25, 29] {
        let format = CalgaryTce::new(bits).expect("exists");
        let mut shape = Shape::of(1, &[&[12]]);
        (shape.width, shape.physical_bits) = (bits, 48);
        suite(format, &shape, 0xca19_0000 + u64::from(bits));
    }
}

#[test]
fn a_flat_root_must_be_given_and_be_empty() {
    let mem = memory();
    let frames = frames(&mem);
    let new = Table::new(CalgaryTce::FULL, DOMAIN, Coherency::Coherent, &mem, &frames);
    assert_eq!(new.err(), Some(TableError::RootTooLarge));
    let arena = Arena::new(32 << 20).expect("arena");
    let whole = ringfence_types::PhysRange::new(PhysAddr::ZERO, 32 << 20).expect("not empty");
    let source = Frames::new(&arena, whole);
    let bytes = Table::root_bytes_of(&CalgaryTce::FULL);
    assert_eq!(bytes, 8 << 20);
    let root = source.alloc_contiguous(bytes / 4096).expect("room");
    let table = Table::at(
        CalgaryTce::FULL,
        DOMAIN,
        Coherency::NonCoherent,
        &arena,
        root,
    )
    .expect("zeroes");
    assert_eq!(table.table_bytes(), 8 << 20);
    let last = MapRequest {
        iova: page((1 << 20) - 1),
        pa: PhysAddr::new(0x5000),
        pages: 1,
        permissions: Permissions::READ,
    };
    assert_eq!(table.map(&arena, &source, last), Ok(()));
    let again = Table::at(CalgaryTce::FULL, DOMAIN, Coherency::Coherent, &arena, root);
    assert_eq!(again.err(), Some(TableError::RootNotEmpty));
    assert!(table.destroy(&arena, &source, &flushed()).is_ok());
    assert!(source.alloc_zeroed().is_ok());
    assert!(arena.word(PhysAddr::ZERO).is_ok());
}

#[test]
fn a_cache_used_with_another_table_walks() {
    let mem = memory();
    let frames = frames(&mem);
    let format = SecondStage::new(Levels::Four);
    let table = || Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
    let (a, b) = (table(), table());
    let mut cache = a.leaf_cache();
    let request = MapRequest {
        iova: page(5),
        pa: PhysAddr::new(0x9000),
        pages: 1,
        permissions: Permissions::READ,
    };
    for t in [&a, &b, &b, &a] {
        assert_eq!(cache.map(t, &mem, &frames, request), Ok(()));
        let other = if t.root() == a.root() { &b } else { &a };
        assert!(t.lookup(&mem, page(5)).is_some());
        assert!(other.lookup(&mem, page(5)).is_none());
        assert!(cache.unmap(t, &mem, common::range(5, 1)).is_ok());
    }
}

#[test]
fn ranges_that_cannot_be() {
    let mem = memory();
    let frames = frames(&mem);
    for levels in Levels::ALL {
        let format = SecondStage::new(levels);
        let table = Table::new(format, DOMAIN, Coherency::Coherent, &mem, &frames).expect("frames");
        let end = 1_u64 << levels.width();
        let good = MapRequest {
            iova: Iova::new(end - 4096),
            pa: PhysAddr::new((1 << 52) - 4096),
            pages: 1,
            permissions: Permissions::READ,
        };
        let cases = [
            (MapRequest { pages: 0, ..good }, MapError::Empty),
            (
                MapRequest {
                    iova: Iova::new(1),
                    ..good
                },
                MapError::Misaligned,
            ),
            (
                MapRequest {
                    pa: PhysAddr::new(2048),
                    ..good
                },
                MapError::Misaligned,
            ),
            (
                MapRequest {
                    pages: 2,
                    pa: PhysAddr::ZERO,
                    ..good
                },
                MapError::BeyondWidth { iova: good.iova },
            ),
            (
                MapRequest {
                    iova: Iova::new(end),
                    ..good
                },
                MapError::BeyondWidth {
                    iova: Iova::new(end),
                },
            ),
            (
                MapRequest {
                    iova: Iova::new(u64::MAX - 4095),
                    ..good
                },
                MapError::BeyondWidth {
                    iova: Iova::new(u64::MAX - 4095),
                },
            ),
            (
                MapRequest {
                    pages: u64::MAX,
                    ..good
                },
                MapError::PhysicalBeyondWidth { at: good.pa },
            ),
            (
                MapRequest {
                    iova: Iova::ZERO,
                    pages: 2,
                    ..good
                },
                MapError::PhysicalBeyondWidth { at: good.pa },
            ),
            (
                MapRequest {
                    pa: PhysAddr::new(1 << 52),
                    ..good
                },
                MapError::PhysicalBeyondWidth {
                    at: PhysAddr::new(1 << 52),
                },
            ),
        ];
        let mut cache = table.leaf_cache();
        for (request, error) in cases {
            assert_eq!(table.map(&mem, &frames, request), Err(error));
            assert_eq!(cache.map(&table, &mem, &frames, request), Err(error));
        }
        assert_eq!(frames.outstanding(), 1, "no table for a refused range");
        assert_eq!(table.map(&mem, &frames, good), Ok(()), "the very last page");
        let last = (end >> 12) - 1;
        let beyond = UnmapError::BeyondWidth { iova: page(last) };
        assert_eq!(
            table.unmap(&mem, common::range(last, 2)).err(),
            Some(beyond)
        );
        assert_eq!(
            cache.unmap(&table, &mem, common::range(last, 2)).err(),
            Some(beyond)
        );
        assert!(table.unmap(&mem, common::range(last, 1)).is_ok());
        drop(cache);
        assert!(table.destroy(&mem, &frames, &flushed()).is_ok());
        assert_eq!(frames.outstanding(), 0);
    }
}
