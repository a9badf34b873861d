//! Every experiment that is run by its id.

use std::time::Instant;

use super::finding::{Finding, Findings, Verdict};
use crate::Profile;
use crate::error::LabError;

/// How much is run.
#[derive(Debug, Clone)]
pub struct Setting {
    /// What is charged.
    pub profile: Profile,
    /// Runs of a workload, one after the other on the same interface: what decision 0011 calls history.
    pub runs: usize,
    /// Timed repetitions.
    pub repetitions: usize,
}

impl Setting {
    /// What `ringfence reproduce` runs: ten of the documents' hundred runs.
    pub fn full() -> Self {
        Self {
            profile: Profile::r210_2015(),
            runs: 10,
            repetitions: 3,
        }
    }

    /// Hardly anything: for tests of structure, whose numbers say nothing.
    pub fn smoke() -> Self {
        Self {
            profile: Profile::r210_2015(),
            runs: 1,
            repetitions: 1,
        }
    }
}

/// An experiment of a document.
#[derive(Debug, Clone, Copy)]
pub struct Experiment {
    /// X01 and so on.
    pub id: &'static str,
    /// What it is about.
    pub title: &'static str,
    /// Which document and where in it.
    pub source: &'static str,
    /// How it is run.
    pub(super) measure: fn(&Setting) -> Result<Findings, LabError>,
}

impl Experiment {
    /// All, in the order of their ids.
    pub const ALL: &'static [Self] = &[
        super::x01_breakdown::EXPERIMENT,
        super::x02_model::EXPERIMENT,
        super::x03_benchmarks::EXPERIMENT,
        super::x04_latency::EXPERIMENT,
        super::x05_passthrough::EXPERIMENT,
        super::x06_misses::EXPERIMENT,
        super::x07_prefetchers::EXPERIMENT,
        super::x08_ahci::EXPERIMENT,
        super::x09_bursts::EXPERIMENT,
        super::x10_cached_node::EXPERIMENT,
        super::x11_search_length::EXPERIMENT,
        super::x12_freelists_strict::EXPERIMENT,
        super::x13_freelists_deferred::EXPERIMENT,
        super::x14_eiovar::EXPERIMENT,
        super::x15_sweeps::EXPERIMENT,
        super::x16_live_set::EXPERIMENT,
        super::x17_freebsd::EXPERIMENT,
        super::x18_fujita::EXPERIMENT,
        super::x19_flush_memory::EXPERIMENT,
        super::x26_windows::EXPERIMENT,
    ];

    /// The experiment of that id, in whatever case.
    pub fn find(id: &str) -> Option<&'static Self> {
        let same = |experiment: &&Self| experiment.id.eq_ignore_ascii_case(id);
        Self::ALL.iter().find(same)
    }

    /// Runs it.
    ///
    /// # Errors
    /// It could not be run to its end.
    pub fn run(&self, setting: &Setting) -> Result<Finding, LabError> {
        let begin = Instant::now();
        let found = (self.measure)(setting)?;
        Ok(Finding {
            id: self.id,
            title: self.title,
            source: self.source,
            method: found.method,
            verdict: Verdict::of(&found.rows),
            explanation: found.explanation,
            notes: found.notes,
            rows: found.rows,
            figures: found.figures,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_order_and_found_in_any_case() {
        assert!(Experiment::ALL.is_sorted_by_key(|experiment| experiment.id));
        assert_eq!(Experiment::find("x10").map(|found| found.id), Some("X10"));
        assert!(Experiment::find("X99").is_none());
    }

    #[test]
    fn experiments_about_time_have_whole_rows() {
        for (id, rows) in [
            ("X03", 10 * 7 + 8 * 20 + 2 * 10),
            ("X04", 14),
            ("X05", 4),
            ("X18", 11),
        ] {
            let experiment = Experiment::find(id).unwrap();
            let found = experiment.run(&Setting::smoke()).unwrap();
            assert_eq!(found.rows.len(), rows, "{id}");
            for row in &found.rows {
                let measured = row.measured.unwrap().median;
                assert!(measured.is_finite(), "{id} {}", row.what);
            }
        }
    }

    #[test]
    fn nothing_is_stale_where_nothing_may_be() {
        let experiment = Experiment::find("X26").unwrap();
        let found = experiment.run(&Setting::smoke()).unwrap();
        assert_eq!(found.verdict, Verdict::Reproduced, "{:#?}", found.rows);
    }
}
