//! Rate limit of the time that others wait for a sandbox process.
//!
//! A process must answer within a second each time, and may be late for five seconds within a
//! minute. A limit for each answer alone would let the process delay the IOMMU of all devices again
//! and again. Neither counts time in which the host has no CPU for the process (`wait.rs`).
//!
//! The caller supplies the clock, so tests can simulate it.

use std::time::Duration;

/// Longest wait for one answer.
pub(super) const LONGEST: Duration = Duration::from_secs(1);
/// Most lateness within [`WINDOW_SECONDS`].
pub(super) const ALLOWANCE: Duration = Duration::from_secs(5);
/// Seconds that the allowance covers.
const WINDOW_SECONDS: u64 = 60;
const SLOTS: usize = WINDOW_SECONDS as usize;

/// Lateness of a process in each second of the last minute.
#[derive(Debug)]
pub(super) struct Lateness {
    allowance: Duration,
    /// Ring buffer, indexed by the second modulo [`SLOTS`].
    late: [Duration; SLOTS],
    /// Latest second that a call has seen.
    latest: u64,
}

/// The process was late for longer than its allowance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllowanceExceeded;

impl Lateness {
    pub(super) fn new(allowance: Duration) -> Self {
        Self {
            allowance,
            late: [Duration::ZERO; SLOTS],
            latest: 0,
        }
    }

    /// Returns the remaining allowance at `now`, measured from any fixed origin.
    pub(super) fn remaining(&mut self, now: Duration) -> Duration {
        self.expire(now);
        let late: Duration = self.late.iter().sum();
        self.allowance.saturating_sub(late)
    }

    /// Adds `late`, a wait that ended at `now`.
    ///
    /// # Errors
    /// [`AllowanceExceeded`] if the allowance is exhausted.
    pub(super) fn charge(
        &mut self,
        now: Duration,
        late: Duration,
    ) -> Result<(), AllowanceExceeded> {
        self.expire(now);
        if let Some(slot) = self.late.get_mut((self.latest % WINDOW_SECONDS) as usize) {
            *slot = slot.saturating_add(late);
        }
        if self.remaining(now).is_zero() {
            return Err(AllowanceExceeded);
        }
        Ok(())
    }

    /// Clears the slots of the seconds that have passed since the last call.
    fn expire(&mut self, now: Duration) {
        let second = now.as_secs();
        let passed = second.saturating_sub(self.latest).min(WINDOW_SECONDS);
        for ago in 0..passed {
            let slot = (second.saturating_sub(ago) % WINDOW_SECONDS) as usize;
            if let Some(slot) = self.late.get_mut(slot) {
                *slot = Duration::ZERO;
            }
        }
        self.latest = self.latest.max(second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn lateness_adds_up_whatever_its_pieces() {
        for piece in [1, 7, 450, 999] {
            let mut lateness = Lateness::new(ALLOWANCE);
            let (mut now, mut late) = (MS(0), MS(0));
            while lateness.charge(now, MS(piece)).is_ok() {
                now += MS(piece);
                late += MS(piece);
                assert!(late < ALLOWANCE, "{piece}");
            }
            assert!(late + MS(piece) >= ALLOWANCE, "{piece}");
            assert_eq!(lateness.remaining(now), Duration::ZERO);
        }
    }

    #[test]
    fn delays_count_for_one_minute() {
        let mut lateness = Lateness::new(ALLOWANCE);
        lateness.charge(MS(1500), MS(3000)).unwrap();
        lateness.charge(MS(30_000), MS(1000)).unwrap();
        assert_eq!(lateness.remaining(MS(60_999)), MS(1000));
        assert_eq!(lateness.remaining(MS(61_000)), MS(4000));
        assert_eq!(
            lateness.charge(MS(61_000), MS(4000)),
            Err(AllowanceExceeded)
        );
        assert_eq!(lateness.remaining(MS(90_000)), MS(1000));
        assert_eq!(lateness.remaining(MS(10_000_000)), ALLOWANCE);
    }

    #[test]
    fn no_minute_holds_more_than_the_allowance() {
        // The reference is a brute-force sum over each minute, with waits at random times.
        let mut random = 0x9e37_79b9_u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut lateness = Lateness::new(ALLOWANCE);
        let (mut now, mut taken) = (0, Vec::new());
        for _ in 0..5000 {
            now += next(3000);
            let late = next(900).min(lateness.remaining(MS(now)).as_millis() as u64);
            if lateness.charge(MS(now), MS(late)).is_err() {
                continue;
            }
            taken.push((now / 1000, late));
            let recent = taken.iter().filter(|(at, _)| at + 60 > now / 1000);
            let sum: u64 = recent.map(|(_, late)| late).sum();
            assert!(MS(sum) < ALLOWANCE, "{sum} ms by {now}");
        }
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let mut lateness = Lateness::new(ALLOWANCE);
        lateness.charge(MS(50_000), MS(2000)).unwrap();
        assert_eq!(lateness.remaining(MS(1000)), MS(3000));
        lateness.charge(MS(1000), MS(1000)).unwrap();
        assert_eq!(lateness.remaining(MS(50_000)), MS(2000));
    }
}
