//! One turn of a device at a queue.
//!
//! A driver that lets the device write over the ring's own index never runs out of chains. So a device serves at most as many chains a turn
//! as the queue is long, and the next turn comes after whoever else waits for this thread.

use std::time::Instant;

use virtio_queue::{Queue, QueueT};

use super::QueueBroken;
use super::chain::Chain;
use crate::counters::DeviceCounters;
use crate::dma::Dma;

/// What became of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The driver wants to be interrupted for what was returned.
    pub interrupt: bool,
    /// The turn ended before the queue was empty: nobody will ring for the rest.
    pub more: bool,
}

/// What became of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// It goes back, with so many bytes written.
    Used(u32),
    /// Not now: it stays in the queue, and so does what comes after it.
    Later,
}

/// Serves the chains that are available, at most as many as the queue is long, and counts them and their times.
///
/// # Errors
/// [`QueueBroken`]: the rings are out of reach or hold nonsense.
pub fn serve_chains<A: Dma>(
    queue: &mut Queue,
    dma: &mut A,
    counters: &DeviceCounters,
    mut serve: impl FnMut(&mut Chain, &mut A) -> Done,
) -> Result<Turn, QueueBroken> {
    let mut turn = Turn::default();
    dma.with(|memory| queue.disable_notification(memory))?;
    for _ in 0..queue.size() {
        let Some(mut chain) = dma.with(|memory| Chain::next(queue, memory))? else {
            // Whatever came before the driver was asked to ring again is seen here.
            if !dma.with(|memory| queue.enable_notification(memory))? {
                return Ok(turn);
            }
            continue;
        };
        let begun = Instant::now();
        let Done::Used(written) = serve(&mut chain, dma) else {
            queue.set_next_avail(queue.next_avail().wrapping_sub(1));
            return Ok(turn);
        };
        counters.requests.add(1);
        turn.interrupt |= dma.with(|memory| {
            queue.add_used(memory, chain.head, written)?;
            queue.needs_notification(memory)
        })?;
        counters.service.record(begun.elapsed());
    }
    turn.more = true;
    Ok(turn)
}
