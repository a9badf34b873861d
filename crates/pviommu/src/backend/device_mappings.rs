//! The guest's view of one device's mappings: GIOVA to GPA.
//!
//! The I/O page table holds host addresses. Validation, unpinning and migration need guest
//! addresses, which this map stores for each page.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{Direction, Iova};

use crate::wire::{Gpa, PAGE_BYTES};

/// Pages per leaf, and address bits of a leaf.
const LEAF_PAGES: usize = 512;
const LEAF_SHIFT: u32 = 21;
/// Leaves per branch (1 GiB of addresses), and bits of a leaf's index in its branch.
const BRANCH_LEAVES: usize = 512;
const BRANCH_SHIFT: u32 = 9;

const PRESENT: u64 = 1;
const TO_DEVICE: u64 = 2;
const FROM_DEVICE: u64 = 4;

/// Error: the limit of leaves or memory does not allow another leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoLeaf;

/// Mappings in 2 MiB of addresses, at least one.
#[derive(Debug)]
struct Leaf {
    /// GPA and direction; 0 if unmapped.
    entries: Box<[u64; LEAF_PAGES]>,
    live: u16,
}

/// 1 GiB of addresses with at least one mapping: for each leaf, its index in `leaves` plus one, or
/// 0.
#[derive(Debug)]
struct Branch {
    leaf_indices: Box<[u32; BRANCH_LEAVES]>,
    live: u16,
}

/// Mappings of one device. The tree has few branches, so a lookup takes the same time with many
/// mappings as with few.
#[derive(Debug)]
pub(super) struct DeviceMappings {
    leaves: Vec<Leaf>,
    /// By address in units of 1 GiB.
    branches: BTreeMap<u64, Branch>,
    /// Indices of empty leaves, for reuse.
    free: Vec<u32>,
    leaves_max: u64,
    live: u64,
}

impl DeviceMappings {
    /// Creates an empty map with mappings in at most `leaves_max` regions of 2 MiB.
    pub(super) fn new(leaves_max: u64) -> Self {
        Self {
            leaves: Vec::new(),
            branches: BTreeMap::new(),
            free: Vec::new(),
            leaves_max,
            live: 0,
        }
    }

    /// Returns the number of mapped pages.
    #[inline]
    pub(super) const fn live(&self) -> u64 {
        self.live
    }

    /// Returns the mapping of `giova`.
    #[inline]
    pub(super) fn get(&self, giova: Iova) -> Option<(Gpa, Direction)> {
        let leaf_index = self.leaf_index(giova)?;
        let leaf = self.leaves.get(leaf_index as usize)?;
        decode(*leaf.entries.get(page_of(giova))?)
    }

    /// Adds a mapping. The page must be unmapped.
    #[inline]
    pub(super) fn insert(
        &mut self,
        giova: Iova,
        gpa: Gpa,
        direction: Direction,
    ) -> Result<(), NoLeaf> {
        let leaf_index = match self.leaf_index(giova) {
            Some(leaf_index) => leaf_index,
            None => self.grow(giova)?,
        };
        let leaf = self.leaves.get_mut(leaf_index as usize).ok_or(NoLeaf)?;
        let entry = leaf.entries.get_mut(page_of(giova)).ok_or(NoLeaf)?;
        if *entry == 0 {
            leaf.live += 1;
            self.live += 1;
        }
        *entry = encode(gpa, direction);
        Ok(())
    }

    /// Removes a mapping.
    #[inline]
    pub(super) fn remove(&mut self, giova: Iova) -> Option<(Gpa, Direction)> {
        let leaf_index = self.leaf_index(giova)?;
        let leaf = self.leaves.get_mut(leaf_index as usize)?;
        let entry = leaf.entries.get_mut(page_of(giova))?;
        let old = decode(*entry)?;
        *entry = 0;
        leaf.live = leaf.live.saturating_sub(1);
        self.live = self.live.saturating_sub(1);
        if leaf.live == 0 {
            self.free_leaf(number_of(giova), leaf_index);
        }
        Some(old)
    }

