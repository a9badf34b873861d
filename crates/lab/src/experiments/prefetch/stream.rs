//! What one device does, as an IOTLB sees it: buffers mapped, used and unmapped.

use ringfence_types::{Iova, IovaRange, PfnRange};

/// Most pages of a buffer that count; what lies behind them is left out, so that a damaged trace
/// costs no more than a sound one.
const MAX_PAGES: u64 = 4096;

/// Something happens to a buffer, named by its number in [`DeviceStream`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferEvent {
    /// It is mapped.
    Map(u32),
    /// The device accesses each of its pages once, in order.
    Use(u32),
    /// It is unmapped; its pages are invalidated.
    Unmap(u32),
    /// A burst of unmaps of this ring ends. This is when a ring is invalidated.
    EndBurst(u16),
}

/// One mapping.
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
    /// What it comes from.
    pub name: String,
    events: Vec<BufferEvent>,
    buffers: Vec<TracedBuffer>,
    pages: Vec<PfnRange>,
    rings: Vec<StreamRing>,
    mapped_now: u64,
    live_pages: u64,
    /// Buffers of which pages were left out because they had more than 4096.
    pub cut_buffers: u64,
}

/// One ring of the device: its mappings of one direction.
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

    /// A new ring.
    pub(super) fn add_ring(&mut self) -> u16 {
        self.rings.push(StreamRing::default());
        u16::try_from(self.rings.len() - 1).unwrap_or(u16::MAX)
    }

    /// A buffer of `ring`, at the ring's next entry, is mapped; its number.
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

    /// The device uses a buffer.
    pub(super) fn use_buffer(&mut self, number: u32) {
        self.events.push(BufferEvent::Use(number));
    }

    /// A buffer is unmapped.
    pub(super) fn unmap(&mut self, number: u32) {
        let pages = self.pages(number).iter().map(PfnRange::pages).sum::<u64>();
        self.mapped_now = self.mapped_now.saturating_sub(pages);
        let (ring, _) = self.ring_position(number);
        let ring = &mut self.rings[usize::from(ring)];
        ring.live = ring.live.saturating_sub(1);
        self.events.push(BufferEvent::Unmap(number));
    }

    /// A burst of unmaps ends.
    pub(super) fn end_burst(&mut self, ring: u16) {
        self.events.push(BufferEvent::EndBurst(ring));
    }

    /// What happens, in order.
    pub fn events(&self) -> &[BufferEvent] {
        &self.events
    }

    /// The pages of a buffer, a range for each of its pieces; none for a number that no event
    /// names.
    pub fn pages(&self, number: u32) -> &[PfnRange] {
        let buffer = self.buffers.get(number as usize);
        let pages = buffer.and_then(|buffer| {
            let first = buffer.first as usize;
            self.pages.get(first..first + buffer.count as usize)
        });
        pages.unwrap_or(&[])
    }

    /// The ring of a buffer and its entry there, counted up from 0 without end.
    pub fn ring_position(&self, number: u32) -> (u16, u64) {
        let buffer = self.buffers.get(number as usize);
        buffer.map_or((0, 0), |buffer| (buffer.ring, u64::from(buffer.entry)))
    }

    /// How many rings there are.
    pub fn rings(&self) -> usize {
        self.rings.len()
    }

    /// Buffers alive at once, at most, summed over the rings: their sizes as far as they are used.
    pub fn ring_entries(&self) -> u64 {
        self.rings.iter().map(|ring| ring.max_live).sum()
    }

    /// Pages mapped at once, at most.
    pub fn live_pages(&self) -> u64 {
        self.live_pages
    }
}

/// The pages of `bytes` bytes from `iova`; `None` if there are none or they wrap.
pub(super) fn pages_of(iova: Iova, bytes: u64) -> Option<PfnRange> {
    IovaRange::new(iova, bytes).map(|range| PfnRange::covering(&range))
}
