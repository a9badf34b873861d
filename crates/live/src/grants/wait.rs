//! One wait of the daemon for a sandbox process, and its limits.
//!
//! Lateness is waited time beyond an allowance for the work. It excludes time that the late thread
//! spends on the run queue, unless the thread runs for longer than its work needs. A thread that
//! spins on a busy host spends most of its time on the run queue.
//!
//! A wait fails at [`LONGEST`] of lateness. Time in which the kernel blocks the thread, on a page
//! fault or on a lock, extends this limit to the remaining allowance of the minute. It still counts
//! as lateness, because an attacker in the process can cause it. [`LONGEST_ELAPSED`] includes all
//! time.
//!
//! Only time inside the daemon's own polls counts, and each poll is short. A daemon that has no CPU
//! or waits for a page itself thus charges the process at most [`SLICE`] more than it asked for.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::lateness::LONGEST;

/// Time for a batch on a busy host: two context switches and the kernel's work on each call.
const BATCH_ALLOWANCE: Duration = Duration::from_millis(1);
const CALL_ALLOWANCE: Duration = Duration::from_micros(200);
/// CPU time, in addition to that of its batch, for which a late thread may run. Beyond it, its time
/// on the run queue counts as lateness.
const RUN_ALLOWANCE: Duration = Duration::from_millis(10);
/// Longest wait for one answer on a host that has no CPU for the thread. A process has two threads,
/// so it cannot keep itself off the CPU for more than half of the time.
const LONGEST_ELAPSED: Duration = Duration::from_secs(5);
/// Longest poll for a late thread.
const SLICE: Duration = Duration::from_millis(100);

/// One wait for the process, which may cover several answers.
#[derive(Debug)]
pub(super) struct Wait {
    /// Waited time after which the process is late.
    allowance: Duration,
    /// Lateness at which the wait fails if the kernel did not block the thread.
    max_late: Duration,
    /// Lateness at which the wait fails in any case.
    remaining: Duration,
    /// Maximum CPU time of a late thread that does only its work.
    run_max: Duration,
    /// Time that the daemon has waited.
    waited: Duration,
    /// Part of the lateness in which the kernel blocked the thread.
    blocked: Duration,
    /// Statistics of the thread when the process became late.
    at_late: Option<Scheduled>,
}

impl Wait {
    /// Creates the wait for a batch of `count` calls. `remaining` is the lateness that remains to
    /// the process in this minute.
    pub(super) fn for_calls(count: u32, remaining: Duration) -> Self {
        let allowance = BATCH_ALLOWANCE.saturating_add(CALL_ALLOWANCE.saturating_mul(count));
        Self {
            allowance,
            max_late: remaining.min(LONGEST),
            remaining,
            run_max: allowance.saturating_add(RUN_ALLOWANCE),
            waited: Duration::ZERO,
            blocked: Duration::ZERO,
            at_late: None,
        }
    }

    /// Creates a wait that fails after `limit`.
    pub(super) fn at_most(limit: Duration) -> Self {
        Self {
            allowance: limit,
            max_late: Duration::ZERO,
            remaining: Duration::ZERO,
            run_max: Duration::ZERO,
            waited: Duration::ZERO,
            blocked: Duration::ZERO,
            at_late: None,
        }
    }

    /// Returns the timeout of the next poll, at most [`SLICE`] for a late thread. Zero if the wait
    /// fails unless the answer is there already.
    pub(super) fn next_poll(&mut self, thread: &ThreadStatistics) -> Duration {
        if self.waited < self.allowance {
            return self.allowance.saturating_sub(self.waited);
        }
        let now = thread.scheduled();
        if self.at_late.is_none() {
            self.at_late = now;
        }
        let allowed = self
            .max_late
            .saturating_add(self.blocked)
            .min(self.remaining);
        let queued = self.queued_since_late(now).min(LONGEST_ELAPSED);
        let limit = allowed.saturating_add(queued).min(LONGEST_ELAPSED);
        let left = limit.saturating_sub(self.waited.saturating_sub(self.allowance));
        left.min(SLICE)
    }

    /// Adds a poll with this `timeout` that took `elapsed`. `blocked` is true if it found no answer
    /// and the kernel blocks the thread.
    pub(super) fn add(&mut self, timeout: Duration, elapsed: Duration, blocked: bool) {
        let counted = elapsed.min(timeout.saturating_add(SLICE));
        if blocked && self.is_late() {
            self.blocked = self.blocked.saturating_add(counted);
        }
        self.waited = self.waited.saturating_add(counted);
    }

