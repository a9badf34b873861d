//! The guest's view of one device's mappings: GIOVA to GPA.
//!
//! The I/O page table holds host addresses. What a request may do, what an unmap unpins and what migrates is a matter of guest addresses, and
//! is kept here, by the page.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{Direction, Iova};

use crate::wire::{Gpa, PAGE_BYTES};

/// Pages of a leaf, and the address bits of one.
const LEAF_PAGES: usize = 512;
const LEAF_SHIFT: u32 = 21;
/// Leaves found again without a search, by the low bits of their number.
const KNOWN: usize = 64;

const PRESENT: u64 = 1;
const TO_DEVICE: u64 = 2;
const FROM_DEVICE: u64 = 4;

/// There is no room for another leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// 2 MiB of addresses of which a page is mapped.
#[derive(Debug)]
struct Leaf {
    /// GPA and direction; 0 where nothing is mapped.
    entries: Box<[u64; LEAF_PAGES]>,
    live: u16,
}

/// Mappings of one device.
#[derive(Debug)]
pub(super) struct View {
    leaves: Vec<Leaf>,
    /// Number of a leaf (address over 2 MiB) to its place in `leaves`.
    index: BTreeMap<u64, u32>,
    /// Places whose leaf is empty and stands in for the next one.
    free: Vec<u32>,
    /// Number and place of leaves that were looked for; a number of all ones is none.
    known: [(u64, u32); KNOWN],
    leaves_max: u64,
    live: u64,
}

impl View {
    /// Nothing mapped; at most `leaves_max` stretches of 2 MiB at a time.
    pub(super) fn new(leaves_max: u64) -> Self {
        Self {
            leaves: Vec::new(),
            index: BTreeMap::new(),
            free: Vec::new(),
            known: [(u64::MAX, 0); KNOWN],
            leaves_max,
            live: 0,
        }
    }

    /// Number of mapped pages.
    #[inline]
    pub(super) const fn live(&self) -> u64 {
        self.live
    }

    /// Where `giova` leads.
    #[inline]
    pub(super) fn get(&mut self, giova: Iova) -> Option<(Gpa, Direction)> {
        let place = self.place(giova)?;
        let leaf = self.leaves.get(place as usize)?;
        decode(*leaf.entries.get(page_of(giova))?)
    }

    /// Notes a mapping; the page is not mapped.
    #[inline]
    pub(super) fn insert(
        &mut self,
        giova: Iova,
        gpa: Gpa,
        direction: Direction,
    ) -> Result<(), Full> {
        let place = match self.place(giova) {
            Some(place) => place,
            None => self.grow(giova)?,
        };
        let leaf = self.leaves.get_mut(place as usize).ok_or(Full)?;
        let entry = leaf.entries.get_mut(page_of(giova)).ok_or(Full)?;
        if *entry == 0 {
            leaf.live += 1;
            self.live += 1;
        }
        *entry = encode(gpa, direction);
        Ok(())
    }

    /// Forgets a mapping.
    #[inline]
    pub(super) fn remove(&mut self, giova: Iova) -> Option<(Gpa, Direction)> {
        let place = self.place(giova)?;
        let leaf = self.leaves.get_mut(place as usize)?;
        let entry = leaf.entries.get_mut(page_of(giova))?;
        let old = decode(*entry)?;
        *entry = 0;
        leaf.live = leaf.live.saturating_sub(1);
        self.live = self.live.saturating_sub(1);
        if leaf.live == 0 {
            self.shed(number_of(giova), place);
        }
        Some(old)
    }

    /// All mappings in order of address.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Iova, Gpa, Direction)> + '_ {
        self.index.iter().flat_map(move |(number, place)| {
            let leaf = self.leaves.get(*place as usize);
            let entries = leaf.map_or(&[][..], |leaf| &leaf.entries[..]);
            entries.iter().zip(0_u64..).filter_map(move |(raw, page)| {
                let (gpa, direction) = decode(*raw)?;
                let giova = (number << LEAF_SHIFT) | (page * PAGE_BYTES);
                Some((Iova::new(giova), gpa, direction))
            })
        })
    }

    #[inline]
    fn place(&mut self, giova: Iova) -> Option<u32> {
        let number = number_of(giova);
        let known = self.known.get_mut(number as usize % KNOWN)?;
        if known.0 == number {
            return Some(known.1);
        }
        let place = *self.index.get(&number)?;
        *known = (number, place);
        Some(place)
    }

    #[cold]
    fn grow(&mut self, giova: Iova) -> Result<u32, Full> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                let place = self.leaves.len() as u64;
                if place >= self.leaves_max || self.leaves.try_reserve(1).is_err() {
                    return Err(Full);
                }
                self.leaves.push(Leaf {
                    entries: Box::new([0; LEAF_PAGES]),
                    live: 0,
                });
                u32::try_from(place).map_err(|_| Full)?
            }
        };
        self.index.insert(number_of(giova), place);
        Ok(place)
    }

    /// A leaf has become empty.
    #[cold]
    fn shed(&mut self, number: u64, place: u32) {
        self.index.remove(&number);
        if let Some(known) = self.known.get_mut(number as usize % KNOWN)
            && known.0 == number
        {
            known.0 = u64::MAX;
        }
        self.free.push(place);
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
