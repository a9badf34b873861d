//! One turn of a device at a queue.
//!
//! A driver that lets the device write over the ring's own index never runs out of chains. So a
//! device serves at most as many chains a turn as the queue is long, or until it has had
//! [`QUANTUM_BYTES`] in hand, and the next turn comes after whoever else waits for this thread.

use std::time::Instant;

use virtio_queue::{Queue, QueueT};

use super::QueueBroken;
use super::chain::{Chain, Segments};
use crate::counters::DeviceCounters;
use crate::dma::Dma;

/// Bytes of chains after which a turn ends: what is asked of the device meanwhile waits for so
/// many, and for one request more.
pub const QUANTUM_BYTES: u64 = 1 << 20;

/// What became of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantumResult {
    /// The driver wants to be interrupted for what was returned.
    pub interrupt: bool,
    /// The turn ended before the queue was empty: nobody will ring for the rest.
    pub more: bool,
}

/// What became of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainOutcome {
    /// It goes back, with so many bytes written.
    Used(u32),
    /// Not now: it stays in the queue, and so does what comes after it.
    Later,
}

/// Serves the chains that are available, at most as many as the queue is long, and counts them and
/// their times.
///
/// # Errors
/// [`QueueBroken`]: the rings are out of reach or hold nonsense.
pub fn serve_chains<A: Dma>(
    queue: &mut Queue,
    dma: &mut A,
    counters: &DeviceCounters,
    mut serve: impl FnMut(&mut Chain, &mut A) -> ChainOutcome,
) -> Result<QuantumResult, QueueBroken> {
    let mut turn = QuantumResult::default();
    let disabled = dma.with_retry(|memory| queue.disable_notification(memory));
    if dma.interrupted() {
        return Ok(turn);
    }
    disabled?;
    let mut bytes = 0_u64;
    for _ in 0..queue.size() {
        if bytes >= QUANTUM_BYTES {
            break;
        }
        let (avail, used) = (queue.next_avail(), queue.next_used());
        let chain = dma.with_retry(|memory| {
            queue.set_next_avail(avail);
            Chain::next(queue, memory)
        });
        // What was not read to its end is no chain.
        if dma.interrupted() {
            queue.set_next_avail(avail);
            return Ok(turn);
        }
        let Some(mut chain) = chain? else {
            // Whatever came before the driver was asked to ring again is seen here.
            let more = dma.with_retry(|memory| queue.enable_notification(memory));
            if dma.interrupted() || !more? {
                return Ok(turn);
            }
            continue;
        };
        let both = [&chain.readable, &chain.writable].map(Segments::bytes);
        bytes = both.into_iter().fold(bytes, u64::saturating_add);
        let begun = Instant::now();
        let done = serve(&mut chain, dma);
        let ChainOutcome::Used(written) = done else {
            queue.set_next_avail(avail);
            return Ok(turn);
        };
        let mut added = Ok(());
        if !dma.interrupted() {
            added = dma.with_retry(|memory| {
                queue.set_next_used(used);
                queue.add_used(memory, chain.head, written)
            });
        }
        // It is begun anew when the device goes on: nobody has been told of it.
        if dma.interrupted() {
            queue.set_next_avail(avail);
            queue.set_next_used(used);
            return Ok(turn);
        }
        added?;
        counters.requests.add(1);
        let wanted = dma.with_retry(|memory| queue.needs_notification(memory));
        if dma.interrupted() {
            // Once too often is allowed.
            turn.interrupt = true;
            return Ok(turn);
        }
        turn.interrupt |= wanted?;
        counters.service.record(begun.elapsed());
    }
    turn.more = true;
    Ok(turn)
}
