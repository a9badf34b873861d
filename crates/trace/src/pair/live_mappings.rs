//! The live mappings at a point of the trace, and the lookup of an unmap's map.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;

use ringfence_types::Direction;
use rustc_hash::FxHashMap;

use super::window::Piece;
use crate::op::{DeviceIndex, MapClass, MappingId};

/// Number of starts that identify a scatterlist: Linux prints no more of them for a map.
pub(super) const LISTED: usize = 128;

/// Identifies the map of an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Key {
    /// Device and DMA address of a single mapping.
    Single { device: DeviceIndex, iova: u64 },
    /// Device and DMA address of a coherent buffer.
    Coherent { device: DeviceIndex, iova: u64 },
    /// Device, direction and a hash of the list of starts.
    Sg { device: DeviceIndex, list: u64 },
}

/// Returns the hash of a scatterlist for [`Key::Sg`]: direction, total number of segments, and the
/// first 128 starts. The hash has 64 well-mixed bits, so two different lists collide with a
/// probability of 2^-64. After a collision, an unmap of the same device ends the older of two
/// mappings instead of the newer.
pub(super) fn hash_list(direction: Direction, total: u32, starts: &[u64]) -> u64 {
    const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut hash = u64::from(total) << 2 | direction as u64;
    for &start in starts.iter().take(LISTED) {
        hash = (hash ^ start).wrapping_mul(MIX);
        hash ^= hash >> 29;
    }
    hash
}

/// One live mapping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapping {
    pub(super) device: DeviceIndex,
    pub(super) class: MapClass,
    key: Option<Key>,
    /// DMA address of the first byte; distinguishes scatterlists with the same key.
    iova: u64,
    /// Next younger and next older mapping of the same key.
    younger: Option<u32>,
    older: Option<u32>,
}

/// A mapping created by `iommu:map` lines alone.
#[derive(Debug, Clone)]
pub(super) struct IommuOnlyMapping {
    pub(super) id: MappingId,
    pub(super) device: DeviceIndex,
    pub(super) pieces: Vec<Piece>,
    /// First and last IOVA.
    pub(super) first: u64,
    pub(super) last: u64,
}

/// There are more mappings than a [`MappingId`] can number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyMappings;

/// Oldest and youngest mapping of a key.
#[derive(Debug, Clone, Copy)]
struct Queue {
    oldest: u32,
    youngest: u32,
}

#[derive(Debug, Default)]
pub(super) struct LiveMappings {
    /// By id; `None` if the id is free.
    mappings: Vec<Option<Mapping>>,
    /// Free ids; the id freed last is at the top.
    free: Vec<u32>,
    by_key: FxHashMap<Key, Queue>,
    /// Scatterlists by key and DMA address: one key can have several live mappings.
    sg_by_iova: FxHashMap<(Key, u64), u32>,
    /// By first IOVA and age. Two unnamed devices can use the same IOVA.
    iommu_only: BTreeMap<(u64, u64), IommuOnlyMapping>,
    age: u64,
    count: u64,
}

/// Number of mappings below a range that are checked for overlap with it.
const MAX_NEIGHBOURS: usize = 64;

