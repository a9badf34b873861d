//! When a device interrupts (OS07).

/// Completions gather until there are enough of them or a timer runs out; one interrupt then
/// announces all. The driver's loop over them is the burst.
#[derive(Debug, Clone, Copy)]
pub struct Coalesce {
    threshold: u32,
    unannounced: u32,
}

impl Coalesce {
    /// Interrupts at `threshold` completions; 0 counts as 1.
    pub const fn new(threshold: u32) -> Self {
        Self {
            threshold: if threshold == 0 { 1 } else { threshold },
            unannounced: 0,
        }
    }

    /// One more completion was written.
    #[inline]
    pub fn completed(&mut self) {
        self.unannounced = self.unannounced.saturating_add(1);
    }

    /// Completions since the last interrupt.
    #[inline]
    pub const fn unannounced(&self) -> u32 {
        self.unannounced
    }

    /// Whether an interrupt is due.
    #[inline]
    pub const fn due(&self) -> bool {
        self.unannounced >= self.threshold
    }

    /// The interrupt is taken; how many completions it announces. Also the timer: it takes the
    /// interrupt before it is due.
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
