//! Reuse of freed pages by bitmaps (docs/decisions/0003-bitmap-reuse.md).

#[path = "support/common.rs"]
mod common;

use std::cell::RefCell;

use common::{DOMAIN, Words, domain_flushed, pages};
use ringfence_iova::{AllocError, AllocRequest, Bitmap, FreeProof, IovaAllocator, TableBitmap};
use ringfence_papers::BitmapAsPublished;
use ringfence_types::{Pfn, PfnRange, PhysAddr, PhysMemory as _, Unmapped};

const ONE: AllocRequest = AllocRequest::new(1, Pfn::MAX);

fn space() -> PfnRange {
    pages(16, 47)
}

fn unmapped(range: PfnRange) -> Unmapped {
    Unmapped::attest_cleared(DOMAIN, range)
}

fn take<A: IovaAllocator>(allocator: &A, cpu: &mut A::PerCpu) -> Result<u64, AllocError> {
    let found = allocator.alloc(cpu, &ONE)?;
    Ok(found.range.lo().get())
}

/// Runs two laps, and frees a page of the first lap in the second, ahead of the search position.
/// Returns the pages allocated after that, until the next flush request.
fn freed_ahead<A: IovaAllocator<FreeProof = Unmapped>>(allocator: &A) -> Vec<u64> {
    let mut cpu = allocator.per_cpu();
    let long_lived = 40;
    for page in 16..=47 {
        assert_eq!(take(allocator, &mut cpu), Ok(page));
        if page != long_lived {
            assert!(allocator.free(&mut cpu, unmapped(pages(page, page))));
        }
    }
    assert_eq!(
        take(allocator, &mut cpu),
        Err(AllocError::NeedsFlush),
        "the wrap"
    );
    allocator.flushed(&mut cpu, domain_flushed());
    assert_eq!(take(allocator, &mut cpu), Ok(16));
    // The entry of page 40 is now cleared, but may still be cached.
    assert!(allocator.free(&mut cpu, unmapped(pages(long_lived, long_lived))));
    let mut handed_out = Vec::new();
    while let Ok(page) = take(allocator, &mut cpu) {
        handed_out.push(page);
    }
    allocator.flushed(&mut cpu, domain_flushed());
    assert_eq!(
        take(allocator, &mut cpu),
        Ok(long_lived),
        "released by the flush"
    );
    handed_out
}

#[test]
fn a_page_freed_ahead_of_the_pointer_waits_for_the_flush() {
    let waits: Vec<u64> = (17..=47).filter(|page| *page != 40).collect();
    assert_eq!(
        freed_ahead(&Bitmap::new(space(), RefCell::new).unwrap()),
        waits
    );
    let memory = Words::holding(space());
    let table = TableBitmap::new(&memory, PhysAddr::ZERO, space(), RefCell::new).unwrap();
    assert_eq!(freed_ahead(&table), waits);
}

/// Runs a lap, and frees a page of it in the next one, ahead of the position. Returns the pages
/// allocated until the next flush request.
fn second_lap<A: IovaAllocator<FreeProof = Unmapped>>(allocator: &A) -> Vec<u64> {
    let mut cpu = allocator.per_cpu();
    for page in 16..=47 {
        assert_eq!(take(allocator, &mut cpu), Ok(page));
        if page != 40 {
            assert!(allocator.free(&mut cpu, unmapped(pages(page, page))));
        }
    }
    assert_eq!(take(allocator, &mut cpu), Err(AllocError::NeedsFlush));
    allocator.flushed(&mut cpu, domain_flushed());
    assert!(allocator.free(&mut cpu, unmapped(pages(40, 40))));
    std::iter::from_fn(|| take(allocator, &mut cpu).ok()).collect()
}

#[test]
fn bitmap_as_published_reuses_before_the_flush() {
    let reused = second_lap(&BitmapAsPublished::new(space(), RefCell::new).unwrap());
    assert!(
        reused.contains(&40),
        "the defect of the paper, which the oracle shows"
    );
}

