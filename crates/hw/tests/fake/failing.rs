//! An invalidation interface that fails at a chosen request.

use ringfence_types::{Invalidation, InvalidationError, Invalidator, Ticket};

/// Type of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misbehaviour {
    /// Rejects the request.
    Refuse(InvalidationError),
    /// Accepts the request and reports its completion as failed.
    Fail(InvalidationError),
    /// Reports the request complete without removing anything, like a layer that forgets to
    /// invalidate.
    Forget,
}

/// Forwards requests to another invalidator, except the n-th or all from the n-th on.
#[derive(Debug)]
pub struct Failing<I> {
    inner: I,
    misbehaviour: Misbehaviour,
    first: u64,
    last: u64,
    seen: u64,
}

impl<I> Failing<I> {
    /// Fails at request number `nth` only, counted from 0.
    pub const fn at(inner: I, nth: u64, misbehaviour: Misbehaviour) -> Self {
        Self {
            inner,
            misbehaviour,
            first: nth,
            last: nth,
            seen: 0,
        }
    }

    /// Fails at every request from number `nth` on.
    pub const fn from(inner: I, nth: u64, misbehaviour: Misbehaviour) -> Self {
        Self {
            inner,
            misbehaviour,
            first: nth,
            last: u64::MAX,
            seen: 0,
        }
    }

    /// Returns the inner invalidator.
    pub fn inner(&mut self) -> &mut I {
        &mut self.inner
    }

    /// Returns the number of requests so far.
    pub const fn seen(&self) -> u64 {
        self.seen
    }
}

/// Marks tickets of requests that never reach the inner invalidator, so that they cannot collide
/// with its tickets.
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
