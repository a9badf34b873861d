//! Cost of a translation, a guard and a read section for a reader.

use std::hint::black_box;
use std::sync::RwLock;

use ringfence_types::Access;
use vm_memory::iommu::Iotlb;
use vm_memory::{GuestAddress, Permissions as Wanted};

use crate::ACCESSES;
use crate::interleaved::{run, side};
use crate::unit::{DISK, addresses, eight, iotlb, unit};

pub(crate) fn hits(live: u64, samples: usize) {
    let unit = unit(live);
    let mut reader = unit.reader(DISK).expect("room");
    let mut other = unit.reader(DISK).expect("room");
    let mut third = unit.reader(DISK).expect("room");
    let (tlb, locked) = (iotlb(live), RwLock::new(iotlb(live)));
    let addresses = addresses(live);
    let mut burst = reader.online();
    let pin = burst.guard();
    let lookup = |tlb: &Iotlb, at| {
        let found = Iotlb::lookup(tlb, GuestAddress(at), 8, Wanted::Read).map(|mut it| it.next());
        black_box(found.ok().flatten().map(|range| range.base.0));
    };
    run(
        &format!("translations of 8 bytes, {live} pages live"),
        samples,
        &mut [
            side("vm-memory Iotlb", || {
                for at in &addresses {
                    lookup(&tlb, *at);
                }
            }),
            side("vm-memory RwLock<Iotlb>", || {
                for at in &addresses {
                    lookup(&locked.read().expect("whole"), *at);
                }
            }),
            side("under one pin", || {
                for at in &addresses {
                    let found = pin.translate(eight(*at), Access::Read);
                    black_box(found.map(|pieces| pieces.first().start().get()).ok());
                }
            }),
            side("under one pin, each needs the one before", || {
                let mut n = 0;
                for _ in 0..ACCESSES {
                    let at = addresses[n];
                    let to = pin
                        .translate(eight(at), Access::Read)
                        .map_or(0, |pieces| pieces.first().start().get());
                    n = (to >> 3) as usize % ACCESSES;
                }
                black_box(n);
            }),
            side("the same chain of addresses without translation", || {
                let mut n = 0;
                for _ in 0..ACCESSES {
                    n = (addresses[n] >> 3) as usize % ACCESSES;
                }
                black_box(n);
            }),
            side("a pin for each", || {
                let mut burst = other.online();
                for at in &addresses {
                    let found = burst.guard().translate(eight(*at), Access::Read);
                    black_box(found.map(|pieces| pieces.first().start().get()).ok());
                }
            }),
            side("a burst for each, nothing translated", || {
                for _ in 0..ACCESSES {
                    black_box(third.online().guard().device());
                }
            }),
        ],
    );
}
