//! Waiting for what was unmapped.

use core::marker::PhantomData;
use core::ops::Deref;

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Lock, Ticket};

use super::{Channel, Queue, SharedChannel};

/// The host invalidates before it answers an unmap. So nothing new is submitted: the ticket is a
/// place in the queue, and it completes when every request before it was answered.
#[derive(Debug)]
pub struct UnmapCompletions<R, Q, L> {
    link: R,
    shared: PhantomData<fn() -> (Q, L)>,
}

impl<R, Q, L> UnmapCompletions<R, Q, L>
where
    R: Deref<Target = SharedChannel<Q, L>>,
    Q: Queue,
    L: Lock<Channel<Q>>,
{
    /// The answers of `link`'s host.
    pub fn new(link: R) -> Self {
        Self {
            link,
            shared: PhantomData,
        }
    }
}

impl<R, Q, L> Invalidator for UnmapCompletions<R, Q, L>
where
    R: Deref<Target = SharedChannel<Q, L>>,
    Q: Queue,
    L: Lock<Channel<Q>>,
{
    /// Whatever `request` covers was unmapped by requests that are in the queue already.
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if let Invalidation::Context(_) | Invalidation::Ring { .. } = request {
            return Err(InvalidationError::Unsupported);
        }
        self.link.with(|channel| {
            channel.kick();
            match channel.failure() {
                Some(_) => Err(InvalidationError::Failed),
                None => Ok(Ticket::new(channel.next_sequence())),
            }
        })
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.link.with(|channel| {
            channel.poll();
            channel
                .is_confirmed(ticket.get())
                .map_err(|_| InvalidationError::Failed)
        })
    }
}
