//! Streams from recorded traces, with the IOVAs that the kernel allocated (PF07).
//!
//! A trace of an emulated IOMMU has the DMAs of its devices (`dma_access` lines, `docs/TRACES.md`).
//! They are the accesses of the stream, as in the rIOMMU paper (section 5.4). A trace of a kernel
//! has no DMAs. As everywhere in this crate, the replay then assumes that the device accesses each
//! page of a buffer once, just before its unmap. [`AccessSource`] names the case.
//!
//! Only streaming mappings count. Coherent buffers stay mapped and in the IOTLB. An IOMMU does not
//! see which mappings are coherent. Linux maps these for both directions, and a buffer of a request
//! for one. Bidirectional mappings of a device with recorded DMAs therefore count as coherent.
//! Ranges that appear only in `iommu:*` lines have no device.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::Read;

use ringfence_trace::text::{RawChunk, RawEvent, RawKind, TraceReader};
use ringfence_trace::{DeviceIndex, TraceOptions};
use ringfence_types::{Direction, Iova};

use super::bursts::OpenBursts;
use super::mapped_ranges::MappedRanges;
use super::stream::{AccessSource, DeviceStream, pages_of};
use ringfence_lab::LabError;
use ringfence_lab::plan::BURST_NS;

/// Maximum number of segment addresses that a map event prints for a scatterlist.
const LISTED: usize = 128;

/// Pages of all maps and accesses of a trace, for any trace and for each of its lines. The limit
/// bounds the memory of the mapped pages, and the accesses of each prefetcher.
const MAX_WORK: u64 = 1 << 20;
const MAX_WORK_PER_LINE: u64 = 256;

/// Devices of a trace. Each has a row for each of its predictors and histories.
const MAX_DEVICES: usize = 256;

/// Key by which an unmap names a scatterlist: the number of segments and their first addresses.
type List = (usize, Vec<u64>);

/// A piece of a buffer: first address, and size in bytes.
type Segment = (Iova, u64);

/// State of one device while its trace is read, under one rule for its accesses.
#[derive(Debug, Default)]
struct Device {
    stream: DeviceStream,
    rings: HashMap<Direction, u16>,
    singles: HashMap<Iova, u32>,
    lists: HashMap<(Direction, List), VecDeque<u32>>,
    bursts: OpenBursts,
    /// Mapped ranges, if the accesses are recorded.
    mapped: MappedRanges,
    has_accesses: bool,
    /// True if the last event began a burst.
    began: bool,
}

impl Device {
    fn new(accesses: AccessSource) -> Self {
        let mut device = Self::default();
        device.stream.accesses = accesses;
        device
    }

    fn is_recorded(&self) -> bool {
        self.stream.accesses == AccessSource::Recorded
    }

    fn ring(&mut self, direction: Direction) -> u16 {
        let stream = &mut self.stream;
        *self
            .rings
            .entry(direction)
            .or_insert_with(|| stream.add_ring())
    }

    /// Ends the bursts that are over at `now`.
    fn end_bursts(&mut self, now: u64) {
        while let Some(ring) = self.bursts.end_oldest(now) {
            self.stream.end_burst(ring);
        }
    }

    /// Maps a buffer. `None` if it counts as coherent.
    fn map(
        &mut self,
        event: &RawEvent,
        direction: Direction,
        pieces: impl Iterator<Item = Segment> + Clone,
    ) -> Option<u32> {
        if self.is_recorded() && direction == Direction::Bidirectional {
            self.mapped.insert(None, pieces);
            return None;
        }
        let ring = self.ring(direction);
        if self.bursts.end(ring, event.cpu) {
            self.stream.end_burst(ring);
        }
        let pages = pieces
            .clone()
            .filter_map(|(iova, size)| pages_of(iova, size));
        let buffer = self.stream.map(ring, pages);
        if self.is_recorded() {
            self.mapped.insert(Some(buffer), pieces);
        }
        Some(buffer)
    }

    fn unmap(&mut self, event: &RawEvent, buffer: u32) {
        if self.stream.accesses == AccessSource::Assumed {
            self.stream.use_buffer(buffer);
        }
        self.end(buffer);
        let (ring, _) = self.stream.ring_position(buffer);
        self.began |= self.bursts.begin(ring, event.cpu, event.time.0);
    }

    /// Ends a mapping, which the trace may not show as unmapped.
    fn end(&mut self, buffer: u32) {
        self.mapped.remove_buffer(buffer);
        self.stream.unmap(buffer);
    }

