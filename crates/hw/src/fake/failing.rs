//! An invalidation interface that goes wrong at a chosen request.

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misbehaviour {
    /// The request is not accepted.
    Refuse(InvalidationError),
    /// The request is accepted, and its completion is reported as failed.
    Fail(InvalidationError),
    /// The request is reported complete, and nothing has been purged: what a layer that forgets to
    /// invalidate looks like.
    Forget,
}

/// Passes requests on to another invalidator, except the n-th (or each from the n-th on).
#[derive(Debug)]
pub struct Failing<I> {
    inner: I,
    misbehaviour: Misbehaviour,
    first: u64,
    last: u64,
    seen: u64,
}

impl<I> Failing<I> {
    /// Goes wrong at request number `nth` only, counted from 0.
    pub const fn at(inner: I, nth: u64, misbehaviour: Misbehaviour) -> Self {
        Self {
            inner,
            misbehaviour,
            first: nth,
            last: nth,
            seen: 0,
        }
    }

    /// Goes wrong at every request from number `nth` on.
    pub const fn from(inner: I, nth: u64, misbehaviour: Misbehaviour) -> Self {
        Self {
            inner,
            misbehaviour,
            first: nth,
            last: u64::MAX,
            seen: 0,
        }
    }

    /// What is behind.
    pub fn inner(&mut self) -> &mut I {
        &mut self.inner
    }

    /// Requests seen so far.
    pub const fn seen(&self) -> u64 {
        self.seen
    }
}

/// Tickets of requests that never reach the inner invalidator carry this bit, so that they cannot
/// be taken for one of its own.
const OWN: u64 = 1 << 63;

impl<I: Invalidator> Invalidator for Failing<I> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let number = self.seen;
        self.seen = self.seen.wrapping_add(1);
        if number < self.first || number > self.last {
            return self.inner.submit(request);
        }
        let own = Ticket::new(OWN | number);
        match self.misbehaviour {
            Misbehaviour::Refuse(error) => Err(error),
            Misbehaviour::Fail(_) | Misbehaviour::Forget => Ok(own),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        match self.misbehaviour {
            _ if ticket.get() & OWN == 0 => self.inner.poll(ticket),
            Misbehaviour::Fail(error) => Err(error),
            _ => Ok(true),
        }
    }
}
