//! Page reuse of recorded devices, counted as in Table 5 of the PVIOMMU paper, and the hit rate of
//! a reverse translation cache (RTC) on them.

use std::collections::{HashMap, HashSet};

use ringfence_pviommu::rtc::{Cycles, FlatCache, MappingKey, ResidencyPolicy, ReverseCache};
use ringfence_trace::{Chunk, MapClass, OpKind, Operations, TraceSource};
use ringfence_types::{Direction, Iova, Nanos, PhysRange};
use serde::Serialize;

use ringfence_lab::LabError;

/// T of PVIOMMU section 4.5: the length of a cycle.
const CYCLE_NS: u64 = 10_000_000_000;
/// Capacity of the cache in mappings: more than any device has pages.
const LIMIT: usize = 1 << 20;
const PAGE_BYTES: u64 = 4096;

/// Mappings of one device, and the pages that they cover.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReuseRow {
    /// Trace name and device name.
    pub source: String,
    /// Seconds from the first streaming map to the last streaming map or unmap.
    pub seconds: f64,
    /// Number of mappings. Each segment of a scatterlist counts as one.
    pub creates: u64,
    /// Number of distinct 4 KiB pages that the mappings cover.
    pub pages: u64,
    /// Mappings that the cache answers with T = 10 s and C = 3.
    pub hits: u64,
}

impl ReuseRow {
    /// Mappings per page: the last column of Table 5.
    pub fn reuse(&self) -> f64 {
        self.creates as f64 / self.pages.max(1) as f64
    }

    /// Share of mappings that the cache answers without a request to the host.
    pub fn answered(&self) -> f64 {
        self.hits as f64 / self.creates.max(1) as f64
    }
}

/// State of one device while its trace is read.
#[derive(Debug)]
struct Device {
    cache: FlatCache,
    pages: HashSet<u64>,
    creates: u64,
    begun: u64,
    now: u64,
    ends: u64,
}

impl Device {
    fn new(now: u64) -> Self {
        Self {
            cache: FlatCache::new(Cycles::PAPER, LIMIT, ResidencyPolicy::Fixed),
            pages: HashSet::new(),
            creates: 0,
            begun: now,
            now,
            ends: now.saturating_add(CYCLE_NS),
        }
    }

    fn advance(&mut self, now: u64) {
        // C + 1 cycles without a call evict every released mapping.
        for _ in 0..=Cycles::PAPER.get() {
            if self.ends > now {
                break;
            }
            self.cache.tick(|_, _| {});
            self.ends = self.ends.saturating_add(CYCLE_NS);
        }
        if self.ends <= now {
            let whole = now.saturating_sub(self.ends) / CYCLE_NS;
            let behind = whole.saturating_add(1).saturating_mul(CYCLE_NS);
            self.ends = self.ends.saturating_add(behind);
        }
        self.now = now;
    }

    /// Returns the key of the mapping if the cache can hold it; `None` if it cannot.
    fn map(&mut self, piece: &PhysRange, direction: Direction) -> Option<MappingKey> {
        self.creates += 1;
        let (first, last) = (piece.start().get(), piece.last().get());
        self.pages.extend(first / PAGE_BYTES..=last / PAGE_BYTES);
        let key = MappingKey::covering(piece, direction)?;
        if self.cache.acquire(key).is_none() {
            // Any IOVA will do: nothing translates it here.
            self.cache.insert(key, Iova::ZERO).ok()?;
        }
        Some(key)
    }
}

/// Counts the reuse of the devices of one trace.
#[derive(Debug, Default)]
pub(super) struct ReuseCounter {
    devices: Vec<Option<Device>>,
    live: HashMap<u32, Vec<MappingKey>>,
}

