//! Options for reading a trace.

use crate::limits::TraceLimits;

/// Options for reading a trace. [`TraceOptions::default`] suits all traces that Linux writes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TraceOptions {
    /// Counts and skips malformed lines instead of failing at the first one.
    pub lenient: bool,
    /// Limits on the resources that the trace may use.
    pub limits: TraceLimits,
    /// Number of events that the reader looks ahead for a `dma:*` event that explains an `iommu:*`
    /// line.
    pub look_ahead: usize,
    /// Device that gets the `iommu:*` lines that no `dma:*` event explains.
    pub attribution: Attribution,
    /// With [`Addresses::Keep`], the reader also returns the addresses that the kernel recorded.
    pub addresses: Addresses,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            lenient: false,
            limits: TraceLimits::default(),
            look_ahead: 4096,
            attribution: Attribution::Auto,
            addresses: Addresses::Skip,
        }
    }
}

impl TraceOptions {
    /// Returns these options with `lenient` set.
    #[must_use]
    pub fn lenient(mut self) -> Self {
        self.lenient = true;
        self
    }

    /// Returns these options with [`Addresses::Keep`].
    #[must_use]
    pub fn with_addresses(mut self) -> Self {
        self.addresses = Addresses::Keep;
        self
    }
}

/// Contents of [`Chunk::addresses`](crate::Chunk::addresses).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Addresses {
    /// The reader leaves them empty, as a replay needs none.
    #[default]
    Skip,
    /// The reader fills them from the `iommu:*` lines of a text.
    Keep,
}

/// Device that gets the `iommu:*` lines that no `dma:*` event explains.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribution {
    /// The only device that the trace names, or a separate row if the trace names several. A stream
    /// shows only the lines read so far: if a second device appears later, earlier lines stay with
    /// the first device. For a trace opened by path, the reader first scans the whole file to
    /// decide.
    Auto,
    /// Always a separate row.
    OwnRow,
}
