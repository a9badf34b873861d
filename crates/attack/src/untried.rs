//! The variants that decide and legitimately make no attempt.

use crate::evidence::Executed;

/// A variant without an attempt in some modes.
#[derive(Debug, Clone, Copy)]
pub struct Untried {
    /// Number of the class.
    pub class: &'static str,
    /// Name of the variant.
    pub trial: &'static str,
    /// Cause of a count of zero.
    pub reason: &'static str,
}

/// The variants that may make no attempt, and the reasons.
pub const UNTRIED: &[Untried] = &[
    Untried {
        class: "A04",
        trial: "unmapped ahead of the search",
        reason: "the fixed bitmap withholds freed pages until its next wrap, so none comes back",
    },
    Untried {
        class: "A35",
        trial: "passive",
        reason: "a passive device accesses no buffer that the driver has back",
    },
];

/// Returns true if a variant that decides made no attempt, and the list names no reason.
pub(crate) fn any(class: &str, executed: &Executed) -> bool {
    let mut trials = executed.trials.iter();
    trials.any(|trial| {
        let listed = |untried: &Untried| (untried.class, untried.trial) == (class, trial.name);
        trial.decides && trial.evidence.attempts == 0 && !UNTRIED.iter().any(listed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::Evidence;

    /// One variant with attempts does not hide another without.
    #[test]
    fn each_variant_that_decides_needs_an_attempt() {
        let mut executed = Executed::default();
        let tried = Evidence {
            attempts: 1,
            ..Evidence::default()
        };
        executed.trial("tried", tried);
        executed.comparison("for comparison", Evidence::default());
        executed.trial("unmapped ahead of the search", Evidence::default());
        assert!(!any("A04", &executed));
        assert!(any("A02", &executed));
        executed.trial("another", Evidence::default());
        assert!(any("A04", &executed));
    }
}