impl LiveMappings {
    /// Returns the number of live mappings.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (MappingId, &Mapping)> {
        (0u32..)
            .zip(&self.mappings)
            .filter_map(|(id, mapping)| Some((MappingId(id), mapping.as_ref()?)))
    }

    /// Returns the live mapping that a map of this key and DMA address replaces.
    pub(super) fn replaced(&self, key: Key, iova: u64) -> Option<MappingId> {
        let id = match key {
            Key::Single { .. } | Key::Coherent { .. } => self.by_key.get(&key)?.oldest,
            Key::Sg { .. } => *self.sg_by_iova.get(&(key, iova))?,
        };
        Some(MappingId(id))
    }

    /// Begins a mapping with key `key`.
    pub(super) fn begin(
        &mut self,
        device: DeviceIndex,
        class: MapClass,
        key: Key,
        iova: u64,
    ) -> Result<MappingId, TooManyMappings> {
        let id = self.insert(Mapping {
            device,
            class,
            key: Some(key),
            iova,
            younger: None,
            older: None,
        })?;
        if matches!(key, Key::Sg { .. }) {
            self.sg_by_iova.insert((key, iova), id);
        }
        match self.by_key.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(Queue {
                    oldest: id,
                    youngest: id,
                });
            }
            Entry::Occupied(mut queue) => {
                let youngest = std::mem::replace(&mut queue.get_mut().youngest, id);
                if let Some(Some(mapping)) = self.mappings.get_mut(youngest as usize) {
                    mapping.younger = Some(id);
                }
                if let Some(Some(mapping)) = self.mappings.get_mut(id as usize) {
                    mapping.older = Some(youngest);
                }
            }
        }
        Ok(MappingId(id))
    }

    /// Ends the oldest mapping of `key`.
    pub(super) fn end(&mut self, key: Key) -> Option<(MappingId, Mapping)> {
        let Entry::Occupied(mut queue) = self.by_key.entry(key) else {
            return None;
        };
        let id = queue.get().oldest;
        let mapping = self.mappings.get_mut(id as usize)?.take()?;
        match mapping.younger {
            Some(younger) => {
                queue.get_mut().oldest = younger;
                if let Some(Some(next)) = self.mappings.get_mut(younger as usize) {
                    next.older = None;
                }
            }
            None => {
                queue.remove();
            }
        }
        self.sg_by_iova.remove(&(key, mapping.iova));
        self.free.push(id);
        self.count -= 1;
        Some((MappingId(id), mapping))
    }

    /// Ends a mapping that is replaced.
    pub(super) fn end_replaced(&mut self, id: MappingId) -> Option<Mapping> {
        let mapping = self.mappings.get_mut(id.index())?.take()?;
        self.free.push(id.0);
        self.count -= 1;
        let Some(key) = mapping.key else {
            return Some(mapping);
        };
        self.sg_by_iova.remove(&(key, mapping.iova));
        if let Some(queue) = self.by_key.get_mut(&key) {
            match (mapping.older, mapping.younger) {
                (None, None) => {
                    self.by_key.remove(&key);
                }
                (older, younger) => {
                    queue.oldest =
                        if older.is_none() { younger } else { None }.unwrap_or(queue.oldest);
                    queue.youngest =
                        if younger.is_none() { older } else { None }.unwrap_or(queue.youngest);
                    if let Some(Some(before)) =
                        older.and_then(|id| self.mappings.get_mut(id as usize))
                    {
                        before.younger = younger;
                    }
                    if let Some(Some(next)) =
                        younger.and_then(|id| self.mappings.get_mut(id as usize))
                    {
                        next.older = older;
                    }
                }
            }
        }
        Some(mapping)
    }

    /// Begins a mapping that only `iommu:map` lines show; `pieces` is not empty and has no gaps.
    pub(super) fn begin_iommu_only(
        &mut self,
        device: DeviceIndex,
        pieces: &[Piece],
    ) -> Result<MappingId, TooManyMappings> {
        let id = self.insert(Mapping {
            device,
            class: MapClass::IommuOnly,
            key: None,
            iova: 0,
            younger: None,
            older: None,
        })?;
        if let (Some(first), Some(last)) = (pieces.first(), pieces.last()) {
            self.age += 1;
            let only = IommuOnlyMapping {
                id: MappingId(id),
                device,
                pieces: pieces.to_vec(),
                first: first.iova,
                last: last.iova.wrapping_add(last.size - 1),
            };
            self.iommu_only.insert((first.iova, self.age), only);
        }
        Ok(MappingId(id))
    }

    /// Ends the mappings of `iommu:map` lines that an unmap of `first..=last` affects: the oldest
    /// mapping of exactly this range, or otherwise all overlapping mappings.
    pub(super) fn end_iommu_only(&mut self, first: u64, last: u64) -> Vec<IommuOnlyMapping> {
        let exact = self
            .iommu_only
            .range((first, 0)..=(first, u64::MAX))
            .find(|(_, only)| only.last == last)
            .map(|(&key, _)| key);
        let keys = match exact {
            Some(key) => vec![key],
            None => self.overlapping(first, last, None),
        };
        keys.into_iter()
            .filter_map(|key| self.remove_only(key))
            .collect()
    }

    /// Ends the mappings of `device` from `iommu:map` lines that overlap `first..=last`.
    pub(super) fn end_iommu_only_of(
        &mut self,
        device: DeviceIndex,
        first: u64,
        last: u64,
    ) -> Vec<IommuOnlyMapping> {
        let keys = self.overlapping(first, last, Some(device));
        keys.into_iter()
            .filter_map(|key| self.remove_only(key))
            .collect()
    }

    fn overlapping(&self, first: u64, last: u64, device: Option<DeviceIndex>) -> Vec<(u64, u64)> {
        let below = self
            .iommu_only
            .range(..(first, 0))
            .rev()
            .take(MAX_NEIGHBOURS);
        let inside = self.iommu_only.range((first, 0)..=(last, u64::MAX));
        below
            .filter(|(_, only)| only.last >= first)
            .chain(inside)
            .filter(|(_, only)| device.is_none_or(|device| only.device == device))
            .map(|(&key, _)| key)
            .collect()
    }

    fn remove_only(&mut self, key: (u64, u64)) -> Option<IommuOnlyMapping> {
        let only = self.iommu_only.remove(&key)?;
        self.end_replaced(only.id)?;
        Some(only)
    }

    fn insert(&mut self, mapping: Mapping) -> Result<u32, TooManyMappings> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let id = u32::try_from(self.mappings.len()).map_err(|_| TooManyMappings)?;
                self.mappings.push(None);
                id
            }
        };
        if let Some(slot) = self.mappings.get_mut(id as usize) {
            *slot = Some(mapping);
        }
        self.count += 1;
        Ok(id)
    }
}