/// A flush proves nothing about pages that were freed after its request, whichever CPU reports it.
fn flushes_overtake<A: IovaAllocator<FreeProof = Unmapped>>(allocator: &A) {
    let (mut a, mut b) = (allocator.per_cpu(), allocator.per_cpu());
    let free =
        |cpu: &mut A::PerCpu, page| assert!(allocator.free(cpu, unmapped(pages(page, page))));
    for page in 16..=47 {
        assert_eq!(take(allocator, &mut a), Ok(page));
    }
    free(&mut a, 20);
    assert_eq!(take(allocator, &mut a), Err(AllocError::NeedsFlush));
    // A has submitted its invalidation; then B clears and frees another page.
    free(&mut b, 30);
    allocator.flushed(&mut a, domain_flushed());
    assert_eq!(take(allocator, &mut a), Ok(20));
    assert_eq!(
        take(allocator, &mut a),
        Err(AllocError::NeedsFlush),
        "page 30 is not flushed yet"
    );
    free(&mut a, 31);
    // B, which received no request, reports a flush that it began earlier: it releases nothing.
    allocator.flushed(&mut b, domain_flushed());
    assert_eq!(take(allocator, &mut b), Err(AllocError::NeedsFlush));
    // B's request came after both frees, or joined A's flush. Either way page 30 is free now, and
    // at most page 31 as well.
    allocator.flushed(&mut b, domain_flushed());
    let page = take(allocator, &mut b);
    assert!(page == Ok(30) || page == Ok(31), "{page:?}");
}

#[test]
fn flush_releases_only_ranges_freed_before_its_request() {
    flushes_overtake(&Bitmap::new(space(), RefCell::new).unwrap());
    let memory = Words::holding(space());
    flushes_overtake(&TableBitmap::new(&memory, PhysAddr::ZERO, space(), RefCell::new).unwrap());
}

/// A's proof, reported late, must not release pages that were freed for B's next flush.
fn late_proof<A: IovaAllocator<FreeProof = Unmapped>>(allocator: &A) {
    let (mut a, mut b) = (allocator.per_cpu(), allocator.per_cpu());
    for page in 16..=47 {
        assert_eq!(take(allocator, &mut a), Ok(page));
    }
    assert!(allocator.free(&mut a, unmapped(pages(20, 20))));
    assert_eq!(take(allocator, &mut a), Err(AllocError::NeedsFlush));
    let late = domain_flushed();
    assert_eq!(take(allocator, &mut b), Err(AllocError::NeedsFlush));
    allocator.flushed(&mut b, domain_flushed());
    assert_eq!(take(allocator, &mut b), Ok(20));
    assert!(allocator.free(&mut b, unmapped(pages(21, 21))));
    assert_eq!(take(allocator, &mut b), Err(AllocError::NeedsFlush));
    allocator.flushed(&mut a, late);
    assert_eq!(
        take(allocator, &mut b),
        Err(AllocError::NeedsFlush),
        "21 reused on an old proof"
    );
}

#[test]
fn a_late_proof_releases_nothing() {
    late_proof(&Bitmap::new(space(), RefCell::new).unwrap());
    let memory = Words::holding(space());
    late_proof(&TableBitmap::new(&memory, PhysAddr::ZERO, space(), RefCell::new).unwrap());
}

#[test]
fn a_bit_for_each_page_of_4_gib_takes_128_kib() {
    const KIB: usize = 1024;
    let space = pages(0, (1 << 20) - 1);
    let as_published = BitmapAsPublished::new(space, RefCell::new).unwrap();
    assert_eq!(as_published.footprint(), 128 * KIB);
    // The fixed bitmap has two more: pages freed since the flush request, and before it.
    let fixed = Bitmap::new(space, RefCell::new).unwrap();
    assert_eq!(fixed.footprint(), 3 * 128 * KIB);
}

