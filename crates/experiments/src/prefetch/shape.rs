//! Access pattern of a device, measured on its stream without a predictor, and the device's
//! classification (decision 0013).

use std::collections::{BTreeSet, HashMap, HashSet};

use ringfence_types::Pfn;
use serde::Serialize;

use super::stream::{BufferEvent, DeviceStream};

/// Measured access pattern. All fields except `reuse` are shares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Shape {
    /// Share of unmaps that take the oldest mapping of their ring.
    pub in_order: f64,
    /// Share of uses at which the ring's next buffer is already mapped.
    pub ahead: f64,
    /// Share of uses whose first page was used before.
    pub again: f64,
    /// Share of uses that follow the same page as at the page's previous use.
    pub same_next: f64,
    /// The same share, computed within each ring.
    pub same_next_in_ring: f64,
    /// Median number of uses between two uses of a page, divided by the maximum number of buffers
    /// mapped at once; 0 if no page recurs.
    pub reuse: f64,
}

/// Class of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The driver does not unmap the rings in order.
    OutOfOrder,
    /// The driver maps the next buffer only after the device used this one.
    OneAtATime,
    /// Addresses do not recur.
    NewAddresses,
    /// The order within each ring recurs; that of all rings together does not.
    RingsInterleave,
    /// Addresses recur in another order.
    AnotherOrder,
    /// The order recurs before the ring completes a lap.
    SmallCircle,
    /// The same addresses recur in the same order, a ring's length apart: the rIOMMU paper's
    /// device.
    Ring,
}

impl Kind {
    /// All classes, in the order in which [`Shape::kind`] tries them.
    pub const ALL: [Self; 7] = [
        Self::OutOfOrder,
        Self::OneAtATime,
        Self::NewAddresses,
        Self::RingsInterleave,
        Self::AnotherOrder,
        Self::SmallCircle,
        Self::Ring,
    ];

    /// Name in findings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfOrder => "out of order",
            Self::OneAtATime => "one at a time",
            Self::NewAddresses => "new addresses",
            Self::RingsInterleave => "rings interleave",
            Self::AnotherOrder => "another order",
            Self::SmallCircle => "small circle",
            Self::Ring => "ring",
        }
    }

    /// Reason for the predictors' results on such a device.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::OutOfOrder => {
                "the driver unmaps as requests complete, or several queues share a direction, so \
                the next buffer is not the next entry of a ring"
            }
            Self::OneAtATime => "the next buffer does not exist yet when this one is used",
            Self::NewAddresses => "no history has an address that occurs for the first time",
            Self::RingsInterleave => {
                "receiving and sending alternate in a different order each time, and a history has \
                one order for both"
            }
            Self::AnotherOrder => {
                "the allocator returns addresses in a different order each time, as caches that \
                are stacks do"
            }
            Self::SmallCircle => {
                "a few addresses recur while most mappings stay, so a history smaller than the \
                ring has them all"
            }
            Self::Ring => "the paper's device",
        }
    }

    /// Returns true if two entries per ring can predict: the next buffer is mapped, and the device
    /// uses it next.
    pub const fn in_order_and_ahead(self) -> bool {
        !matches!(self, Self::OutOfOrder | Self::OneAtATime)
    }
}

/// Minimum share of unmaps in order: one in ten may be out of order.
const IN_ORDER: f64 = 0.9;
/// Threshold of all other measures.
const HALF: f64 = 0.5;

impl Shape {
    /// Measures a stream.
    pub fn of(stream: &DeviceStream) -> Self {
        let mut measured = ShapeCounts {
            live: vec![BTreeSet::new(); stream.rings()],
            in_ring: vec![PageOrder::default(); stream.rings()],
            ..ShapeCounts::default()
        };
        for &event in stream.events() {
            measured.add_event(stream, event);
        }
        let (uses, unmaps) = (measured.uses.max(1) as f64, measured.unmaps.max(1) as f64);
        let same_in_ring: u64 = measured.in_ring.iter().map(|order| order.same).sum();
        measured.between.sort_unstable();
        let median = measured.between.get(measured.between.len() / 2);
        Self {
            in_order: measured.oldest as f64 / unmaps,
            ahead: measured.ahead as f64 / uses,
            again: measured.between.len() as f64 / uses,
            same_next: measured.device.same as f64 / uses,
            same_next_in_ring: same_in_ring as f64 / uses,
            reuse: median.map_or(0.0, |median| {
                *median as f64 / stream.ring_entries().max(1) as f64
            }),
        }
    }

    /// Classifies the device: the first class that fits.
    pub fn kind(&self) -> Kind {
        if self.in_order < IN_ORDER {
            Kind::OutOfOrder
        } else if self.ahead < HALF {
            Kind::OneAtATime
        } else if self.again < HALF {
            Kind::NewAddresses
        } else if self.same_next < HALF && self.same_next_in_ring >= HALF {
            Kind::RingsInterleave
        } else if self.same_next < HALF {
            Kind::AnotherOrder
        } else if self.reuse < HALF {
            Kind::SmallCircle
        } else {
            Kind::Ring
        }
    }
}

/// Predecessor of each page at its last use.
#[derive(Debug, Clone, Default)]
struct PageOrder {
    last: Option<Pfn>,
    before: HashMap<Pfn, Pfn>,
    same: u64,
}

impl PageOrder {
    fn visit(&mut self, page: Pfn) {
        let last = self.last.replace(page);
        if let Some(last) = last {
            let known = self.before.insert(page, last);
            self.same += u64::from(known == Some(last));
        }
    }
}

