//! The events of one device as an IOTLB sees them: buffers mapped, used and unmapped.

use ringfence_types::{Iova, IovaRange, PfnRange};
use serde::Serialize;

/// Maximum pages of a buffer that count. Further pages are dropped, so that a damaged trace costs
/// no more than a sound one.
pub(super) const MAX_PAGES: u64 = 4096;

/// An event of a buffer, identified by its number in [`DeviceStream`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferEvent {
    /// The driver maps the buffer.
    Map(u32),
    /// The device accesses each of its pages once, in order. An assumption, if the source is a
    /// trace.
    Use(u32),
    /// The device accesses `count` of the buffer's pages, from page `first` of the buffer on.
    Access {
        /// Number of the buffer.
        buffer: u32,
        /// Index of the first page.
        first: u32,
        /// Number of pages.
        count: u32,
    },
    /// The driver unmaps the buffer; its pages are invalidated.
    Unmap(u32),
    /// A burst of unmaps of this ring ends, at which the ring is invalidated.
    EndBurst(u16),
}

/// Origin of the accesses in a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessSource {
    /// A synthetic device defines them.
    #[default]
    Generated,
    /// The trace has maps and unmaps only: each page of a buffer counts as accessed once, just
    /// before its unmap.
    Assumed,
    /// The trace has the DMAs of the device.
    Recorded,
}

impl AccessSource {
    /// Name in findings, after the name of a recorded device; empty for a synthetic one.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Generated => "",
            Self::Assumed => " (accesses assumed)",
            Self::Recorded => " (DMAs recorded)",
        }
    }
}

/// A mapped buffer.
#[derive(Debug, Clone, Copy)]
struct TracedBuffer {
    ring: u16,
    entry: u32,
    first: u32,
    count: u32,
}

/// The events of one device.
#[derive(Debug, Clone, Default)]
pub struct DeviceStream {
    /// Name of the source.
    pub name: String,
    /// Origin of the accesses.
    pub accesses: AccessSource,
    /// Number of recorded DMAs, or parts of them, outside all mappings. A sound record has none.
    pub unmapped_accesses: u64,
    events: Vec<BufferEvent>,
    buffers: Vec<TracedBuffer>,
    pages: Vec<PfnRange>,
    rings: Vec<StreamRing>,
    mapped_now: u64,
    live_pages: u64,
    /// Pages of all maps and accesses, which bound the memory and the time of a measurement.
    work: u64,
    /// Number of buffers that lost pages because they had more than 4096.
    pub cut_buffers: u64,
}

/// A ring of the device: its mappings of one direction.
#[derive(Debug, Clone, Default)]
struct StreamRing {
    mapped: u32,
    live: u64,
    max_live: u64,
}

impl DeviceStream {
    /// A stream without events.
    pub fn new(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Adds a ring and returns its number.
    pub(super) fn add_ring(&mut self) -> u16 {
        self.rings.push(StreamRing::default());
        u16::try_from(self.rings.len() - 1).unwrap_or(u16::MAX)
    }

    /// Maps a buffer at the next entry of `ring` and returns its number.
    pub(super) fn map(&mut self, ring: u16, ranges: impl IntoIterator<Item = PfnRange>) -> u32 {
        let first = self.pages.len();
        let mut left = MAX_PAGES;
        for range in ranges {
            let kept = range.pages().min(left);
            left -= kept;
            self.pages.extend(PfnRange::new(range.lo(), kept));
            if kept < range.pages() {
                self.cut_buffers += 1;
                break;
            }
        }
        let state = &mut self.rings[usize::from(ring)];
        let entry = state.mapped;
        state.mapped += 1;
        state.live += 1;
        state.max_live = state.max_live.max(state.live);
        self.mapped_now += MAX_PAGES - left;
        self.work += MAX_PAGES - left;
        self.live_pages = self.live_pages.max(self.mapped_now);
        let number = u32::try_from(self.buffers.len()).unwrap_or(u32::MAX);
        self.buffers.push(TracedBuffer {
            ring,
            entry,
            first: first as u32,
            count: (self.pages.len() - first) as u32,
        });
        self.events.push(BufferEvent::Map(number));
        number
    }

    /// Records that the device uses a buffer.
    pub(super) fn use_buffer(&mut self, number: u32) {
        self.work += self.pages(number).iter().map(PfnRange::pages).sum::<u64>();
        self.events.push(BufferEvent::Use(number));
    }

    /// Records that the device accesses `count` pages of a buffer, from its page `first` on. Pages
    /// that the buffer lost do not count.
    pub(super) fn access(&mut self, buffer: u32, first: u64, count: u64) {
        let kept = self.pages(buffer).iter().map(PfnRange::pages).sum::<u64>();
        let count = count.min(kept.saturating_sub(first));
        // A buffer keeps at most `MAX_PAGES` pages, so the numbers fit.
        if count > 0 {
            self.work += count;
            self.events.push(BufferEvent::Access {
                buffer,
                first: first as u32,
                count: count as u32,
            });
        }
    }

    /// Returns the number of pages of all maps and accesses.
    pub(super) fn work(&self) -> u64 {
        self.work
    }

    /// Records that the driver unmaps a buffer.
    pub(super) fn unmap(&mut self, number: u32) {
        let pages = self.pages(number).iter().map(PfnRange::pages).sum::<u64>();
        self.mapped_now = self.mapped_now.saturating_sub(pages);
        let (ring, _) = self.ring_position(number);
        let ring = &mut self.rings[usize::from(ring)];
        ring.live = ring.live.saturating_sub(1);
        self.events.push(BufferEvent::Unmap(number));
    }

    /// Records the end of a burst of unmaps.
    pub(super) fn end_burst(&mut self, ring: u16) {
        self.events.push(BufferEvent::EndBurst(ring));
    }

    /// Returns the events in order.
    pub fn events(&self) -> &[BufferEvent] {
        &self.events
    }

    /// Returns the pages of a buffer, one range for each segment. Empty if no buffer has this
    /// number.
    pub fn pages(&self, number: u32) -> &[PfnRange] {
        let buffer = self.buffers.get(number as usize);
        let pages = buffer.and_then(|buffer| {
            let first = buffer.first as usize;
            self.pages.get(first..first + buffer.count as usize)
        });
        pages.unwrap_or(&[])
    }

    /// Returns the ring of a buffer and its entry, which counts up from 0 without wrapping.
    pub fn ring_position(&self, number: u32) -> (u16, u64) {
        let buffer = self.buffers.get(number as usize);
        buffer.map_or((0, 0), |buffer| (buffer.ring, u64::from(buffer.entry)))
    }

    /// Returns the number of rings.
    pub fn rings(&self) -> usize {
        self.rings.len()
    }

    /// Returns the maximum number of live buffers of each ring, summed over the rings.
    pub fn ring_entries(&self) -> u64 {
        self.rings.iter().map(|ring| ring.max_live).sum()
    }

    /// Returns the maximum number of pages mapped at once.
    pub fn live_pages(&self) -> u64 {
        self.live_pages
    }
}

/// Returns the pages of `bytes` bytes from `iova`; `None` if `bytes` is 0 or the range wraps.
pub(super) fn pages_of(iova: Iova, bytes: u64) -> Option<PfnRange> {
    IovaRange::new(iova, bytes).map(|range| PfnRange::covering(&range))
}
