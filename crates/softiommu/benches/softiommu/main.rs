//! Cost of a translation, a guard, a read section, a protected read and an unmap. The baselines are
//! vm-memory's `Iotlb`, the same behind a lock, plain `GuestMemoryMmap`, and a bare table without
//! readers.
//!
//! Arguments `hits`, `reads`, `changes`, `waking`, `busy` after `--` select parts.
//!
//! The variants run interleaved, so load from other virtual machines slows all of them. Only the
//! ratios of the medians are comparable. Addresses are live pages in random order. In a dependent
//! variant, each address depends on the previous translation.

mod changes;
mod hits;
mod interference;
mod interleaved;
mod processors;
mod reads;
mod unit;

#[path = "../../../iova/benches/support/clock.rs"]
#[allow(dead_code)]
mod clock;

use changes::changes;
use hits::hits;
use interference::{busy, waking};
use reads::reads;

/// Operations per sample.
const ACCESSES: usize = 1 << 13;
const SAMPLES: usize = 201;

fn main() {
    // `cargo test --benches` runs this too; one sample suffices then.
    let samples = if std::env::args().any(|arg| arg == "--bench") {
        SAMPLES
    } else {
        1
    };
    let parts: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let chosen = |part: &str| parts.is_empty() || parts.iter().any(|name| name == part);
    let processors = processors::two();
    if let Some([here, _]) = processors {
        here.take();
    }
    for live in [64, 1 << 10, 16 << 10] {
        if chosen("hits") {
            hits(live, samples);
        }
        if chosen("reads") {
            reads(live, samples);
        }
        if chosen("changes") {
            changes(live, samples);
        }
    }
    match processors {
        Some([_, other]) => {
            if chosen("waking") {
                waking(samples, other);
            }
            if chosen("busy") {
                busy(1 << 10, samples, other);
            }
        }
        None => println!("waking, busy: not measured, two threads would share the only processor"),
    }
}
