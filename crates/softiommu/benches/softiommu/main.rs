//! What a translation, a pin, a burst, a protected read and an unmap cost; against vm-memory's
//! `Iotlb`, the same behind a lock, plain `GuestMemoryMmap`, and a bare table without readers.
//!
//! `hits`, `reads`, `changes`, `waking`, `busy` after `--` run that part only.
//!
//! Sides are interleaved, so a neighbour on the machine slows all of them; the medians' ratios are
//! what counts. Addresses are live pages in random order. In a dependent side the next address
//! needs the translation before.

mod changes;
mod hits;
mod processors;
mod reads;
mod sides;
mod together;
mod unit;

#[path = "../../../iova/benches/support/clock.rs"]
#[allow(dead_code)]
mod clock;

use changes::changes;
use hits::hits;
use reads::reads;
use together::{busy, waking};

/// Operations in a sample.
const ACCESSES: usize = 1 << 13;
const SAMPLES: usize = 201;

fn main() {
    // `cargo test --benches` runs this too: then once is enough.
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
