//! One turn of a device on a queue.
//!
//! A driver that lets the device overwrite the ring's own index never runs out of chains. A turn
//! therefore ends after as many chains as the queue has descriptors, or after [`QUANTUM_BYTES`].
//! Other work of the same thread runs before the next turn.

use std::time::Instant;

use virtio_queue::{Queue, QueueT};

use super::QueueBroken;
use super::chain::{Chain, Segments};
use crate::counters::DeviceCounters;
use crate::dma::Dma;

/// Bytes of chains after which a turn ends. Other work of the thread waits for at most this many
/// bytes and one request.
pub const QUANTUM_BYTES: u64 = 1 << 20;

/// Result of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantumResult {
    /// True if the driver requests an interrupt for the returned chains.
    pub interrupt: bool,
    /// True if the turn ended before the queue was empty; the driver will not ring the doorbell
    /// again.
    pub more: bool,
}

/// Result of serving a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainOutcome {
    /// Return the chain, with this many bytes written.
    Used(u32),
    /// Leave this chain and all later ones in the queue.
    Later,
}

/// Serves available chains, at most as many as the queue has descriptors, and records their number
/// and service times in `counters`.
///
/// # Errors
/// [`QueueBroken`] if the rings are inaccessible or invalid.
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
        // An interrupted read yields no valid chain.
        if dma.interrupted() {
            queue.set_next_avail(avail);
            return Ok(turn);
        }
        let Some(mut chain) = chain? else {
            // Chains that arrived before the notification was enabled are found here.
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
        // The driver has not seen a result, so the device repeats the request when it resumes.
        if dma.interrupted() {
            queue.set_next_avail(avail);
            queue.set_next_used(used);
            return Ok(turn);
        }
        added?;
        counters.requests.add(1);
        let wanted = dma.with_retry(|memory| queue.needs_notification(memory));
        if dma.interrupted() {
            // A spurious interrupt is permitted.
            turn.interrupt = true;
            return Ok(turn);
        }
        turn.interrupt |= wanted?;
        counters.service.record(begun.elapsed());
    }
    turn.more = true;
    Ok(turn)
}
