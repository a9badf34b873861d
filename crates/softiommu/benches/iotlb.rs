//! Cost of a vhost-user back-end's miss: request, answer over local sockets, resume. The baseline
//! is a bare round trip over one such socket.
//!
//! The front-end is another thread. It answers a miss as QEMU does: the update, its
//! acknowledgement, then the reply. The variants run interleaved; only the ratio of the medians is
//! comparable.

use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use ringfence_softiommu::iotlb::{
    FRONTEND_IOTLB, Iotlb, IotlbClient, IotlbLimits, Message, Region, Regions, reply, request,
};
use ringfence_types::{Access, Iova, IovaRange, Permissions, PhysAddr, RequesterId};

#[path = "../../iova/benches/support/clock.rs"]
#[allow(dead_code)]
mod clock;

use clock::quantile;

const DISK: RequesterId = RequesterId::new(0x20);
const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;
const PAGES: u64 = 1 << 16;
const MISSES: u32 = 500;
const SAMPLES: usize = 41;

fn header(request: u32, flags: u32, bytes: u32) -> Vec<u8> {
    [request, flags, bytes].map(u32::to_ne_bytes).concat()
}

/// Answers misses until the socket is closed.
fn front_end(mut main: UnixStream, mut requests: UnixStream) {
    let mut frame = [0; 44];
    let mut update = header(FRONTEND_IOTLB, 1 | 8, 32);
    update.resize(44, 0);
    let mut done = header(1, 1 | 4, 8);
    done.resize(20, 0);
    while requests.read_exact(&mut frame).is_ok() {
        let miss = frame.last_chunk().map(Message::decode);
        let Some(Ok(Message::Miss { iova, .. })) = miss else {
            return;
        };
        let page = iova.align_down(PAGE);
        let message = Message::Update {
            range: IovaRange::new(page, PAGE).expect("no wrap"),
            user: USER + page.get() % (PAGES * PAGE),
            permissions: Permissions::READ_WRITE,
        };
        update[12..].copy_from_slice(&message.encode());
        main.write_all(&update).expect("open");
        main.read_exact(&mut [0; 20]).expect("open");
        requests.write_all(&done).expect("open");
    }
}

fn echo(mut socket: UnixStream) {
    let mut frame = [0; 44];
    while socket.read_exact(&mut frame).is_ok() {
        socket.write_all(&frame).expect("open");
    }
}

fn timed(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..MISSES {
        work();
    }
    start.elapsed().as_nanos() as f64 / f64::from(MISSES)
}

fn main() {
    // `cargo test --benches` runs this too; one sample suffices then.
    let bench = std::env::args().any(|arg| arg == "--bench");
    let samples = if bench { SAMPLES } else { 1 };
    let region = Region {
        user: USER,
        bytes: PAGES * PAGE,
        memory: PhysAddr::ZERO,
    };
    let regions = Regions::new(&[region]).expect("sound");
    let iotlb = Iotlb::new(IotlbLimits::default(), DISK, (), regions).expect("room");
    let mut reader = iotlb.reader().expect("room");
    let [(main, front), (requests, from_back), (mut here, there)] =
        [0; 3].map(|_| UnixStream::pair().expect("a pair"));
    let timeout = Duration::from_secs(10);
    let mut exchange = IotlbClient::new(iotlb, main, requests, timeout).expect("options");
    thread::spawn(move || front_end(front, from_back));
    thread::spawn(move || echo(there));
    let [(mut main, front), (mut requests, from_back)] =
        [0; 2].map(|_| UnixStream::pair().expect("a pair"));
    thread::spawn(move || front_end(front, from_back));

    let (mut bare, mut by_hand, mut misses) = (Vec::new(), Vec::new(), Vec::new());
    let mut page = 0;
    for _ in 0..samples {
        bare.push(timed(|| {
            let mut frame = [7; 44];
            here.write_all(&frame).expect("open");
            here.read_exact(&mut frame).expect("open");
            black_box(frame);
        }));
        by_hand.push(timed(|| {
            let iova = Iova::new(0);
            let required = Permissions::READ;
            let miss = request(&Message::Miss { iova, required });
            requests.write_all(&miss).expect("open");
            main.read_exact(&mut [0; 44]).expect("open");
            main.write_all(&reply(FRONTEND_IOTLB, true)).expect("open");
            requests.read_exact(&mut [0; 20]).expect("open");
        }));
        misses.push(timed(|| {
            page = (page + 1) % PAGES;
            let range = IovaRange::new(Iova::new(page * PAGE), 8).expect("no wrap");
            loop {
                let found = reader.online().guard().translate(range, Access::Read);
                match found {
                    Ok(pieces) => {
                        black_box(pieces.first());
                        break;
                    }
                    Err(fault) => exchange.resolve(&fault).expect("an answer"),
                };
            }
        }));
    }
    let middle = quantile(&mut bare, 0.5);
    println!(
        "{:<40} {:>8} {:>8} {:>8} {:>8}",
        "ns", "median", "10%", "90%", "/first"
    );
    for (name, side) in [
        ("a bare round trip", &mut bare),
        ("the same messages, and nothing done", &mut by_hand),
        ("a miss, until it is translated", &mut misses),
    ] {
        let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(side, share));
        println!(
            "{name:<40} {median:>8.0} {low:>8.0} {high:>8.0} {:>8.2}",
            median / middle
        );
    }
}
