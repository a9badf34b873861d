//! Sequence numbers of an invalidation queue.

use crate::Ticket;

/// Numbers of the bursts of commands that were submitted to a queue and that have completed, for a
/// unit that writes the low 32 bits of a burst's number to memory when the burst has completed.
///
/// A ticket is the number of its burst.
#[derive(Debug, Default)]
pub struct Sequence {
    submitted: u64,
    completed: u64,
}

impl Sequence {
    /// Returns the number of the next burst.
    #[inline]
    pub const fn next(&self) -> u64 {
        self.submitted.wrapping_add(1)
    }

    /// Counts a burst that the unit can see.
    #[inline]
    pub const fn submit(&mut self) -> Ticket {
        self.submitted = self.next();
        self.last()
    }

    /// Returns the ticket of the last burst.
    #[inline]
    pub const fn last(&self) -> Ticket {
        Ticket::new(self.submitted)
    }

    /// Returns true if the ticket was given to a burst. Ticket 0 stands for no burst, and is
    /// complete.
    #[inline]
    pub const fn is_submitted(&self, ticket: Ticket) -> bool {
        ticket.get() <= self.submitted
    }

    /// Returns true if the burst of the ticket has completed, as of the last word read.
    #[inline]
    pub const fn is_complete(&self, ticket: Ticket) -> bool {
        ticket.get() <= self.completed
    }

    /// Takes over the low half of a number that the unit wrote. Returns true if more bursts have
    /// completed.
    ///
    /// Fewer than 2^32 bursts are under way, so the low half tells them apart, also when it wraps.
    /// Any other value is not one that the unit was told to write.
    #[inline]
    pub const fn complete(&mut self, low: u32) -> bool {
        let left = (self.submitted as u32).wrapping_sub(low) as u64;
        let is_later = left < self.submitted.wrapping_sub(self.completed);
        if is_later {
            self.completed = self.submitted.wrapping_sub(left);
        }
        is_later
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_survive_a_wrap_of_the_status() {
        let wrap = 1 << 32;
        for (completed, submitted, status, expected) in [
            (0, 0, 0, None),
            (0, 3, 0, None),
            (0, 3, 1, Some(1)),
            (1, 3, 1, None),
            (1, 3, 3, Some(3)),
            // A value that was not submitted.
            (1, 3, 4, None),
            (1, 3, u32::MAX, None),
            (wrap - 2, wrap + 1, u32::MAX, Some(wrap - 1)),
            (wrap - 1, wrap + 1, u32::MAX, None),
            (wrap - 1, wrap + 1, 0, Some(wrap)),
            (wrap - 1, wrap + 1, 1, Some(wrap + 1)),
            (5 * wrap, 5 * wrap + 2, 0, None),
            (5 * wrap, 5 * wrap + 2, 1, Some(5 * wrap + 1)),
        ] {
            let mut sequence = Sequence {
                submitted,
                completed,
            };
            let found = sequence.complete(status).then_some(sequence.completed);
            assert_eq!(found, expected, "{completed:x} {submitted:x} {status:x}");
        }
    }

    #[test]
    fn a_ticket_completes_with_its_burst() {
        let mut sequence = Sequence::default();
        let ticket = sequence.submit();
        assert_eq!((ticket, sequence.last()), (Ticket::new(1), ticket));
        assert!(sequence.is_submitted(ticket) && !sequence.is_submitted(Ticket::new(2)));
        assert!(!sequence.is_complete(ticket) && sequence.is_complete(Ticket::new(0)));
        assert!(sequence.complete(1) && sequence.is_complete(ticket));
    }
}
