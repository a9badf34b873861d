//! Waiting for unmap requests to complete.

use core::marker::PhantomData;
use core::ops::Deref;

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Lock, Ticket};

use super::{Channel, Queue, SharedChannel};

/// Invalidator of a remote table. The host invalidates before it answers an unmap, so `submit`
/// sends no request. Its ticket is a sequence number, which completes when the host has answered
/// every earlier request.
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
    /// Creates an invalidator for the requests of `link`.
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
    /// Requests that are already in the queue have unmapped everything that `request` covers.
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
