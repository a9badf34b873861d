//! A judgement by a search over all events for every page.

use crate::random::Event;

/// A mapping of the reference: index of its map and its unmap, with the unmap's CPU.
struct Known {
    device: u64,
    write: bool,
    frames: std::ops::RangeInclusive<u64>,
    map: usize,
    unmap: Option<(usize, u16)>,
}

/// Counts exposures by a search over all events for every page: of stale and of mapped pages, of
/// pages mapped again, and the sum of the durations in us.
pub(crate) fn reference(
    events: &[(u64, Event)],
    window: u64,
    entries: usize,
) -> (u64, u64, u64, u64) {
    let mut known: Vec<Known> = Vec::new();
    for (index, &(_, event)) in events.iter().enumerate() {
        match event {
            Event::Map {
                device,
                first,
                bytes,
                write,
                ..
            } => {
                let last = first + (bytes.0 + bytes.1 - 1) / 4096;
                known.push(Known {
                    device,
                    write,
                    frames: first..=last,
                    map: index,
                    unmap: None,
                });
            }
            Event::Unmap { device, slot, cpu } => {
                let of = |known: &&mut Known| {
                    let Event::Map { slot: mapped, .. } = events[known.map].1 else {
                        return false;
                    };
                    known.device == device && mapped == slot && known.unmap.is_none()
                };
                known.iter_mut().find(of).unwrap().unmap = Some((index, cpu));
            }
            Event::Alloc { .. } | Event::Free { .. } => {}
        }
    }
    // The window of a mapping ends at this event and this time.
    let end = |mapping: &Known| -> Option<(usize, u64)> {
        let (unmap, cpu) = mapping.unmap?;
        let full = known
            .iter()
            .filter(|other| other.device == mapping.device)
            .filter_map(|other| other.unmap.filter(|&(at, on)| at > unmap && on == cpu))
            .map(|(at, _)| at);
        let mut full: Vec<usize> = full.collect();
        full.sort_unstable();
        let by_time = events[unmap].0 + window;
        let index = events.partition_point(|&(time, _)| time < by_time);
        let by_time = (index.max(unmap), by_time);
        // A queue of n entries has room for n - 1.
        let by_queue = full.get(entries - 2).map(|&at| (at, events[at].0));
        Some(by_queue.map_or(by_time, |by_queue| by_queue.min(by_time)))
    };
    let covers = |first: u64, order: u8, frame: u64| (first..first + (1 << order)).contains(&frame);
    let (mut stale, mut mapped, mut again, mut total) = (0, 0, 0, 0);
    for (at, &(time, event)) in events.iter().enumerate() {
        let Event::Alloc { first, order } = event else {
            continue;
        };
        for mapping in known.iter().filter(|mapping| mapping.map < at) {
            let end = end(mapping);
            if end.is_some_and(|(ended, _)| ended <= at) {
                continue;
            }
            for frame in mapping
                .frames
                .clone()
                .filter(|&frame| covers(first, order, frame))
            {
                let maps_again =
                    |other: &Known| other.device == mapping.device && other.frames.contains(&frame);
                // A stale mapping that a later one replaces does not count.
                let replaced = known.iter().any(|other| {
                    mapping.unmap.is_some_and(|(unmap, _)| unmap < other.map)
                        && other.map < at
                        && maps_again(other)
                        && other.write == mapping.write
                });
                if replaced {
                    continue;
                }
                let is_live = mapping.unmap.is_none_or(|(unmap, _)| unmap > at);
                let later = events.iter().enumerate().skip(at + 1);
                let owner_ends = later.clone().find(|(_, (_, event))| match *event {
                    Event::Free { first, order } | Event::Alloc { first, order } => {
                        covers(first, order, frame)
                    }
                    _ => false,
                });
                let remap = known.iter().map(|other| other.map).filter(|&map| map > at);
                let remap = remap
                    .filter(|&map| maps_again(known.iter().find(|one| one.map == map).unwrap()))
                    .min();
                let owner_ends = owner_ends.map(|(index, &(time, _))| (index, time));
                let last = events.last().map_or(0, |&(time, _)| time);
                let end = end.unwrap_or((usize::MAX, last));
                let closed = owner_ends.map_or(end, |ends| if ends.0 < end.0 { ends } else { end });
                if remap.is_some_and(|map| map < closed.0) {
                    again += 1;
                    continue;
                }
                match is_live {
                    true => mapped += 1,
                    false => stale += 1,
                }
                total += closed.1 - time;
            }
        }
    }
    (stale, mapped, again, total)
}