#[test]
fn one_flush_a_lap() {
    let allocator = Bitmap::new(pages(0, 4095), RefCell::new).unwrap();
    let mut cpu = allocator.per_cpu();
    let (mut flushes, mut live) = (0, std::collections::VecDeque::new());
    for _ in 0..10 * 4096 {
        let found = loop {
            match allocator.alloc(&mut cpu, &ONE) {
                Ok(found) => break found,
                Err(error) => {
                    assert_eq!(error, AllocError::NeedsFlush);
                    allocator.flushed(&mut cpu, domain_flushed());
                    flushes += 1;
                }
            }
        };
        live.push_back(found.range);
        if live.len() > 100 {
            assert!(allocator.free(&mut cpu, unmapped(live.pop_front().unwrap())));
        }
    }
    assert!((9..=11).contains(&flushes), "{flushes}");
}

#[test]
fn table_distinguishes_absent_and_free() {
    let memory = Words::holding(space());
    let allocator = TableBitmap::new(&memory, PhysAddr::ZERO, space(), RefCell::new).unwrap();
    let mut cpu = allocator.per_cpu();
    let entry = |page: u64| memory.word(PhysAddr::new(page * 8)).unwrap();
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    // In the format of Calgary's hardware: big-endian, permissions in the two low bits.
    let absent = |page| u64::from_be(entry(page).load(relaxed)) & 3 == 0;
    assert!((16..=47).all(absent), "no free entry translates");
    // Allocated and not yet mapped: not present, and not allocated again.
    assert_eq!(take(&allocator, &mut cpu), Ok(16));
    assert!(absent(16));
    assert_eq!(take(&allocator, &mut cpu), Ok(17));
    entry(16).store(0xabc_d003_u64.to_be(), relaxed);
    let token = || unmapped(pages(16, 16));
    assert_eq!(token().range(), FreeProof::range(&token()));
    assert!(!allocator.free(&mut cpu, token()), "still mapped");
    entry(16).store(0, relaxed);
    assert!(allocator.free(&mut cpu, token()));
    assert!(absent(16));
    assert!(!allocator.free(&mut cpu, token()), "freed twice");
}

#[test]
fn a_table_outside_memory_is_an_error() {
    let memory = Words::holding(space());
    for (table, space) in [
        (8, space()),
        (0, pages(16, 48)),
        (0, pages(15, 47)),
        (u64::MAX - 7, space()),
    ] {
        assert!(TableBitmap::new(&memory, PhysAddr::new(table), space, RefCell::new).is_err());
    }
}

/// A device that reaches only low pages allocates them below the search position, without ending
/// the lap of the others.
fn narrow_beside_wide<A: IovaAllocator<FreeProof = Unmapped>>(allocator: &A) {
    let mut cpu = allocator.per_cpu();
    // Pages 16 to 23 stay free for a while: the first wide request is aligned to 32.
    let aligned = AllocRequest {
        align_order: 5,
        ..ONE
    };
    assert_eq!(
        allocator
            .alloc(&mut cpu, &aligned)
            .unwrap()
            .range
            .lo()
            .get(),
        32
    );
    let narrow = AllocRequest::new(1, Pfn::new(23));
    for (narrow_page, wide_page) in (16..=23).zip(33..) {
        assert_eq!(
            allocator.alloc(&mut cpu, &narrow).unwrap().range.lo().get(),
            narrow_page
        );
        assert_eq!(take(allocator, &mut cpu), Ok(wide_page));
    }
    assert!(matches!(
        allocator.alloc(&mut cpu, &narrow),
        Err(AllocError::Exhausted { .. })
    ));
}

#[test]
fn a_narrow_device_does_not_move_the_pointer() {
    narrow_beside_wide(&Bitmap::new(space(), RefCell::new).unwrap());
    narrow_beside_wide(&BitmapAsPublished::new(space(), RefCell::new).unwrap());
    let memory = Words::holding(space());
    narrow_beside_wide(&TableBitmap::new(&memory, PhysAddr::ZERO, space(), RefCell::new).unwrap());
}
