//! One node: its arrays, and the search and sort whose comparisons Table 6 counts.

use alloc::vec::Vec;

use super::arena::NodeId;
use super::kind::NodeKind;

/// Null pointer. A pointer to a node is its number plus one, so it is never 0.
pub(super) const NULL: u64 = 0;

/// Marks an absent key in a Node64's key array.
pub(super) const ABSENT: u8 = u8::MAX;

/// A node. The pointers of a leaf are values.
#[derive(Debug, Clone, Default)]
pub(super) struct Node {
    pub(super) kind: Option<NodeKind>,
    pub(super) leaf: bool,
    pub(super) length: usize,
    pub(super) parent: Option<NodeId>,
    pub(super) keys: Vec<u8>,
    pub(super) pointers: Vec<u64>,
    /// REUSING bits. Only leaves of the as-published tree use them.
    pub(super) reusing: [u64; 4],
}

/// Allocates empty arrays for a node of `kind`; `None` if out of memory.
pub(super) fn arrays(kind: NodeKind) -> Option<(Vec<u8>, Vec<u64>)> {
    let (mut keys, mut pointers) = (Vec::new(), Vec::new());
    keys.try_reserve_exact(kind.key_bytes()).ok()?;
    pointers.try_reserve_exact(kind.pointers()).ok()?;
    keys.resize(kind.key_bytes(), ABSENT);
    pointers.resize(kind.pointers(), NULL);
    Some((keys, pointers))
}

impl Node {
    /// Returns the sorted keys.
    #[inline]
    fn sorted(&self) -> &[u8] {
        self.keys.get(..self.length).unwrap_or(&[])
    }

    /// BinarySearch: returns the index of `key` among the sorted keys. Each step counts one
    /// three-way comparison: at most floor(log2 n) + 1.
    #[inline]
    pub(super) fn binary_search(&self, key: u8, comparisons: &mut u64) -> Option<usize> {
        let keys = self.sorted();
        let (mut low, mut high) = (0, keys.len());
        while low < high {
            let middle = (low + high) / 2;
            *comparisons = comparisons.wrapping_add(1);
            match keys.get(middle)?.cmp(&key) {
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
                core::cmp::Ordering::Equal => return Some(middle),
            }
        }
        None
    }

    /// InsertSort: moves larger keys and their pointers up from the tail, one comparison each, and
    /// inserts `key`. Returns its index. The node must have room.
    pub(super) fn insert_sort(&mut self, key: u8, comparisons: &mut u64) -> usize {
        let mut at = self.length.min(self.keys.len().saturating_sub(1));
        while let Some(before) = at.checked_sub(1) {
            *comparisons = comparisons.wrapping_add(1);
            if self.keys.get(before).is_none_or(|other| *other < key) {
                break;
            }
            self.keys.swap(before, at);
            self.pointers.swap(before, at);
            at = before;
        }
        if let (Some(slot), Some(pointer)) = (self.keys.get_mut(at), self.pointers.get_mut(at)) {
            (*slot, *pointer) = (key, NULL);
        }
        self.length += 1;
        at
    }

    /// Movel: closes the gap at `index` in the sorted keys and their pointers.
    pub(super) fn move_left(&mut self, index: usize) {
        if index >= self.length {
            return;
        }
        if let Some(keys) = self.keys.get_mut(index..self.length) {
            keys.rotate_left(1);
        }
        if let Some(pointers) = self.pointers.get_mut(index..self.length) {
            pointers.rotate_left(1);
        }
        self.length -= 1;
        if let Some(pointer) = self.pointers.get_mut(self.length) {
            *pointer = NULL;
        }
    }

    /// Returns the entry of `key` in a Node64's key array, without validating it.
    #[inline]
    pub(super) fn indirect(&self, key: u8) -> usize {
        usize::from(self.keys.get(usize::from(key)).copied().unwrap_or(ABSENT))
    }

    pub(super) fn set_indirect(&mut self, key: u8, index: usize) {
        if let Some(slot) = self.keys.get_mut(usize::from(key)) {
            *slot = u8::try_from(index).unwrap_or(ABSENT);
        }
    }

    /// Returns the pointer at `index`; NULL if out of bounds.
    #[inline]
    pub(super) fn pointer(&self, index: usize) -> u64 {
        self.pointers.get(index).copied().unwrap_or(NULL)
    }

    /// Stores a pointer; false if out of bounds.
    #[inline]
    pub(super) fn set_pointer(&mut self, index: usize, pointer: u64) -> bool {
        match self.pointers.get_mut(index) {
            Some(slot) => {
                *slot = pointer;
                true
            }
            None => false,
        }
    }

    /// Replaces the node's arrays by those of `kind` and fills them with `entries`, which are in
    /// ascending order of the keys.
    pub(super) fn refill(
        &mut self,
        kind: NodeKind,
        (keys, pointers): (Vec<u8>, Vec<u64>),
        entries: impl Iterator<Item = (u8, u64)>,
    ) {
        (self.kind, self.keys, self.pointers) = (Some(kind), keys, pointers);
        self.length = 0;
        for (key, pointer) in entries.take(kind.pointers()) {
            let index = match kind {
                NodeKind::Node256 => usize::from(key),
                NodeKind::Node64 => {
                    self.set_indirect(key, self.length);
                    self.length
                }
                _ => {
                    if let Some(slot) = self.keys.get_mut(self.length) {
                        *slot = key;
                    }
                    self.length
                }
            };
            self.set_pointer(index, pointer);
            self.length += 1;
        }
    }
}