    /// Returns all mappings in order of address.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Iova, Gpa, Direction)> + '_ {
        let leaves = self.branches.iter().flat_map(|(number, branch)| {
            let leaf_indices = branch.leaf_indices.iter().zip(0_u64..);
            leaf_indices.filter_map(move |(leaf_index, leaf)| {
                let leaf_index = leaf_index.checked_sub(1)?;
                Some(((number << BRANCH_SHIFT) | leaf, leaf_index))
            })
        });
        leaves.flat_map(move |(number, leaf_index)| {
            let leaf = self.leaves.get(leaf_index as usize);
            let entries = leaf.map_or(&[][..], |leaf| &leaf.entries[..]);
            entries.iter().zip(0_u64..).filter_map(move |(raw, page)| {
                let (gpa, direction) = decode(*raw)?;
                let giova = (number << LEAF_SHIFT) | (page * PAGE_BYTES);
                Some((Iova::new(giova), gpa, direction))
            })
        })
    }

    #[inline]
    fn leaf_index(&self, giova: Iova) -> Option<u32> {
        let number = number_of(giova);
        let branch = self.branches.get(&(number >> BRANCH_SHIFT))?;
        let leaf_index = branch.leaf_indices.get(number as usize % BRANCH_LEAVES)?;
        leaf_index.checked_sub(1)
    }

    #[cold]
    fn grow(&mut self, giova: Iova) -> Result<u32, NoLeaf> {
        let leaf_index = match self.free.pop() {
            Some(leaf_index) => leaf_index,
            None => {
                let leaf_index = self.leaves.len() as u64;
                if leaf_index >= self.leaves_max || self.leaves.try_reserve(1).is_err() {
                    return Err(NoLeaf);
                }
                self.leaves.push(Leaf {
                    entries: Box::new([0; LEAF_PAGES]),
                    live: 0,
                });
                u32::try_from(leaf_index).map_err(|_| NoLeaf)?
            }
        };
        let number = number_of(giova);
        let none = || Branch {
            leaf_indices: Box::new([0; BRANCH_LEAVES]),
            live: 0,
        };
        let branch = self.branches.entry(number >> BRANCH_SHIFT);
        let branch = branch.or_insert_with(none);
        if let Some(entry) = branch.leaf_indices.get_mut(number as usize % BRANCH_LEAVES) {
            *entry = leaf_index.saturating_add(1);
            branch.live += 1;
        }
        Ok(leaf_index)
    }

    /// Frees an empty leaf.
    #[cold]
    fn free_leaf(&mut self, number: u64, leaf_index: u32) {
        if let Some(branch) = self.branches.get_mut(&(number >> BRANCH_SHIFT)) {
            if let Some(entry) = branch.leaf_indices.get_mut(number as usize % BRANCH_LEAVES) {
                *entry = 0;
            }
            branch.live = branch.live.saturating_sub(1);
            if branch.live == 0 {
                self.branches.remove(&(number >> BRANCH_SHIFT));
            }
        }
        self.free.push(leaf_index);
    }
}

#[inline]
fn number_of(giova: Iova) -> u64 {
    giova.get() >> LEAF_SHIFT
}

#[inline]
fn page_of(giova: Iova) -> usize {
    (giova.get() / PAGE_BYTES) as usize % LEAF_PAGES
}

#[inline]
fn encode(gpa: Gpa, direction: Direction) -> u64 {
    let bits = match direction {
        Direction::Bidirectional => TO_DEVICE | FROM_DEVICE,
        Direction::ToDevice => TO_DEVICE,
        Direction::FromDevice => FROM_DEVICE,
    };
    gpa.get() | bits | PRESENT
}

#[inline]
fn decode(raw: u64) -> Option<(Gpa, Direction)> {
    let direction = match raw & (TO_DEVICE | FROM_DEVICE) {
        _ if raw & PRESENT == 0 => return None,
        TO_DEVICE => Direction::ToDevice,
        FROM_DEVICE => Direction::FromDevice,
        _ => Direction::Bidirectional,
    };
    Some((Gpa::new(raw & !(PAGE_BYTES - 1)), direction))
}
