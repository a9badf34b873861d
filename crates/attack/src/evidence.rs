//! The counts of an executed attack.

use ringfence_lab::oracle::ByteVerdict;
use serde::Serialize;

/// Counts of one trial of an attack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// Accesses or other steps by which the attacker tries to succeed.
    pub attempts: u64,
    /// Attempts that succeeded.
    pub successes: u64,
    /// Bytes without a grant that the successful attempts reached.
    pub bytes: u64,
    /// Time of the last success since the driver got the buffer back, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_success_ns: Option<u64>,
    /// Unmaps of other buffers between the release and the last success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_success_unmaps: Option<u64>,
    /// Accesses inside a live grant that the hardware stopped.
    pub false_faults: u64,
}

impl Evidence {
    /// Counts an attempt, and a success if the access reached a byte without a grant, or changed a
    /// released buffer in the device's own pool.
    pub(crate) fn count(&mut self, verdict: Option<&ByteVerdict>) -> bool {
        let bytes = verdict.map_or(0, |verdict| verdict.violating_bytes() + verdict.mutable);
        self.count_if(bytes > 0, bytes);
        if let Some(since) = verdict.and_then(|verdict| verdict.since_end) {
            self.last_success_ns = self.last_success_ns.max(Some(since));
        }
        bytes > 0
    }

    /// Counts an attempt that succeeded if `success` is true, on `bytes` bytes.
    pub(crate) fn count_if(&mut self, success: bool, bytes: u64) {
        self.attempts += 1;
        if success {
            self.successes += 1;
            self.bytes = self.bytes.saturating_add(bytes);
        }
    }

    /// Adds the counts of `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        self.attempts += other.attempts;
        self.successes += other.successes;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.last_success_ns = self.last_success_ns.max(other.last_success_ns);
        self.last_success_unmaps = self.last_success_unmaps.max(other.last_success_unmaps);
        self.false_faults += other.false_faults;
    }
}

/// One variant of an attack: an attacker, or a step of the class's description.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trial {
    /// Name of the variant.
    pub name: &'static str,
    /// True if a success of this variant is a success of the class. False for a variant that shows
    /// a limit of the defence, for comparison.
    pub decides: bool,
    /// Attempts, successes and windows of this variant.
    #[serde(flatten)]
    pub evidence: Evidence,
}

/// The result of executing a class on a mode.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Executed {
    /// Variants, in order.
    pub trials: Vec<Trial>,
    /// Successes beyond the bound that a bounded (`B`) judgement of the class states.
    #[serde(skip)]
    pub(crate) beyond_bound: u64,
    /// Measured values that are no counts of accesses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl Executed {
    /// Adds a variant that decides the outcome.
    pub(crate) fn trial(&mut self, name: &'static str, evidence: Evidence) {
        self.trials.push(Trial {
            name,
            decides: true,
            evidence,
        });
    }

    /// Adds a variant for comparison.
    pub(crate) fn comparison(&mut self, name: &'static str, evidence: Evidence) {
        self.trials.push(Trial {
            name,
            decides: false,
            evidence,
        });
    }

    /// Returns the sum of the variants that decide.
    pub fn total(&self) -> Evidence {
        let mut total = Evidence::default();
        for trial in self.trials.iter().filter(|trial| trial.decides) {
            total.add(&trial.evidence);
        }
        total
    }

    /// Returns the counts of the variant `name`.
    pub fn named(&self, name: &str) -> Option<&Evidence> {
        let mut trials = self.trials.iter();
        trials
            .find(|trial| trial.name == name)
            .map(|trial| &trial.evidence)
    }
}

/// The result of a scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The scenario ran.
    Executed(Executed),
    /// The class cannot occur in this mode, and the reason.
    NotApplicable(&'static str),
    /// The scenario cannot run in this mode, and the reason.
    NotExecuted(&'static str),
}
