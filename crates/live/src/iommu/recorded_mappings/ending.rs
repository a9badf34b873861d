//! The mappings that a batch of requests has ended.

use std::collections::BTreeMap;

use ringfence_types::{Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::Mapping;

/// Mappings in the order of their end, with an index of their addresses. A guest can end all
/// mappings of a domain and begin as many others in one request, so no search visits each of them.
#[derive(Debug, Default)]
pub(super) struct Ending {
    mappings: Vec<(RequesterId, Mapping)>,
    /// Disjoint ranges of each device's mappings: first address, and last.
    ranges: BTreeMap<(RequesterId, Iova), Iova>,
}

impl Ending {
    pub(super) fn extend(&mut self, ended: impl Iterator<Item = (RequesterId, Mapping)>) {
        for (device, mapping) in ended {
            self.add_range(device, mapping.iova);
            self.mappings.push((device, mapping));
        }
    }

    /// Returns true if a mapping of the device overlaps `range`.
    pub(super) fn overlaps(&self, device: RequesterId, range: &IovaRange) -> bool {
        self.last_before(device, range)
            .is_some_and(|(_, last)| last >= range.start())
    }

    /// Removes all mappings and returns them in order.
    pub(super) fn drain(&mut self) -> Vec<(RequesterId, Mapping)> {
        self.ranges.clear();
        std::mem::take(&mut self.mappings)
    }

    /// Returns the last range of the device that begins in `range` or before it.
    fn last_before(&self, device: RequesterId, range: &IovaRange) -> Option<(Iova, Iova)> {
        let mut before = self
            .ranges
            .range((device, Iova::ZERO)..=(device, range.last()));
        before.next_back().map(|((_, start), last)| (*start, *last))
    }

    /// Adds a range, merged with those that it overlaps.
    fn add_range(&mut self, device: RequesterId, mut range: IovaRange) {
        while let Some((start, last)) = self.last_before(device, &range)
            && last >= range.start()
            && let Some(merged) =
                IovaRange::inclusive(start.min(range.start()), last.max(range.last()))
        {
            self.ranges.remove(&(device, start));
            range = merged;
        }
        self.ranges.insert((device, range.start()), range.last());
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::{Permissions, PhysAddr};
    use ringfence_virtio_iommu::MemoryKind;

    use super::*;

    fn mapping(start: u64, pages: u64) -> Mapping {
        Mapping {
            iova: IovaRange::new(Iova::new(start << 12), pages << 12).unwrap(),
            physical: PhysAddr::new(0),
            permissions: Permissions::READ,
            memory: MemoryKind::Normal,
        }
    }

    /// Compares with a search of all mappings, for all ranges of up to four pages.
    #[test]
    fn overlaps_are_those_of_single_mappings() {
        let [one, other] = [8, 9].map(RequesterId::new);
        let ended = [
            (one, 2, 3),
            (one, 9, 1),
            (other, 7, 1),
            (one, 3, 1),
            (one, 4, 3),
            (one, 12, 1),
            (one, 8, 3),
        ];
        let mut ending = Ending::default();
        let ended = ended.map(|(device, start, pages)| (device, mapping(start, pages)));
        for count in 0..=ended.len() {
            for device in [one, other] {
                for (start, pages) in (0..16).flat_map(|at| (1..5).map(move |n| (at, n))) {
                    let range = mapping(start, pages).iova;
                    let expected = ended[..count]
                        .iter()
                        .any(|(of, mapping)| *of == device && mapping.iova.overlaps(&range));
                    assert_eq!(
                        ending.overlaps(device, &range),
                        expected,
                        "{device} {range}"
                    );
                }
            }
            ending.extend(ended.iter().skip(count).take(1).copied());
        }
        assert_eq!(ending.drain(), ended);
        assert!(!ending.overlaps(one, &mapping(0, 64).iova));
    }
}