impl ReuseCounter {
    /// Counts the maps and unmaps of a chunk. Coherent mappings do not count.
    pub(super) fn add(&mut self, chunk: &Chunk) {
        for op in &chunk.ops {
            let index = op.device.index();
            if self.devices.len() <= index {
                self.devices.resize_with(index + 1, || None);
            }
            let Some(slot) = self.devices.get_mut(index) else {
                continue;
            };
            let Nanos(now) = op.time;
            match op.kind {
                OpKind::Map {
                    class: MapClass::Coherent,
                    ..
                } => {}
                OpKind::Map {
                    id,
                    direction,
                    segments,
                    ..
                } => {
                    let device = slot.get_or_insert_with(|| Device::new(now));
                    device.advance(now);
                    let pieces = chunk.segments_of(segments).iter();
                    let keys = pieces.filter_map(|piece| device.map(piece, direction));
                    self.live.insert(id.0, keys.collect());
                }
                OpKind::Unmap { id } => {
                    let (Some(device), Some(keys)) = (slot, self.live.remove(&id.0)) else {
                        continue;
                    };
                    device.advance(now);
                    for key in keys {
                        let _ = device.cache.release(key);
                    }
                }
            }
        }
    }

    /// Returns a row for each device with streaming mappings, by device index. The source of a row
    /// is `trace` and the device's name in `names`.
    pub(super) fn rows(&self, trace: &str, names: &[String]) -> Vec<ReuseRow> {
        let rows = self
            .devices
            .iter()
            .enumerate()
            .filter_map(|(index, device)| {
                let device = device.as_ref()?;
                let device_name = names.get(index).map_or("?", String::as_str);
                Some(ReuseRow {
                    source: format!("{trace} {device_name}"),
                    seconds: device.now.saturating_sub(device.begun) as f64 / 1e9,
                    creates: device.creates,
                    pages: device.pages.len() as u64,
                    hits: device.cache.stats().hits,
                })
            });
        rows.collect()
    }
}

