//! Options for reading a trace.

use crate::interrupt::Interrupt;
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
    /// With [`PageEvents::Keep`], the reader also returns the events of the page allocator.
    pub page_events: PageEvents,
    /// Ends the read early.
    pub interrupt: Interrupt,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            lenient: false,
            limits: TraceLimits::default(),
            look_ahead: 4096,
            attribution: Attribution::Auto,
            addresses: Addresses::Skip,
            page_events: PageEvents::Skip,
            interrupt: Interrupt::default(),
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

    /// Returns these options with [`PageEvents::Keep`].
    #[must_use]
    pub fn with_page_events(mut self) -> Self {
        self.page_events = PageEvents::Keep;
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

/// Contents of [`Chunk::page_events`](crate::Chunk::page_events).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PageEvents {
    /// The reader counts the events of the page allocator as unknown.
    #[default]
    Skip,
    /// The reader returns them, and the position of each operation's line. The segments of the
    /// operations are the physical addresses of the trace: the reader renames none.
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
