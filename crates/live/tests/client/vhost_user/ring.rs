//! A correct front-end: misses and updates, and the state that the device leaves when the ring
//! stops.

use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_types::{Iova, Permissions};

use super::front_end::*;

#[test]
fn every_address_misses_once_per_invalidation() {
    let mut front_end = FrontEnd::new("asked", &[]);
    front_end.start(0);
    front_end.offer(3, 4096);
    front_end.serve();
    assert_eq!(front_end.used(), 1);
    assert_eq!(front_end.peek(STATUS, 0, 1), [0]);
    assert_eq!(front_end.peek(DATA, 0, 4096), content(3, 4096));
    let mut pages: Vec<u64> = front_end.asked.iter().map(|(page, _)| *page).collect();
    // The device requests the used ring twice: to read its index at the start, and to write.
    assert_eq!(
        pages.iter().filter(|page| **page == USED.0 / PAGE).count(),
        2
    );
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), 6, "{pages:x?}");

    // All translations are cached now.
    front_end.asked.clear();
    front_end.offer(5, 4096);
    front_end.serve();
    assert_eq!((front_end.used(), front_end.asked.len()), (2, 0));
    assert_eq!(front_end.peek(DATA, 0, 4096), content(5, 4096));

    // The device requests only the invalidated translation again; the page has moved.
    let elsewhere = (DATA.0, 0x2_0000);
    front_end.invalidate(DATA);
    front_end.poke(DATA, 0, &[0xaa; 4096]);
    front_end.grant(elsewhere, Permissions::READ_WRITE);
    front_end.offer(7, 4096);
    front_end.serve();
    // Duplicate misses are possible: if replies to older misses were unread at the invalidation, a
    // late translation is discarded.
    front_end.asked.dedup();
    assert_eq!(front_end.asked, [(DATA.0 / PAGE, Permissions::WRITE)]);
    assert_eq!(front_end.peek(elsewhere, 0, 4096), content(7, 4096));
    assert_eq!(
        front_end.peek(DATA, 0, 4096),
        [0xaa; 4096],
        "nothing is left of it"
    );

    // If the page is unmapped, the request fails, and the next one succeeds.
    front_end.invalidate(DATA);
    front_end.offer(7, 4096);
    front_end.serve();
    assert_eq!(front_end.peek(STATUS, 0, 1), [1]);
    front_end.grant(DATA, Permissions::READ_WRITE);
    front_end.offer(9, 4096);
    front_end.serve();
    assert_eq!(front_end.peek(STATUS, 0, 1), [0]);
    assert_eq!(front_end.peek(DATA, 0, 4096), content(9, 4096));
    assert_eq!(front_end.counters.faults.get(), 1);
    assert!(front_end.log().iter().all(|line| line == "Connected"));
}

#[test]
fn injected_accesses_are_refused() {
    let stray = InjectedDma::Stray(Iova::new(0xdead_0000));
    let mut front_end = FrontEnd::new("injected", &[stray, InjectedDma::WriteReadOnly]);
    front_end.start(0);
    for n in 1..=3 {
        front_end.offer(n, 4096);
        front_end.serve();
        assert_eq!(front_end.peek(STATUS, 0, 1), [0]);
        assert_eq!(front_end.peek(DATA, 0, 4096), content(n, 4096));
    }
    let log = front_end.log();
    assert!(
        log.contains(&"injected write (stray) at 0xdead0000: stopped".to_owned()),
        "{log:?}"
    );
    // The header was read before, and the front-end's update granted write access, too.
    assert!(
        log.contains(&"injected write (write-read-only) at 0x20000: stopped".to_owned()),
        "{log:?}"
    );
    assert_eq!(front_end.counters.injected_permitted.get(), 0);
    assert_eq!(front_end.counters.faults.get(), 2);
}

/// The front-end stops the ring while the device waits for a translation. Neither waits for the
/// other, and the request is served after the restart.
#[test]
fn a_ring_stops_while_it_waits_for_a_translation() {
    for after in 0..7 {
        let mut front_end = FrontEnd::new(&format!("stop{after}"), &[]);
        front_end.start(0);
        front_end.offer(3, 4096);
        for _ in 0..after {
            assert!(front_end.wait());
            let miss = front_end.next_miss();
            front_end.answer(miss);
        }
        assert!(front_end.wait(), "{after}");
        let unanswered = front_end.next_miss();
        let base = front_end.ask(GET_VRING_BASE, &halves(&[0, 0]));
        assert_eq!(base, halves(&[0, 0]), "the request is left, {after}");
        assert_eq!(front_end.used(), 0);
        // The late answer is discarded: a stopped device receives no invalidations.
        front_end.answer(unanswered);
        front_end.asked.clear();
        front_end.set_ring(0);
        front_end.serve();
        assert_eq!(
            (front_end.used(), front_end.peek(STATUS, 0, 1)),
            (1, vec![0]),
            "{after}"
        );
        assert_eq!(front_end.peek(DATA, 0, 4096), content(3, 4096));
        let asked: Vec<u64> = front_end.asked.iter().map(|(page, _)| *page).collect();
        assert!(asked.contains(&(DESCRIPTORS.0 / PAGE)), "{asked:x?}");
        let base = front_end.ask(GET_VRING_BASE, &halves(&[0, 0]));
        assert_eq!(base, halves(&[0, 1]));
    }
}

#[test]
fn start_requirements() {
    let mut front_end = FrontEnd::new("start", &[]);
    let ram = front_end.ram.try_clone().unwrap();
    assert!(front_end.share(&ram));
    // Without the features of an IOMMU.
    assert!(front_end.done(SET_FEATURES, &longs(&[1 << 32]), &[]));
    front_end.set_ring(0);
    assert!(!front_end.done(SET_VRING_ENABLE, &halves(&[0, 1]), &[]));
    assert!(front_end.done(SET_FEATURES, &longs(&[FEATURES]), &[]));
    assert!(front_end.done(SET_VRING_ENABLE, &halves(&[0, 1]), &[]));
    // While the ring runs.
    assert!(!front_end.done(SET_VRING_NUM, &halves(&[0, 4]), &[]));
    assert!(!front_end.done(SET_FEATURES, &longs(&[1 << 32]), &[]));
    assert!(front_end.done(SET_FEATURES, &longs(&[FEATURES]), &[]));
    let base = front_end.ask(GET_VRING_BASE, &halves(&[0, 0]));
    assert_eq!(base, halves(&[0, 0]));
    assert!(front_end.done(SET_VRING_NUM, &halves(&[0, 4]), &[]));
    let log = front_end.log();
    let refused = [
        "refused: features that an IOMMU requires are missing: features 0x100000000, \
        protocol 0x228",
        "refused: the ring is running",
        "refused: the ring is running",
    ];
    assert_eq!(
        log.get(1..),
        Some(&refused.map(str::to_owned)[..]),
        "{log:?}"
    );
}