/// Reads a trace. Returns a row for each device with streaming mappings, by device index.
///
/// # Errors
/// [`LabError::Trace`].
pub fn of_trace(
    name: &str,
    operations: &mut Operations<TraceSource>,
) -> Result<Vec<ReuseRow>, LabError> {
    let mut chunk = Chunk::default();
    let mut counter = ReuseCounter::default();
    while operations.next_chunk(&mut chunk).map_err(LabError::Trace)? {
        counter.add(&chunk);
    }
    let devices = operations.devices().iter();
    let names: Vec<String> = devices.map(|(_, device)| device.name.clone()).collect();
    Ok(counter.rows(name, &names))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;
    use ringfence_trace::{DeviceIndex, MapFlags, MappingId, Op, SegmentSpan, TraceOptions};
    use ringfence_types::PhysAddr;

    use super::*;

    fn line(at: &str, what: &str, page: u64) -> String {
        let size = 1500;
        match what {
            "map" => format!(
                "    t-1 [000] ..1.. {at}: dma_map_phys: 0000:03:00.0 dir=TO_DEVICE \
                dma_addr={page:x}000 size={size} phys_addr={page:x}000 attrs=\n"
            ),
            _ => format!(
                "    t-1 [000] ..1.. {at}: dma_unmap_phys: 0000:03:00.0 dir=TO_DEVICE \
                dma_addr={page:x}000 size={size} attrs=\n"
            ),
        }
    }

    fn of(text: String) -> Vec<ReuseRow> {
        let source = TraceSource::from_reader("t", Cursor::new(text.into_bytes())).unwrap();
        let mut operations = Operations::new("t", source, TraceOptions::default());
        of_trace("t", &mut operations).unwrap()
    }

    #[test]
    fn creates_pages_and_hits_are_counted_by_hand() {
        let mut text = String::new();
        for (at, what, page) in [
            ("1.0", "map", 5),
            ("2.0", "unmap", 5),
            ("3.0", "map", 5),
            ("4.0", "map", 6),
            ("5.0", "unmap", 5),
            ("6.0", "unmap", 6),
        ] {
            text += &line(&format!("{at}00000"), what, page);
        }
        let rows = of(text);
        let [row] = rows.as_slice() else {
            panic!("{rows:?}");
        };
        assert_eq!((row.creates, row.pages, row.hits), (3, 2, 1));
        assert_eq!((row.seconds, row.reuse()), (5.0, 1.5));
        assert!(row.source.starts_with("t ") && row.source.contains("03:00.0"));
    }

    /// Cycles end at 11, 21, 31 and 41 s. A mapping released at 2 s is in the cache just before
    /// 41 s and evicted at 41 s. After a longer pause it is still evicted.
    #[test]
    fn mappings_idle_for_c_cycles_are_evicted() {
        for (again, hits) in [("40.900000", 1), ("41.100000", 0), ("4000.000000", 0)] {
            let text =
                line("1.000000", "map", 5) + &line("2.000000", "unmap", 5) + &line(again, "map", 5);
            let rows = of(text);
            assert_eq!(rows.first().map(|row| row.hits), Some(hits), "{again}");
        }
    }

    /// A map or an unmap of one page.
    #[derive(Debug, Clone, Copy)]
    struct Event {
        time: u64,
        page: u64,
        direction: Direction,
        mapping: u32,
        is_map: bool,
    }

    /// Counts creates, pages and hits from the whole list of events. A map hits if the same page
    /// and direction is mapped already, or was unmapped in this cycle or the 3 before it. Cycles
    /// of 10 s begin with the first map (PVIOMMU section 4.5).
    fn brute_force(events: &[Event]) -> (u64, u64, u64) {
        let begun = events.first().map_or(0, |event| event.time);
        let cycle = |time: u64| (time - begun) / 10_000_000_000;
        let maps = events.iter().enumerate().filter(|(_, event)| event.is_map);
        let (mut creates, mut hits, mut pages) = (0, 0, Vec::new());
        for (index, map) in maps {
            creates += 1;
            if !pages.contains(&map.page) {
                pages.push(map.page);
            }
            let same = events.iter().take(index);
            let same =
                same.filter(|event| (event.page, event.direction) == (map.page, map.direction));
            let mut mapped = 0;
            let mut cached = false;
            for event in same {
                mapped += if event.is_map { 1 } else { -1 };
                cached |= !event.is_map && cycle(map.time) - cycle(event.time) <= 3;
            }
            hits += u64::from(mapped > 0 || cached);
        }
        (creates, pages.len() as u64, hits)
    }

    fn chunk_of(events: &[Event]) -> Chunk {
        let mut chunk = Chunk::default();
        for (number, event) in (0..).zip(events) {
            let start = PhysAddr::new(event.page * PAGE_BYTES);
            chunk
                .segments
                .push(PhysRange::new(start, PAGE_BYTES).unwrap());
            let id = MappingId(event.mapping);
            let map = OpKind::Map {
                id,
                direction: event.direction,
                class: MapClass::Single,
                flags: MapFlags::NONE,
                segments: SegmentSpan {
                    first: number,
                    count: 1,
                },
            };
            chunk.ops.push(Op {
                time: Nanos(event.time),
                device: DeviceIndex(0),
                cpu: 0,
                lines: 1,
                kind: if event.is_map {
                    map
                } else {
                    OpKind::Unmap { id }
                },
            });
        }
        chunk
    }

    /// Events from steps. Each waits for some seconds, then maps a page or unmaps the mapping that
    /// the index selects.
    fn events(steps: Vec<(u64, u64, Direction, bool, prop::sample::Index)>) -> Vec<Event> {
        let (mut time, mut events, mut live) = (7_000_000_000, Vec::new(), Vec::new());
        for (mapping, (seconds, page, direction, is_map, choice)) in (0..).zip(steps) {
            time += seconds * 1_000_000_000;
            let event = if is_map || live.is_empty() {
                let map = Event {
                    time,
                    page,
                    direction,
                    mapping,
                    is_map: true,
                };
                live.push(map);
                map
            } else {
                let map: Event = live.swap_remove(choice.index(live.len()));
                Event {
                    time,
                    is_map: false,
                    ..map
                }
            };
            events.push(event);
        }
        events
    }

    proptest! {
        #[test]
        fn counts_equal_a_brute_force_count(steps in proptest::collection::vec(
            (
                0..25_u64,
                0..6_u64,
                prop::sample::select(vec![Direction::ToDevice, Direction::FromDevice]),
                any::<bool>(),
                any::<prop::sample::Index>(),
            ),
            1..120,
        )) {
            let events = events(steps);
            let mut counter = ReuseCounter::default();
            counter.add(&chunk_of(&events));
            let rows = counter.rows("t", &[]);
            prop_assert_eq!(rows.len(), 1);
            let row = &rows[0];
            prop_assert_eq!((row.creates, row.pages, row.hits), brute_force(&events));
        }
    }
}