    pub(super) fn is_late(&self) -> bool {
        self.waited >= self.allowance
    }

    /// Returns the time to charge to the allowance of the process.
    pub(super) fn lateness(&self, thread: &ThreadStatistics) -> Duration {
        let late = self.waited.saturating_sub(self.allowance);
        if late.is_zero() {
            return late;
        }
        late.saturating_sub(self.queued_since_late(thread.scheduled()))
    }

    /// Returns the time that the mapping thread has spent on the run queue since it became late.
    /// Zero if it has used the CPU for more than its work since then.
    fn queued_since_late(&self, now: Option<Scheduled>) -> Duration {
        match (now, self.at_late) {
            (Some(now), Some(then)) if now.ran.saturating_sub(then.ran) <= self.run_max => {
                now.queued.saturating_sub(then.queued)
            }
            _ => Duration::ZERO,
        }
    }

    /// Describes the lateness for the log.
    pub(super) fn report(&self, thread: &ThreadStatistics) -> LateThread {
        let (now, then) = (thread.scheduled(), self.at_late);
        let since = |of: fn(Scheduled) -> Duration| {
            let now = now.map_or(Duration::ZERO, of);
            now.saturating_sub(then.map_or(Duration::ZERO, of))
        };
        LateThread {
            ran: since(|times| times.ran),
            queued: since(|times| times.queued),
            blocked: self.blocked,
        }
    }
}

/// Times of a mapping thread since it became late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error(
    "it ran for {ran:?}, lacked a CPU for {queued:?}, was blocked in the kernel for {blocked:?}"
)]
pub struct LateThread {
    /// Time on a CPU.
    pub ran: Duration,
    /// Time runnable without a CPU.
    pub queued: Duration,
    /// Time in which the kernel blocked it, from samples.
    pub blocked: Duration,
}

/// Scheduler statistics of a thread since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Scheduled {
    /// Time on a CPU.
    ran: Duration,
    /// Time runnable without a CPU.
    queued: Duration,
}

/// Files of `/proc` about the mapping thread; `None` if the kernel has none.
#[derive(Debug, Default)]
pub(super) struct ThreadStatistics {
    schedstat: Option<File>,
    stat: Option<File>,
}

impl ThreadStatistics {
    pub(super) fn open(process: u32, thread: u32) -> Self {
        let open = |name| File::open(format!("/proc/{process}/task/{thread}/{name}")).ok();
        Self {
            schedstat: open("schedstat"),
            stat: open("stat"),
        }
    }