    fn add_event(&mut self, event: &RawEvent, raw: &RawChunk) {
        match event.kind {
            RawKind::Map {
                direction,
                iova,
                size,
                ..
            } => {
                if let Some(replaced) = self.singles.remove(&iova) {
                    self.end(replaced);
                }
                let piece = std::iter::once((iova, size));
                if let Some(buffer) = self.map(event, direction, piece) {
                    self.singles.insert(iova, buffer);
                }
            }
            RawKind::Unmap { iova, .. } => match self.singles.remove(&iova) {
                Some(buffer) => self.unmap(event, buffer),
                None => self.mapped.remove_coherent(iova),
            },
            RawKind::MapSg {
                direction,
                nents,
                dma_addrs,
                sizes,
                phys_addrs,
                ..
            } => {
                let pieces = raw.list(dma_addrs).iter().zip(raw.list(sizes));
                let pieces = pieces.map(|(&start, &size)| (Iova::new(start), size));
                if let Some(buffer) = self.map(event, direction, pieces) {
                    let listed = raw.list(phys_addrs).iter().copied().take(LISTED).collect();
                    let key = (direction, (nents as usize, listed));
                    self.lists.entry(key).or_default().push_back(buffer);
                }
            }
            RawKind::UnmapSg {
                direction,
                phys_addrs,
                ..
            } => {
                let starts = raw.list(phys_addrs);
                let listed = starts.iter().copied().take(LISTED).collect();
                let key = (direction, (starts.len(), listed));
                let queue = self.lists.get_mut(&key);
                let buffer = queue.and_then(VecDeque::pop_front);
                if self.lists.get(&key).is_some_and(VecDeque::is_empty) {
                    self.lists.remove(&key);
                }
                if let Some(buffer) = buffer {
                    self.unmap(event, buffer);
                }
            }
            RawKind::Alloc { iova, size, .. } if self.is_recorded() => {
                self.mapped.insert(None, std::iter::once((iova, size)));
            }
            RawKind::Free { iova, .. } => self.mapped.remove_coherent(iova),
            RawKind::Access { iova, size, .. } if self.is_recorded() => {
                self.has_accesses = true;
                let stream = &mut self.stream;
                let whole = self.mapped.split((iova, size), |buffer, first, count| {
                    stream.access(buffer, first, count);
                });
                stream.unmapped_accesses += u64::from(!whole);
            }
            _ => {}
        }
    }
}

/// A device under both rules. A trace shows only later whether it has DMAs of the device.
#[derive(Debug)]
struct Candidates([Device; 2]);

impl Default for Candidates {
    fn default() -> Self {
        Self([AccessSource::Recorded, AccessSource::Assumed].map(Device::new))
    }
}

impl Candidates {
    /// Adds a line of the device. Returns true if it began a burst.
    fn add_event(&mut self, event: &RawEvent, raw: &RawChunk) -> bool {
        let mut began = false;
        for device in &mut self.0 {
            device.began = false;
            device.add_event(event, raw);
            began |= device.began;
        }
        began
    }

    fn work(&self) -> u64 {
        self.0.iter().map(|device| device.stream.work()).sum()
    }

    /// Returns the stream with recorded accesses if the trace has any, or else the other.
    fn choose(self) -> DeviceStream {
        let [mut recorded, mut assumed] = self.0;
        let chosen = match recorded.has_accesses {
            true => &mut recorded,
            false => &mut assumed,
        };
        chosen.end_bursts(u64::MAX);
        std::mem::take(&mut chosen.stream)
    }
}

/// Reads a trace. Returns a stream for each device with streaming mappings, in the order of their
/// appearance. `name` appears in errors and in the names of the streams.
///
/// # Errors
/// [`LabError::Trace`], [`LabError::StreamPages`] or [`LabError::StreamDevices`].
pub fn streams<R: Read>(name: &str, reader: R) -> Result<Vec<DeviceStream>, LabError> {
    let mut reader = TraceReader::new(name, reader, &TraceOptions::default());
    let mut raw = RawChunk::default();
    let mut devices: Vec<Candidates> = Vec::new();
    // Start of each burst, with its device.
    let mut bursts: BTreeSet<(u64, usize)> = BTreeSet::new();
    let (mut work, mut most) = (0, MAX_WORK);
    while reader.next_chunk(&mut raw).map_err(LabError::Trace)? {
        for event in &raw.events {
            let now = event.time.0;
            while let Some(&(since, device)) = bursts.first()
                && now >= since.saturating_add(BURST_NS)
            {
                bursts.pop_first();
                let candidates = devices.get_mut(device).map(|device| &mut device.0);
                for device in candidates.into_iter().flatten() {
                    device.end_bursts(now);
                }
            }
            most += MAX_WORK_PER_LINE;
            if let Some(index) = device_of(&event.kind) {
                let device = of(&mut devices, index);
                let before = device.work();
                if device.add_event(event, &raw) {
                    bursts.insert((now, index.index()));
                }
                work += device.work() - before;
            }
            if work > most {
                return Err(LabError::StreamPages { limit: most });
            }
        }
    }
    let mut streams = Vec::new();
    for (index, device) in (0..=u16::MAX).map(DeviceIndex).zip(devices) {
        let mut stream = device.choose();
        if stream.rings() == 0 {
            continue;
        }
        let row = reader.devices().get(index);
        let row = row.map_or("?", |row| row.name.as_str());
        stream.name = format!("{name} {row}");
        if streams.len() == MAX_DEVICES {
            return Err(LabError::StreamDevices { limit: MAX_DEVICES });
        }
        streams.push(stream);
    }
    Ok(streams)
}

/// Returns the device whose mappings or accesses a line shows.
fn device_of(kind: &RawKind) -> Option<DeviceIndex> {
    match *kind {
        RawKind::Map { device, .. }
        | RawKind::Unmap { device, .. }
        | RawKind::MapSg { device, .. }
        | RawKind::UnmapSg { device, .. }
        | RawKind::Alloc { device, .. }
        | RawKind::Free { device, .. }
        | RawKind::Access { device, .. } => Some(device),
        _ => None,
    }
}

/// Returns the state of a device, creating it if necessary.
fn of(devices: &mut Vec<Candidates>, index: DeviceIndex) -> &mut Candidates {
    if devices.len() <= index.index() {
        devices.resize_with(index.index() + 1, Candidates::default);
    }
    &mut devices[index.index()]
}