/// Counts over the events of a stream, from which [`Shape`] derives its shares.
#[derive(Debug, Default)]
struct ShapeCounts {
    /// Mapped entries of each ring.
    live: Vec<BTreeSet<u64>>,
    device: PageOrder,
    in_ring: Vec<PageOrder>,
    used: HashMap<Pfn, u64>,
    /// Mapped buffers with a recorded access. Only the first access to a buffer is a use.
    accessed: HashSet<u32>,
    between: Vec<u64>,
    uses: u64,
    unmaps: u64,
    oldest: u64,
    ahead: u64,
}

impl ShapeCounts {
    fn add_event(&mut self, stream: &DeviceStream, event: BufferEvent) {
        match event {
            BufferEvent::Map(buffer) => {
                let (ring, entry) = stream.ring_position(buffer);
                self.live[usize::from(ring)].insert(entry);
            }
            BufferEvent::Use(buffer) => self.add_use(stream, buffer),
            BufferEvent::Access { buffer, .. } => {
                if self.accessed.insert(buffer) {
                    self.add_use(stream, buffer);
                }
            }
            BufferEvent::Unmap(buffer) => {
                self.accessed.remove(&buffer);
                let (ring, entry) = stream.ring_position(buffer);
                let live = &mut self.live[usize::from(ring)];
                self.oldest += u64::from(live.first() == Some(&entry));
                self.unmaps += u64::from(live.remove(&entry));
            }
            BufferEvent::EndBurst(_) => {}
        }
    }

    fn add_use(&mut self, stream: &DeviceStream, buffer: u32) {
        let (ring, entry) = stream.ring_position(buffer);
        let ring = usize::from(ring);
        let Some(first) = stream.pages(buffer).first() else {
            return;
        };
        self.ahead += u64::from(self.live[ring].contains(&(entry + 1)));
        let page = first.lo();
        self.device.visit(page);
        self.in_ring[ring].visit(page);
        if let Some(before) = self.used.insert(page, self.uses) {
            self.between.push(self.uses - before);
        }
        self.uses += 1;
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::PfnRange;

    use super::*;

    /// A ring of `depth` buffers; buffer `n` has the page `page(n)`. Before each map, the oldest
    /// buffer is used and unmapped, or the youngest if `youngest` is set.
    fn ring(depth: u32, uses: u32, youngest: bool, page: impl Fn(u32) -> u64) -> DeviceStream {
        let mut stream = DeviceStream::new("ring".into());
        let ring = stream.add_ring();
        let mut live = std::collections::VecDeque::new();
        for number in 0..uses {
            live.push_back(stream.map(ring, PfnRange::new(Pfn::new(page(number)), 1)));
            if live.len() < depth as usize {
                continue;
            }
            let next = match youngest {
                true => live.pop_back(),
                false => live.pop_front(),
            };
            let next = next.unwrap();
            stream.use_buffer(next);
            stream.unmap(next);
        }
        stream
    }

    #[test]
    fn every_kind_is_classified() {
        // Pages in an irregular order that differs from lap to lap.
        let shuffled = |number: u32| {
            let (lap, slot) = (u64::from(number / 64), u64::from(number % 64));
            (slot * (2 * lap + 1) + lap * 17) % 64
        };
        for (stream, wanted) in [
            (ring(64, 1000, false, |n| u64::from(n % 64)), Kind::Ring),
            (
                ring(64, 1000, false, |n| u64::from(n % 64) * 37 % 64),
                Kind::Ring,
            ),
            (ring(64, 1000, false, u64::from), Kind::NewAddresses),
            (ring(64, 1000, false, shuffled), Kind::AnotherOrder),
            (
                ring(1, 1000, false, |n| u64::from(n % 64)),
                Kind::OneAtATime,
            ),
            (
                ring(64, 1000, true, |n| u64::from(n % 64)),
                Kind::OutOfOrder,
            ),
            // Sixteen pages recur among sixty-four mapped buffers.
            (
                ring(64, 1000, false, |n| u64::from(n % 16)),
                Kind::SmallCircle,
            ),
        ] {
            let shape = Shape::of(&stream);
            assert_eq!(shape.kind(), wanted, "{shape:?}");
        }
    }

    /// Two rings, each in order, used alternately at random.
    #[test]
    fn rings_that_take_turns_at_random_interleave() {
        let mut stream = DeviceStream::new("two".into());
        let rings = [stream.add_ring(), stream.add_ring()];
        let mut live = [const { std::collections::VecDeque::new() }; 2];
        let mut count = [0_u64; 2];
        let mut state = 1_u64;
        for _ in 0..4000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let which = usize::from(state >> 11 & 1 == 1);
            let page = count[which] % 32 + 1000 * which as u64;
            count[which] += 1;
            live[which].push_back(stream.map(rings[which], PfnRange::new(Pfn::new(page), 1)));
            if live[which].len() == 32 {
                let oldest = live[which].pop_front().unwrap();
                stream.use_buffer(oldest);
                stream.unmap(oldest);
            }
        }
        let shape = Shape::of(&stream);
        assert_eq!(shape.kind(), Kind::RingsInterleave, "{shape:?}");
        assert_eq!(shape.in_order, 1.0);
    }

    /// A buffer without pages is no use, also for the count of next entries.
    #[test]
    fn buffers_without_pages_count_for_no_share() {
        let mut stream = ring(64, 1000, false, |n| u64::from(n % 64));
        let ring = stream.add_ring();
        let none = std::iter::empty::<PfnRange>;
        let empty: Vec<u32> = (0..5000).map(|_| stream.map(ring, none())).collect();
        for buffer in empty {
            stream.use_buffer(buffer);
        }
        let shape = Shape::of(&stream);
        assert!(shape.ahead <= 1.0, "{shape:?}");
    }
}