    /// Returns the first two numbers of `schedstat` (proc(5)), in nanoseconds. The kernel adds a
    /// wait when it has ended.
    fn scheduled(&self) -> Option<Scheduled> {
        let mut text = [0; 64];
        let read = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..read)?).ok()?;
        let mut words = text.split_whitespace();
        let mut next = || Some(Duration::from_nanos(words.next()?.parse().ok()?));
        Some(Scheduled {
            ran: next()?,
            queued: next()?,
        })
    }

    /// Returns true if the thread sleeps uninterruptibly: state `D` of `stat` (proc(5)), which is
    /// the word after the name in parentheses.
    pub(super) fn is_blocked(&self) -> bool {
        let state = || {
            let mut text = [0; 64];
            let read = self.stat.as_ref()?.read_at(&mut text, 0).ok()?;
            let text = text.get(..read)?;
            let name_end = text.iter().rposition(|byte| *byte == b')')?;
            text.get(name_end.saturating_add(2)).copied()
        };
        state() == Some(b'D')
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;
    /// An allowance that no wait of these tests exhausts.
    const AMPLE: Duration = Duration::from_secs(60);

    fn statistics(state: char, ran: Duration, queued: Duration) -> ThreadStatistics {
        let mut schedstat = tempfile::tempfile().unwrap();
        writeln!(schedstat, "{} {} 1", ran.as_nanos(), queued.as_nanos()).unwrap();
        let mut stat = tempfile::tempfile().unwrap();
        writeln!(stat, "7 (a) D (name) {state} 1 7 7 0 -1 4194304").unwrap();
        ThreadStatistics {
            schedstat: Some(schedstat),
            stat: Some(stat),
        }
    }

    /// Returns the time that a wait for a silent thread takes if each poll takes `stall` longer
    /// than its timeout. The thread has the given statistics since it became late.
    fn waits(remaining: Duration, thread: &ThreadStatistics, stall: Duration) -> Duration {
        let mut wait = Wait::for_calls(0, remaining);
        // The statistics when the thread became late.
        wait.at_late = Some(Scheduled::default());
        let mut elapsed = Duration::ZERO;
        loop {
            let timeout = wait.next_poll(thread);
            if timeout.is_zero() {
                return elapsed;
            }
            let took = timeout + stall;
            wait.add(timeout, took, thread.is_blocked());
            elapsed += took;
            assert!(elapsed < Duration::from_secs(1000), "endless: {wait:?}");
        }
    }

    /// The limit of one answer, with the allowance of a batch without calls.
    #[test]
    fn limits_of_one_answer() {
        let allowance = BATCH_ALLOWANCE;
        let cases = [
            // State, ran, queued, remaining allowance: the wait.
            ('S', 0, 0, AMPLE, allowance + LONGEST),
            ('R', 0, 0, AMPLE, allowance + LONGEST),
            // Time without a CPU does not count, to five seconds in all.
            ('R', 0, 500, AMPLE, allowance + LONGEST + MS(500)),
            ('R', 9, 500, AMPLE, allowance + LONGEST + MS(500)),
            ('R', 0, 3_600_000, AMPLE, allowance + LONGEST_ELAPSED),
            // A thread that spins on a busy host waits for the CPU most of the time.
            ('R', 12, 500, AMPLE, allowance + LONGEST),
            // The kernel's waits extend the limit to the allowance, and never beyond five seconds.
            ('D', 0, 0, AMPLE, allowance + LONGEST_ELAPSED),
            ('D', 0, 0, MS(3000), allowance + MS(3000)),
            ('D', 0, 0, MS(300), allowance + MS(300)),
            ('D', 0, 500, MS(300), allowance + MS(800)),
            ('S', 0, 0, MS(300), allowance + MS(300)),
        ];
        for (state, ran, queued, remaining, expected) in cases {
            let thread = statistics(state, MS(ran), MS(queued));
            let waited = waits(remaining, &thread, Duration::ZERO);
            assert_eq!(waited, expected, "{state} {ran} {queued} {remaining:?}");
        }
    }

    /// A daemon that is suspended for an hour in a poll charges the process a slice, not the hour.
    #[test]
    fn the_daemons_own_delays_do_not_count() {
        let thread = statistics('S', MS(0), MS(0));
        let mut wait = Wait::for_calls(4, AMPLE);
        let timeout = wait.next_poll(&thread);
        wait.add(timeout, Duration::from_secs(3600), false);
        assert_eq!(wait.lateness(&thread), SLICE);
        assert!(!wait.next_poll(&thread).is_zero(), "{wait:?}");
        // Short delays count: a busy host must not multiply the time of a process.
        let waited = waits(AMPLE, &thread, MS(50));
        assert!(waited <= MS(1200), "{waited:?}");
    }

    /// Lateness counts time in which the kernel blocks the thread, so the allowance bounds it.
    #[test]
    fn blocked_time_is_charged() {
        let thread = statistics('D', MS(0), MS(0));
        let mut wait = Wait::for_calls(0, AMPLE);
        while wait.waited < MS(2001) {
            let timeout = wait.next_poll(&thread);
            assert!(!timeout.is_zero(), "{wait:?}");
            wait.add(timeout, timeout, thread.is_blocked());
        }
        assert_eq!(wait.lateness(&thread), MS(2000));
        assert_eq!(wait.report(&thread).blocked, MS(2000));
    }

    #[test]
    fn a_wait_without_an_allowance_ends_at_its_limit() {
        let thread = statistics('D', MS(0), MS(5000));
        let mut wait = Wait::at_most(MS(20));
        assert_eq!(wait.next_poll(&thread), MS(20));
        wait.add(MS(20), MS(20), true);
        assert_eq!(wait.next_poll(&thread), Duration::ZERO);
    }

    #[test]
    fn a_thread_without_statistics_has_the_shortest_limit() {
        let waited = waits(AMPLE, &ThreadStatistics::default(), Duration::ZERO);
        assert_eq!(waited, BATCH_ALLOWANCE + LONGEST);
    }
}
