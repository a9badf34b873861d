//! Interrupt coalescing: one interrupt announces several completions.

/// Collects completions until a threshold or a timer expires. One interrupt then announces all of
/// them; the driver's loop over them is a burst.
#[derive(Debug, Clone, Copy)]
pub struct Coalesce {
    threshold: u32,
    unannounced: u32,
}

impl Coalesce {
    /// Creates a coalescer that interrupts after `threshold` completions; 0 counts as 1.
    pub const fn new(threshold: u32) -> Self {
        Self {
            threshold: if threshold == 0 { 1 } else { threshold },
            unannounced: 0,
        }
    }

    /// Counts a completion.
    #[inline]
    pub fn completed(&mut self) {
        self.unannounced = self.unannounced.saturating_add(1);
    }

    /// Returns the number of completions since the last interrupt.
    #[inline]
    pub const fn unannounced(&self) -> u32 {
        self.unannounced
    }

    /// Returns true if an interrupt is due.
    #[inline]
    pub const fn due(&self) -> bool {
        self.unannounced >= self.threshold
    }

    /// Takes the interrupt and returns the number of completions that it announces. The timer also
    /// calls this, before the interrupt is due.
    #[inline]
    pub fn acknowledge(&mut self) -> u32 {
        core::mem::take(&mut self.unannounced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_interrupt_announces_many() {
        let mut coalesce = Coalesce::new(3);
        for done in 0..7 {
            assert_eq!(coalesce.due(), done >= 3);
            coalesce.completed();
        }
        assert_eq!(coalesce.acknowledge(), 7);
        assert!(!coalesce.due());
        assert_eq!(coalesce.acknowledge(), 0);
        let mut eager = Coalesce::new(0);
        assert!(!eager.due());
        eager.completed();
        assert!(eager.due());
    }
}
