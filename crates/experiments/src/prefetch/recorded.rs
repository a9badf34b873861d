//! Streams from recorded traces, with the IOVAs that the kernel allocated (PF07).
//!
//! A trace does not show device accesses. As everywhere in this crate, the replay assumes that the
//! device accesses each page of a buffer once, just before its unmap. Only streaming mappings
//! count. Coherent buffers stay mapped and in the IOTLB. Ranges that appear only in `iommu:*` lines
//! have no device.

use std::collections::{HashMap, VecDeque};
use std::io::Read;

use ringfence_trace::text::{RawChunk, RawEvent, RawKind, TraceReader};
use ringfence_trace::{DeviceIndex, TraceOptions};
use ringfence_types::{Direction, Iova, PfnRange};

use super::stream::{DeviceStream, pages_of};
use ringfence_lab::LabError;
use ringfence_lab::plan::BURST_NS;

/// Maximum number of segment addresses that a map event prints for a scatterlist.
const LISTED: usize = 128;

/// Key by which an unmap names a scatterlist: the number of segments and their first addresses.
type List = (usize, Vec<u64>);

/// State of one device while its trace is read.
#[derive(Debug, Default)]
struct Device {
    stream: DeviceStream,
    rings: HashMap<Direction, u16>,
    singles: HashMap<Iova, u32>,
    lists: HashMap<(Direction, List), VecDeque<u32>>,
    /// Open bursts: ring, CPU, and start time in nanoseconds.
    bursts: Vec<(u16, u16, u64)>,
}

impl Device {
    fn ring(&mut self, direction: Direction) -> u16 {
        let stream = &mut self.stream;
        *self
            .rings
            .entry(direction)
            .or_insert_with(|| stream.add_ring())
    }

    /// Ends the bursts for which `over` returns true.
    fn end_bursts(&mut self, over: impl Fn(u16, u16, u64) -> bool) {
        let stream = &mut self.stream;
        self.bursts.retain(|&(ring, cpu, since)| {
            let over = over(ring, cpu, since);
            if over {
                stream.end_burst(ring);
            }
            !over
        });
    }

    fn map(
        &mut self,
        event: &RawEvent,
        direction: Direction,
        pages: impl IntoIterator<Item = PfnRange>,
    ) -> u32 {
        let ring = self.ring(direction);
        self.end_bursts(|other, cpu, _| other == ring && cpu == event.cpu);
        self.stream.map(ring, pages)
    }

    fn unmap(&mut self, event: &RawEvent, buffer: u32) {
        self.stream.use_buffer(buffer);
        self.stream.unmap(buffer);
        let (ring, _) = self.stream.ring_position(buffer);
        let open = |&(other, cpu, _): &(u16, u16, u64)| other == ring && cpu == event.cpu;
        if !self.bursts.iter().any(open) {
            self.bursts.push((ring, event.cpu, event.time.0));
        }
    }
}

/// Reads a trace. Returns a stream for each device with streaming mappings, in the order of their
/// appearance. `name` appears in errors and in the names of the streams.
///
/// # Errors
/// [`LabError::Trace`].
pub fn streams<R: Read>(name: &str, reader: R) -> Result<Vec<DeviceStream>, LabError> {
    let mut reader = TraceReader::new(name, reader, &TraceOptions::default());
    let mut raw = RawChunk::default();
    let mut devices: Vec<Device> = Vec::new();
    while reader.next_chunk(&mut raw).map_err(LabError::Trace)? {
        for event in &raw.events {
            for device in &mut devices {
                device.end_bursts(|_, _, since| event.time.0 >= since.saturating_add(BURST_NS));
            }
            add_event(event, &raw, &mut devices);
        }
    }
    let mut streams = Vec::new();
    for (index, mut device) in (0..=u16::MAX).map(DeviceIndex).zip(devices) {
        device.end_bursts(|_, _, _| true);
        if device.stream.rings() == 0 {
            continue;
        }
        let row = reader.devices().get(index);
        let row = row.map_or("?", |row| row.name.as_str());
        device.stream.name = format!("{name} {row}");
        streams.push(device.stream);
    }
    Ok(streams)
}

/// Returns the state of a device, creating it if necessary.
fn of(devices: &mut Vec<Device>, index: DeviceIndex) -> &mut Device {
    if devices.len() <= index.index() {
        devices.resize_with(index.index() + 1, Device::default);
    }
    &mut devices[index.index()]
}

fn add_event(event: &RawEvent, raw: &RawChunk, devices: &mut Vec<Device>) {
    match event.kind {
        RawKind::Map {
            device,
            direction,
            iova,
            size,
            ..
        } => {
            let device = of(devices, device);
            if let Some(replaced) = device.singles.remove(&iova) {
                device.stream.unmap(replaced);
            }
            let buffer = device.map(event, direction, pages_of(iova, size));
            device.singles.insert(iova, buffer);
        }
        RawKind::Unmap { device, iova, .. } => {
            let device = of(devices, device);
            if let Some(buffer) = device.singles.remove(&iova) {
                device.unmap(event, buffer);
            }
        }
        RawKind::MapSg {
            device,
            direction,
            nents,
            dma_addrs,
            sizes,
            phys_addrs,
            ..
        } => {
            let device = of(devices, device);
            let pieces = raw.list(dma_addrs).iter().zip(raw.list(sizes));
            let pages = pieces.filter_map(|(&start, &size)| pages_of(Iova::new(start), size));
            let buffer = device.map(event, direction, pages);
            let listed = raw.list(phys_addrs).iter().copied().take(LISTED).collect();
            let key = (direction, (nents as usize, listed));
            device.lists.entry(key).or_default().push_back(buffer);
        }
        RawKind::UnmapSg {
            device,
            direction,
            phys_addrs,
        } => {
            let device = of(devices, device);
            let starts = raw.list(phys_addrs);
            let listed = starts.iter().copied().take(LISTED).collect();
            let key = (direction, (starts.len(), listed));
            let queue = device.lists.get_mut(&key);
            let buffer = queue.and_then(VecDeque::pop_front);
            if device.lists.get(&key).is_some_and(VecDeque::is_empty) {
                device.lists.remove(&key);
            }
            if let Some(buffer) = buffer {
                device.unmap(event, buffer);
            }
        }
        _ => {}
    }
}
