//! Cost of a guest memory read through a guard.

use std::hint::black_box;

use ringfence_types::Iova;
use vm_memory::{Bytes, GuestAddress};

use crate::interleaved::{run, side};
use crate::unit::{DISK, MEMORY, addresses, memory, unit};

pub(crate) fn reads(live: u64, samples: usize) {
    let unit = unit(live);
    let mut reader = unit.reader(DISK).expect("room");
    let plain = memory();
    let addresses = addresses(live);
    let physical: Vec<u64> = addresses.iter().map(|at| at % MEMORY).collect();
    let mut burst = reader.online();
    let pin = burst.guard();
    run(
        &format!("reads of 8 bytes, {live} pages live"),
        samples,
        &mut [
            side("GuestMemoryMmap::read_obj, unprotected", || {
                for at in &physical {
                    black_box(plain.read_obj::<u64>(GuestAddress(*at)).ok());
                }
            }),
            side("Pin::read", || {
                for at in &addresses {
                    black_box(pin.read::<u64>(Iova::new(*at)).ok());
                }
            }),
            side("read_obj of GuestMemory for Pin", || {
                for at in &addresses {
                    black_box(pin.read_obj::<u64>(GuestAddress(*at)).ok());
                }
            }),
        ],
    );
}
