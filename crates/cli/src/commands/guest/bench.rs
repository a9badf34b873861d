//! `ringfence guest bench-read` and `bench-net`, which run inside a guest.

use ringfence_guest_harness::{
    DATAGRAMS_BEFORE, ReadTimes, Reads, bench_reads, bench_round_trips, bench_stream,
    set_queue_pairs,
};

use crate::args::{Datagrams, GuestBenchNetArgs, GuestBenchReadArgs};
use crate::failure::Failure;
use crate::output::print;

fn size(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Prints the instructions of direct reads of a file.
pub(super) fn bench_read(args: &GuestBenchReadArgs) -> Result<(), Failure> {
    let reads = Reads {
        count: size(args.count),
        bytes: size(args.bytes),
        after: args.after.map(size),
    };
    let (times, requests) = bench_reads(&args.file, reads).map_err(Failure::io(&args.file))?;
    let text = format!("{} reads of {} bytes\n", reads.count, reads.bytes);
    print(&(text + &operations(requests) + &summary(times)))
}

/// Prints the instructions of a stream of datagrams, or of round trips.
pub(super) fn bench_net(args: &GuestBenchNetArgs) -> Result<(), Failure> {
    if let (Some(interface), Some(pairs)) = (&args.interface, args.pairs) {
        set_queue_pairs(interface, pairs).map_err(Failure::io(interface.as_ref()))?;
    }
    let count = size(args.count);
    let failed = || Failure::io("datagrams".as_ref());
    let text = match args.datagrams {
        Datagrams::Stream => {
            let work = bench_stream(args.peer, count).map_err(failed())?;
            format!("sent: {count} of them, {work} ns of work together\n")
        }
        Datagrams::RoundTrips => summary(bench_round_trips(args.peer, count).map_err(failed())?),
    };
    print(&(operations(count.saturating_add(DATAGRAMS_BEFORE)) + &text))
}

/// The number of operations with those before the measurement.
fn operations(count: usize) -> String {
    format!("operations: {count}\n")
}

/// The times of operations that waited and of others.
fn summary(times: ReadTimes) -> String {
    let mut text = String::new();
    for (name, mut times) in [("waited", times.waited), ("at once", times.at_once)] {
        times.sort_unstable();
        let all = times.len();
        let (Some(cheapest), Some(median), Some(dearest)) =
            (times.first(), times.get(all / 2), times.last())
        else {
            continue;
        };
        text.push_str(&format!(
            "{name}: {all} of them, {median} ns of work the median, {cheapest} the cheapest, \
            {dearest} the dearest\n"
        ));
    }
    text
}
