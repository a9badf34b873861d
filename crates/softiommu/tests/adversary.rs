//! Readers and unmap on real threads. Loom checks the orderings (`tests/loom.rs`). This test runs
//! them on a real CPU and covers what loom does not: unmap returns during a read section, and no
//! change returns while a guard is held.
//!
//! The tests count iterations and never measure time.

use std::hint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use ringfence_softiommu::{SoftIommu, SoftIommuLimits};
use ringfence_types::{Access, DomainId, Iova, IovaRange, Permissions, PhysAddr, RequesterId};

const DISK: RequesterId = RequesterId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);
const PAGE: u64 = 1 << 12;
const READERS: usize = 1;

fn page(number: u64) -> IovaRange {
    IovaRange::new(Iova::new(number * PAGE), PAGE).unwrap()
}

/// Memory with one word per page frame.
type Memory = Vec<AtomicU64>;

fn unit(frames: usize) -> SoftIommu<Memory> {
    let memory = (0..frames).map(|_| AtomicU64::new(0)).collect();
    let mut unit = SoftIommu::new(SoftIommuLimits::default(), memory);
    unit.add_endpoint(DISK).unwrap();
    unit.create_domain(DOMAIN).unwrap();
    unit.attach(DISK, DOMAIN).unwrap();
    unit
}

const FREE: u64 = 0;
const POISON: u64 = 1;

/// The page moves from frame to frame. As soon as unmap has returned, the writer poisons the old
/// frame. No reader may ever see poison, for read sections of any length.
#[test]
fn no_reader_sees_writes_after_unmap() {
    const FRAMES: usize = 64;
    const MOVES: usize = 500;
    let mut unit = unit(FRAMES);
    let done = Arc::new(AtomicBool::new(false));
    let ready = Arc::new(AtomicUsize::new(0));
    let readers: Vec<_> = (0..READERS)
        .map(|_| unit.reader(DISK).unwrap())
        .map(|mut reader| {
            let (done, ready) = (Arc::clone(&done), Arc::clone(&ready));
            thread::spawn(move || {
                let (mut seen, mut poisoned) = (0_u64, 0_u64);
                ready.fetch_add(1, Ordering::Relaxed);
                for burst_length in (1..=16).cycle() {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    let mut burst = reader.online();
                    for _ in 0..burst_length {
                        let pin = burst.guard();
                        for _ in 0..4 {
                            let Ok(pieces) = pin.translate(page(7), Access::Read) else {
                                continue;
                            };
                            let frame = pieces.first().start().get() / PAGE;
                            let word = pin.memory()[frame as usize].load(Ordering::Relaxed);
                            seen += 1;
                            poisoned += u64::from(word == POISON);
                        }
                    }
                }
                (seen, poisoned)
            })
        })
        .collect();
    while ready.load(Ordering::Relaxed) < READERS {
        hint::spin_loop();
    }
    let mut view = unit.reader(DISK).unwrap();
    for frame in (0..FRAMES).cycle().take(MOVES) {
        let mut domain = unit.domain(DOMAIN).unwrap();
        let to = PhysAddr::new(frame as u64 * PAGE);
        domain.map(page(7), to, Permissions::READ).unwrap();
        if frame % 3 == 0 {
            thread::yield_now();
        }
        assert_eq!(domain.unmap(page(7)), Ok(1));
        let mut burst = view.online();
        burst.guard().memory()[frame].store(POISON, Ordering::Relaxed);
        drop(burst);
        // Clean the frame before it is reused.
        let before = (frame + FRAMES - 1) % FRAMES;
        view.online().guard().memory()[before].store(FREE, Ordering::Relaxed);
    }
    done.store(true, Ordering::Relaxed);
    for reader in readers {
        let (seen, poisoned) = reader.join().unwrap();
        assert_eq!(poisoned, 0, "of {seen}");
    }
}

/// Unmap waits for the reader's next guard, not for the end of its read section.
#[test]
fn unmap_returns_during_a_burst() {
    const LOOKS: usize = 200_000_000;
    let mut unit = unit(1);
    let mut reader = unit.reader(DISK).unwrap();
    let online = Arc::new(AtomicBool::new(false));
    let returned = Arc::new(AtomicBool::new(false));
    let device = {
        let (online, returned) = (Arc::clone(&online), Arc::clone(&returned));
        thread::spawn(move || {
            let mut burst = reader.online();
            (0..LOOKS).any(|look| {
                let _ = burst.guard().translate(page(0), Access::Read);
                online.store(true, Ordering::Release);
                if look % 1024 == 0 {
                    thread::yield_now();
                }
                returned.load(Ordering::Acquire)
            })
        })
    };
    while !online.load(Ordering::Acquire) {
        hint::spin_loop();
    }
    let mut domain = unit.domain(DOMAIN).unwrap();
    domain
        .map(page(0), PhysAddr::ZERO, Permissions::READ)
        .unwrap();
    domain.unmap(page(0)).unwrap();
    returned.store(true, Ordering::Release);
    assert!(device.join().unwrap(), "unmap waited for the end");
}

/// No change (unmap, detach, bypass, new memory) returns while a guard is held.
#[test]
fn nothing_returns_while_a_pin_is_held() {
    type Change = fn(&mut SoftIommu<Memory>);
    let changes: [(&str, Change); 4] = [
        ("unmap", |unit| {
            unit.domain(DOMAIN).unwrap().unmap(page(0)).unwrap();
        }),
        ("detach", |unit| unit.detach(DISK).unwrap()),
        ("bypass", |unit| unit.bypass(DISK).unwrap()),
        ("memory", |unit| unit.set_memory(Memory::new()).unwrap()),
    ];
    for (name, change) in changes {
        let mut unit = unit(1);
        let mut domain = unit.domain(DOMAIN).unwrap();
        domain
            .map(page(0), PhysAddr::ZERO, Permissions::READ)
            .unwrap();
        let mut reader = unit.reader(DISK).unwrap();
        let mut burst = reader.online();
        let pin = burst.guard();
        let returned = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&returned);
        let changer = thread::spawn(move || {
            change(&mut unit);
            theirs.store(true, Ordering::Release);
            unit
        });
        // At some point the translation may disappear; if the view changes, it stays until the next
        // checkpoint. In both cases the guard delays the change.
        for _ in 0..300 {
            thread::yield_now();
            let _ = pin.translate(page(0), Access::Read);
            assert!(!returned.load(Ordering::Acquire), "{name}");
        }
        drop(burst);
        let _unit = changer.join().unwrap();
        assert!(returned.load(Ordering::Acquire), "{name}");
    }
}
