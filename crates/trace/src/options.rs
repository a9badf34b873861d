//! How to read a trace.

use crate::limits::TraceLimits;

/// How to read a trace. [`TraceOptions::default`] suits all traces that Linux wrote.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TraceOptions {
    /// Malformed lines are counted and skipped instead of ending the read.
    pub lenient: bool,
    /// Bounds on what the trace may ask for.
    pub limits: TraceLimits,
    /// How many events the reader looks ahead to find out whether a `dma:*` event explains an
    /// `iommu:*` line.
    pub look_ahead: usize,
    /// Whose the `iommu:*` lines are that no `dma:*` event explains.
    pub attribution: Attribution,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            lenient: false,
            limits: TraceLimits::default(),
            look_ahead: 4096,
            attribution: Attribution::Auto,
        }
    }
}

impl TraceOptions {
    /// The same, counting malformed lines instead of failing.
    #[must_use]
    pub fn lenient(mut self) -> Self {
        self.lenient = true;
        self
    }
}

/// Whose the `iommu:*` lines are that no `dma:*` event explains.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribution {
    /// The only device that the trace names, else a row of their own. A stream shows only what came
    /// so far: when a second device appears later, what was given to the first stays there. A trace
    /// opened by path is read ahead once to know for certain.
    Auto,
    /// Always a row of their own.
    OwnRow,
}
