//! Frame sources and the fakes.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use ringfence_memory::fake::{FaultyFrames, NonCoherent, SparseMemory};
use ringfence_memory::{Arena, Frames};
use ringfence_types::{FrameSource, OutOfFrames, PhysAddr, PhysMemory, PhysRange};

fn range(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).expect("not empty")
}

#[test]
fn frames_are_distinct_bounded_and_zero_when_used_again() {
    let arena = Arena::new(64 << 10).expect("arena");
    // Neither end is aligned: 7 whole frames from 0x2000.
    let frames = Frames::new(&arena, range(0x1800, 0x8000));
    let mut got = Vec::new();
    while let Ok(frame) = frames.alloc_zeroed() {
        for word in arena.table(frame).expect("inside") {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        got.push(frame);
    }
    assert_eq!(got.len(), 7);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 7);
    assert!(got.iter().all(|f| (0x2000..=0x8000).contains(&f.get())));
    assert_eq!((frames.in_use(), frames.peak()), (7, 7));
    frames.free(got[3]);
    assert_eq!(frames.in_use(), 6);
    let again = frames.alloc_zeroed().expect("one is free");
    assert_eq!(again, got[3]);
    let words = arena.table(again).expect("inside");
    assert!(words.iter().all(|w| w.load(Ordering::Relaxed) == 0));
    assert_eq!(frames.alloc_zeroed(), Err(OutOfFrames));
    assert_eq!((frames.in_use(), frames.peak()), (7, 7));
}

#[test]
fn contiguous_frames_are_aligned_and_lose_none() {
    let arena = Arena::new(256 << 10).expect("arena");
    let frames = Frames::new(&arena, range(0x1000, 0x3f000));
    let root = frames.alloc_contiguous(8).expect("room");
    assert_eq!(root.get(), 0x8000);
    let rest: HashSet<_> = std::iter::from_fn(|| frames.alloc_zeroed().ok()).collect();
    assert_eq!(
        rest.len(),
        0x3f - 8,
        "what the alignment skipped is handed out"
    );
    assert!(rest.iter().all(|f| !(0x8000..0x10000).contains(&f.get())));
    assert_eq!(frames.alloc_contiguous(1), Err(OutOfFrames));
    assert_eq!(frames.alloc_contiguous(u64::MAX), Err(OutOfFrames));
}

/// The region ends beyond the memory: a failed allocation changes nothing.
#[test]
fn a_failed_contiguous_allocation_hands_no_frame_out_twice() {
    let arena = Arena::new(64 << 10).expect("arena");
    let frames = Frames::new(&arena, range(0x1000, 0x3f000));
    assert_eq!(frames.alloc_contiguous(16), Err(OutOfFrames));
    let got: Vec<_> = std::iter::from_fn(|| frames.alloc_zeroed().ok()).collect();
    assert_eq!(got.len(), 15);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 15);
}

#[test]
fn threads_get_distinct_frames() {
    let arena = Arena::new(4 << 20).expect("arena");
    let frames = Frames::new(&arena, range(0, 4 << 20));
    let got: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..200)
                        .filter_map(|_| frames.alloc_zeroed().ok())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().expect("no panic"))
            .collect()
    });
    assert_eq!(got.len(), 800);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 800);
}

#[test]
fn a_device_sees_a_line_only_after_write_back_and_drain() {
    let mem = NonCoherent::new(
        Arena::new(8192).expect("arena"),
        Arena::new(8192).expect("arena"),
    );
    let at = PhysAddr::new(64);
    let seen = || {
        mem.device_view()
            .word(at)
            .expect("inside")
            .load(Ordering::Relaxed)
    };
    let store = |value| {
        mem.word(at)
            .expect("inside")
            .store(value, Ordering::Relaxed)
    };
    store(1);
    mem.drain();
    assert_eq!(seen(), 0, "a drain alone publishes nothing");
    mem.write_back(at, 8);
    assert_eq!(seen(), 0, "a write-back alone publishes nothing");
    store(2);
    mem.drain();
    assert_eq!(
        seen(),
        1,
        "what was stored after the write-back stays in the cache"
    );
    mem.write_back(PhysAddr::new(127), 2);
    mem.drain();
    assert_eq!(seen(), 2, "the line is written back whole");
    store(3);
    mem.evict(at);
    assert_eq!(seen(), 3);
    assert_eq!((mem.write_backs(), mem.drains()), (3, 3));
}

#[test]
fn faulty_frames_fail_from_the_nth_on_and_count() {
    let arena = Arena::new(64 << 10).expect("arena");
    let frames = FaultyFrames::new(Frames::new(&arena, range(0, 64 << 10)));
    frames.fail_after(2);
    let a = frames.alloc_zeroed().expect("first");
    let b = frames.alloc_zeroed().expect("second");
    assert_eq!(frames.alloc_zeroed(), Err(OutOfFrames));
    assert_eq!(frames.alloc_zeroed(), Err(OutOfFrames));
    frames.recover();
    assert_eq!(frames.outstanding(), 2);
    frames.free(a);
    frames.free(a);
    assert_eq!((frames.outstanding(), frames.wrong_frees()), (1, 1));
    frames.free(b);
    assert_eq!((frames.outstanding(), frames.requests()), (0, 4));
}

#[test]
fn pages_exist_where_they_were_set_and_nowhere_else() {
    let mut pages = SparseMemory::new();
    pages.set(PhysAddr::new(0x5008), 7);
    pages.add(PhysAddr::new(u64::MAX));
    assert_eq!(
        pages
            .word(PhysAddr::new(0x5008))
            .expect("set")
            .load(Ordering::Relaxed),
        7
    );
    assert_eq!(
        pages.words(PhysAddr::new(0x5000), 512).map(<[_]>::len),
        Ok(512)
    );
    assert!(pages.words(PhysAddr::new(0x5008), 512).is_err());
    assert!(pages.word(PhysAddr::new(0x4ff8)).is_err());
    assert!(pages.word(PhysAddr::new(u64::MAX - 7)).is_ok());
    assert!(pages.table(PhysAddr::new(0x5008)).is_err());
}
