//! Waiting for unmap requests to complete.

use core::marker::PhantomData;
use core::ops::Deref;

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Lock, Ticket};

use super::{Channel, Queue, SharedChannel};

/// Invalidator of a remote table. The host invalidates before it answers an unmap, so `submit`
/// sends no request. Its ticket is a sequence number, which completes when the host has answered
/// every earlier request.
///
/// A guest cannot clear a context entry of the host. [`Invalidation::Context`] is therefore
/// [`Unsupported`](InvalidationError::Unsupported) while the host may have pages of the device
/// mapped, so a forced detach with live mappings fails. After the unmap of the last one the device
/// reaches nothing, and the detach waits for the answers. The requester ID is the lowest 16 bits of
/// the [`Devid`](crate::wire::Devid).
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
        self.link.with(|channel| {
            let covers = match request {
                Invalidation::Context(device) => channel.is_unused(device),
                Invalidation::Ring { .. } => false,
                _ => true,
            };
            if !covers {
                return Err(InvalidationError::Unsupported);
            }
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
