//! Drivers of disks and of a network adapter with a device that rewrites all memory mapped for it:
//! descriptors, lists, completions, buffers.
//!
//! For any write of the device:
//!
//! - no driver panics;
//! - the device reaches no byte without a grant (the judge of the devices' own tests keeps the
//!   grants and sees every access), and no granted access is stopped;
//! - the memory that a driver keeps is bounded;
//! - after the driver closes, nothing is mapped and every buffer is returned.
//!
//! Input: 2 bytes of header, then steps of 8 bytes. Bytes of the header:
//!
//! - 0: bits 0..=1 mode: strict, bursts, rings, rings whose walks do not snoop; bits 2..=3 driver:
//!   NVMe, AHCI, an adapter with one or with two buffers per packet.
//! - 1: seed of the device's order.
//!
//! Byte 0 of a step, modulo 8, selects the action; `a` is byte 1, `b` bytes 2..=3, `c` bytes 4..=7:
//!
//! - 0: the driver makes a request of size `b`, of direction and kind `a`.
//! - 1: the driver handles at most `a` completions, or reads the port's registers: active `c`,
//!   failed `b`.
//! - 2: the device writes `c`, four times, at offset `b` of mapped memory: a ring, a list or, from
//!   128 on, the buffer `a`.
//! - 3: the device forges completion `a` with the fields `c` and `b`.
//! - 4: the device works normally on the current contents of memory.
//! - 5: a doorbell rings with `c`.
//! - 6: the device reads or writes 64 bytes at an address from all following bytes.
//! - 7: the same at the address of the mapping made `a` mappings ago, live or not.

mod disks;
mod nic;
mod session;

// Machine, memory and judge come from the devices' tests.
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../../../crates/devices/tests/devices/hardware.rs"]
mod hardware;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../../../crates/devices/tests/devices/judge.rs"]
mod judge;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../../../crates/devices/tests/devices/rig.rs"]
mod rig;

use ringfence_devices::Buffer;
use ringfence_devices::api::DeviceRing;
use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::ring::RingSetup;
use ringfence_pgtable::Coherency;

use self::session::{Hostile, MappingLog, Session};
use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every malformed completion that a driver distinguishes, and
/// every end of a request or an access.
pub const OUTCOMES: &[&str] = &[
    "done",
    "failed",
    "frame",
    "full",
    "refused: Size",
    "lie: Nothing",
    "lie: Index",
    "lie: Length",
    "lie: Status",
    "lie: Queue",
    "write let through",
    "write stopped",
    "wild let through",
    "wild stopped",
    "old let through",
    "old stopped",
    "colocated",
    "closed with requests",
];

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((&[config, seed], steps)) = data.split_first_chunk::<2>() else {
        return;
    };
    match config >> 2 & 3 {
        0 => of_mode::<disks::Nvme>(config, seed, steps, reached),
        1 => of_mode::<disks::Ahci>(config, seed, steps, reached),
        2 => of_mode::<nic::Adapter<1>>(config, seed, steps, reached),
        _ => of_mode::<nic::Adapter<2>>(config, seed, steps, reached),
    }
}

/// A driver with its device, in any mode.
trait Driver {
    /// Returns its rings, each with the number of slots in its table.
    fn rings() -> Vec<(DeviceRing, u32)>;
    /// The driver for one type of handle.
    type Of<H>: Hostile<H>;
}

fn of_mode<D: Driver>(config: u8, seed: u8, steps: &[u8], reached: OutcomeHook<'_>) {
    let told = MappingLog::default();
    let hooks = told.clone();
    let rings = |coherency| {
        let setup = RingSetup {
            coherency,
            ..rig::TAIL
        };
        rig::RingRig::rings(D::rings(), setup, hooks.clone())
    };
    match config & 3 {
        0 => Session::<_, D::Of<_>>::run(
            rig::Rig::<_, _, Buffer, _>::paged(Strict, hooks),
            told,
            false,
            seed,
            steps,
            reached,
        ),
        1 => Session::<_, D::Of<_>>::run(
            rig::Rig::<_, _, Buffer, _>::paged(Burst::new(8), hooks),
            told,
            false,
            seed,
            steps,
            reached,
        ),
        2 => Session::<_, D::Of<_>>::run(
            rings(Coherency::Coherent),
            told,
            true,
            seed,
            steps,
            reached,
        ),
        _ => Session::<_, D::Of<_>>::run(
            rings(Coherency::NonCoherent),
            told,
            true,
            seed,
            steps,
            reached,
        ),
    }
}
