//! The timers that poll transmit rings (`mlx4_en_poll_tx_cq` in Linux 3.4). Their clock counts the
//! frames of the port.

/// The timers of a port's transmit rings.
#[derive(Debug, Default)]
pub(super) struct TxTimers {
    /// By ring: the time at which the timer expires; `None` if it does not run.
    expires: Vec<Option<u64>>,
}

impl TxTimers {
    /// Starts the timer of `queue` unless it runs.
    pub(super) fn start(&mut self, queue: u16, now: u64, timeout: u64) {
        let queue = usize::from(queue);
        if self.expires.len() <= queue {
            self.expires.resize(queue + 1, None);
        }
        if let Some(timer) = self.expires.get_mut(queue) {
            timer.get_or_insert(now.saturating_add(timeout));
        }
    }

    /// Stops and returns a timer that has expired.
    pub(super) fn expired(&mut self, now: u64) -> Option<u16> {
        let due = |timer: &mut Option<u64>| timer.take_if(|at| *at <= now).is_some();
        self.expires
            .iter_mut()
            .position(due)
            .map(|queue| queue as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_timer_does_not_move() {
        let mut timers = TxTimers::default();
        assert_eq!(timers.expired(u64::MAX), None);
        timers.start(2, 10, 5);
        timers.start(2, 14, 5);
        timers.start(0, 14, 5);
        assert_eq!(timers.expired(14), None);
        assert_eq!(timers.expired(15), Some(2));
        assert_eq!(timers.expired(15), None);
        timers.start(2, 15, u64::MAX);
        assert_eq!(timers.expired(19), Some(0));
        assert_eq!(timers.expired(u64::MAX - 1), None);
        assert_eq!(timers.expired(u64::MAX), Some(2));
    }
}
