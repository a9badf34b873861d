//! Threads that share an IOTLB or an allocator.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::thread;

use ringfence::*;
use support::PAGE;

const USER: u64 = 0x7000_0000_0000;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;

fn message(kind: u8, iova: u64, bytes: u64, user: u64) -> [u8; 32] {
    let mut message = [0; 32];
    for (at, word) in [iova, bytes, user].into_iter().enumerate() {
        message[at * 8..][..8].copy_from_slice(&word.to_ne_bytes());
    }
    message[24] = 3;
    message[25] = kind;
    message
}

fn fault_at(iova: u64) -> Fault {
    Fault {
        iova,
        access: RINGFENCE_READ,
        kind: FaultKind::NotPresent as u32,
    }
}

/// Sends misses from a device thread until `done`, and returns their number.
fn misses(iotlb: *const Iotlb, first: u64, done: &AtomicBool, begun: &AtomicUsize) -> u64 {
    let mut sent = 0;
    while !done.load(Ordering::Relaxed) {
        let mut miss = IotlbMiss {
            token: 0,
            action: 9,
            reserved: 0,
            message: [0; 32],
        };
        let fault = fault_at(first + sent % 16 * PAGE);
        let status = c!(ringfence_iotlb_miss(iotlb, &fault, &mut miss));
        assert_eq!(status, Status::Ok);
        let mut result = 9;
        let status = c!(ringfence_iotlb_replied(
            iotlb,
            miss.token,
            false,
            &mut result
        ));
        assert_eq!((status, result), (Status::Ok, MissResult::Refused as u32));
        sent += 1;
        if sent == 1 {
            begun.fetch_add(1, Ordering::Relaxed);
        }
    }
    sent
}

#[test]
fn misses_of_device_threads_delay_invalidations_and_lose_none() {
    const ROUNDS: u64 = 2000;
    let mut memory = vec![0_u64; 2 * PAGE as usize / 8];
    let host = memory.as_mut_ptr();
    let host = host.wrapping_byte_add(host.align_offset(PAGE as usize) * 8);
    let region = IotlbRegion {
        user: USER,
        bytes: PAGE,
        host: host.cast(),
    };
    let (mut iotlb, mut reader) = (ptr::null_mut(), ptr::null_mut());
    let status = c!(ringfence_iotlb_create(&region, 1, &mut iotlb));
    assert_eq!(status, Status::Ok);
    let status = c!(ringfence_iotlb_reader_create(iotlb, &mut reader));
    assert_eq!(status, Status::Ok);
    let receive = |kind| {
        let message = message(kind, 0x8000, PAGE, USER);
        c!(ringfence_iotlb_receive(iotlb, message.as_ptr()))
    };
    let none = ptr::null_mut();
    let check = || {
        c!(ringfence_iotlb_check(
            reader,
            0x8000,
            8,
            RINGFENCE_READ,
            none
        ))
    };
    assert_eq!((receive(UPDATE), check()), (Status::Ok, Status::Ok));
    let (done, shared) = (AtomicBool::new(false), AtomicPtr::new(iotlb));
    let begun = AtomicUsize::new(0);
    thread::scope(|scope| {
        let device = |first| misses(shared.load(Ordering::Relaxed), first, &done, &begun);
        let devices = [0x100_0000, 0x200_0000].map(|first| scope.spawn(move || device(first)));
        // Ends the device threads if an assertion below fails.
        let end = End(&done);
        // A busy host starts the threads late.
        let ended = || devices.iter().any(|device| device.is_finished());
        while begun.load(Ordering::Relaxed) < devices.len() && !ended() {
            thread::yield_now();
        }
        for round in 0..ROUNDS {
            assert_eq!(receive(INVALIDATE), Status::Ok, "round {round}");
            assert_eq!(check(), Status::Fault, "round {round}");
            // While a miss from before the invalidation is pending, the update installs nothing.
            assert_eq!(receive(UPDATE), Status::Ok, "round {round}");
        }
        drop(end);
        for device in devices {
            assert!(device.join().unwrap() > 0);
        }
    });
    assert_eq!(c!(ringfence_iotlb_reader_destroy(&mut reader)), Status::Ok);
    assert_eq!(c!(ringfence_iotlb_destroy(&mut iotlb)), Status::Ok);
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Allocates and frees through a handle of its own. No page belongs to two ranges.
fn allocate(space: *const IovaSpace, seed: u64, used: &[AtomicBool]) {
    const LIVE: usize = 32;
    let mut cpu = ptr::null_mut();
    assert_eq!(c!(ringfence_iova_cpu_create(space, &mut cpu)), Status::Ok);
    let mut live: Vec<(u64, u64)> = Vec::new();
    let mut random = seed;
    let last = used.len() as u64 - 1;
    let mark = |(first, pages): (u64, u64), value: bool| {
        for page in &used[first as usize..][..pages as usize] {
            assert_ne!(page.swap(value, Ordering::Relaxed), value);
        }
    };
    let free = |cpu, range: (u64, u64)| {
        mark(range, false);
        let status = c!(ringfence_iova_free(cpu, range.0, range.1));
        assert_eq!(status, Status::Ok);
    };
    for _ in 0..3000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let (pages, at) = (1 + (random >> 60), (random >> 33) as usize);
        if live.len() == LIVE {
            free(cpu, live.swap_remove(at % LIVE));
        }
        let mut first = 0;
        match c!(ringfence_iova_alloc(cpu, pages, 0, last, &mut first)) {
            Status::Ok => {
                mark((first, pages), true);
                live.push((first, pages));
            }
            Status::NeedsFlush => assert_eq!(c!(ringfence_iova_flushed(cpu)), Status::Ok),
            status => panic!("{status:?}"),
        }
    }
    for range in live {
        free(cpu, range);
    }
    assert_eq!(c!(ringfence_iova_cpu_destroy(&mut cpu)), Status::Ok);
}

#[test]
fn threads_allocate_disjoint_ranges_through_handles_of_their_own() {
    for kind in 0..6 {
        let used: Vec<AtomicBool> = (0..1 << 17).map(|_| AtomicBool::new(false)).collect();
        let mut space = ptr::null_mut();
        let last = used.len() as u64 - 1;
        let status = c!(ringfence_iova_create(kind, 1, last, 0, &mut space));
        assert_eq!(status, Status::Ok);
        let shared = AtomicPtr::new(space);
        thread::scope(|scope| {
            for seed in [1, 2] {
                let (shared, used) = (&shared, &used);
                scope.spawn(move || allocate(shared.load(Ordering::Relaxed), seed, used));
            }
        });
        let mut stats = IovaStats {
            size: size_of::<IovaStats>(),
            footprint: 0,
            ranges: 9,
            pages: 9,
        };
        assert_eq!(c!(ringfence_iova_stats(space, &mut stats)), Status::Ok);
        assert_eq!((stats.ranges, stats.pages), (0, 0), "kind {kind}");
        assert_eq!(c!(ringfence_iova_destroy(&mut space)), Status::Ok);
    }
}
