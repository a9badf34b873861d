//! Maps that wait for a slot of their ring (rIOMMU section 4: overflow is legal, "the driver should
//! slow down").

use std::collections::{BTreeMap, HashMap};

use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, PhysRange};

use crate::layer::{RINGS, ring_index};

/// A waiting map, as the trace requests it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StalledMap {
    /// Slot of the mapping.
    pub id: MappingId,
    /// Index of the CPU.
    pub cpu: u16,
    /// Segments of the buffer.
    pub pieces: Box<[PhysRange]>,
}

/// One queue for each (device, direction), first in, first out. Removal from the middle takes
/// logarithmic time.
#[derive(Debug, Default)]
pub struct StalledMaps {
    /// Queues by ring, each ordered by ticket.
    queues: Vec<BTreeMap<i64, StalledMap>>,
    /// The next ticket.
    next: i64,
    /// Ticket of each mapping.
    turns: HashMap<MappingId, i64>,
}

/// Returns the index of a ring among those of all devices.
#[inline]
pub(super) fn ring_number(device: DeviceIndex, direction: Direction) -> usize {
    device.index() * RINGS + ring_index(direction)
}

impl StalledMaps {
    /// Returns true if no map waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Returns the number of waiting maps.
    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// Returns true if a map would have to wait behind others of its ring.
    #[inline]
    pub fn queues(&self, device: DeviceIndex, direction: Direction) -> bool {
        let queue = self.queues.get(ring_number(device, direction));
        queue.is_some_and(|queue| !queue.is_empty())
    }

    /// Appends a map to the queue of its ring.
    #[cold]
    pub fn push_back(&mut self, device: DeviceIndex, direction: Direction, map: StalledMap) {
        let ring = ring_number(device, direction);
        if self.queues.len() <= ring {
            self.queues.resize_with(ring + 1, BTreeMap::new);
        }
        self.turns.insert(map.id, self.next);
        self.queues[ring].insert(self.next, map);
        self.next += 1;
    }

    /// Removes the first map from the queue of a ring.
    pub fn pop(&mut self, device: DeviceIndex, direction: Direction) -> Option<StalledMap> {
        let (_, first) = self
            .queues
            .get_mut(ring_number(device, direction))?
            .pop_first()?;
        self.turns.remove(&first.id);
        Some(first)
    }

    /// Puts a map back in front of its queue.
    pub fn push_front(&mut self, device: DeviceIndex, direction: Direction, map: StalledMap) {
        if let Some(queue) = self.queues.get_mut(ring_number(device, direction)) {
            let first = queue.first_key_value().map_or(self.next, |(turn, _)| *turn);
            self.turns.insert(map.id, first - 1);
            queue.insert(first - 1, map);
        }
    }

    /// Removes the map of a mapping that has ended. Returns true if the map waited.
    pub fn give_up(&mut self, device: DeviceIndex, direction: Direction, id: MappingId) -> bool {
        let Some(queue) = self.queues.get_mut(ring_number(device, direction)) else {
            return false;
        };
        let Some(turn) = self.turns.get(&id) else {
            return false;
        };
        if queue.get(turn).is_none_or(|map| map.id != id) {
            return false;
        }
        queue.remove(turn);
        self.turns.remove(&id);
        true
    }

    /// Removes all maps and returns their number by ring.
    pub fn clear(&mut self) -> Vec<u64> {
        self.turns.clear();
        let waited = self.queues.drain(..).map(|queue| queue.len() as u64);
        waited.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_queues_of_their_own() {
        let (rx, tx) = (Direction::FromDevice, Direction::ToDevice);
        let device = DeviceIndex(1);
        let map = |id| StalledMap {
            id: MappingId(id),
            cpu: 0,
            pieces: Box::default(),
        };
        let mut stalled = StalledMaps::default();
        assert!(stalled.is_empty() && !stalled.queues(device, rx));
        for id in 0..4 {
            stalled.push_back(device, rx, map(id));
        }
        assert!(stalled.queues(device, rx) && !stalled.queues(device, tx));
        assert!(!stalled.queues(DeviceIndex(0), rx) && !stalled.queues(DeviceIndex(9), rx));
        assert!(stalled.give_up(device, rx, MappingId(1)));
        assert!(!stalled.give_up(device, rx, MappingId(1)));
        assert!(!stalled.give_up(device, tx, MappingId(2)));
        let first = stalled.pop(device, rx).unwrap();
        assert_eq!(first, map(0));
        stalled.push_front(device, rx, first);
        let left: Vec<u32> =
            std::iter::from_fn(|| stalled.pop(device, rx).map(|map| map.id.0)).collect();
        assert_eq!(left, [0, 2, 3]);
        assert!(stalled.is_empty());
        stalled.push_back(device, tx, map(7));
        assert_eq!((stalled.clear().iter().sum(), stalled.len()), (1, 0));
    }
}
