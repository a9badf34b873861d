//! One turn of a device at a queue.
//!
//! A driver that lets the device write over the ring's own index never runs out of chains. So a device serves at most as many chains a turn
//! as the queue is long, and the next turn comes after whoever else waits for this thread.

use virtio_queue::{Queue, QueueT};

use super::QueueBroken;
use super::chain::Chain;
use crate::dma::Dma;

/// What became of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The driver wants to be interrupted for what was returned.
    pub interrupt: bool,
    /// The turn ended before the queue was empty: nobody will ring for the rest.
    pub more: bool,
}

/// Serves the chains that are available, at most as many as the queue is long. `serve` says how many bytes it wrote.
///
/// # Errors
/// [`QueueBroken`]: the rings are out of reach or hold nonsense.
pub fn serve_chains<A: Dma>(
    queue: &mut Queue,
    dma: &mut A,
    mut serve: impl FnMut(&mut Chain, &mut A) -> u32,
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
        let written = serve(&mut chain, dma);
        turn.interrupt |= dma.with(|memory| {
            queue.add_used(memory, chain.head, written)?;
            queue.needs_notification(memory)
        })?;
    }
    turn.more = true;
    Ok(turn)
}
