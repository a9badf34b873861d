//! The tree exactly as published in Figures 7 to 9 of the PVIOMMU paper, with its defects (errata
//! 11, 16).
//!
//! If the figures are incomplete, this implementation adds the minimum that lets them run:
//!
//! - InsertSort, Movel and the lines that add a key to a Node64 or Node256 update the node's
//!   length. Otherwise the second key would overwrite the first one.
//! - An absent key of a Node64 is [`ABSENT`] in its key array.
//! - Grow and Shrink, which the figures only name, keep the entries that Insert's test in line 50
//!   finds.
//!
//! An access that would be out of bounds or through NULL in C has no effect here. It is counted as
//! [`wild`](TreeAsPublished::wild).
//!
//! The figures have these defects:
//!
//! - Insert ends at `bit <= 4`, Search at `bit < 12`. Insert builds an eighth level that Search
//!   does not enter, so Search returns a leaf, never an address.
//! - Insert gives a Node64's new key the index `length + 1`. One slot stays empty, and the 64th key
//!   is out of bounds.
//! - Insert after Grow to Node64 uses `keys[key]`, which is not set. The 33rd key of a node is
//!   stored out of bounds, and lost.
//! - Insert tests `< length`, Search `<= length`. Insert does not find the newest key of a Node64,
//!   and inserts it again.
//! - Delete does not move a Node64's pointer, and marks the key with `length`. Search takes the
//!   mark for an index and finds another key's pointer.
//! - Delete shrinks to Node32 or Node64 before it removes the key, so the deleted key stays.
//! - REUSING bits of sorted nodes do not move with their keys. A Node64's bit is set by key and
//!   cleared by index. A bit then belongs to another mapping.

use super::arena::{Arena, NodeCounts, NodeId};
use super::kind::NodeKind;
use super::node::{ABSENT, NULL};

/// Result of Insert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Inserted {
    /// SUCCESS: the tree has a new mapping.
    Success,
    /// ALREAD_EXIST (spelled as in the figure): the REUSING bit is set.
    AlreadyExist,
    /// The published code would have written out of bounds or followed NULL, or memory ran out. The
    /// insertion failed.
    Wild,
}

/// The tree as published. Values are unmodified addresses; 0 is NULL, as in the figures.
#[derive(Debug, Default)]
pub struct TreeAsPublished {
    arena: Arena,
    root: Option<NodeId>,
    comparisons: u64,
    wild: u64,
}

/// Lines 02 to 07 of Insert and 06 to 11 of Search. Returns the key whose highest bit is `bit`, and
/// the next bit below it.
fn key_down(gpa: u64, bit: i32) -> (u8, i32) {
    match bit {
        63 => ((gpa >> 60) as u8, 59),
        _ => ((gpa >> (bit - 7).max(0)) as u8, bit - 8),
    }
}

impl TreeAsPublished {
    /// An empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the comparisons of key bytes since the tree was created.
    pub fn comparisons(&self) -> u64 {
        self.comparisons
    }

    /// Returns the number of accesses out of bounds or through NULL that the published code would
    /// have made.
    pub fn wild(&self) -> u64 {
        self.wild
    }

    /// Returns the number of nodes of each type.
    pub fn node_counts(&self) -> NodeCounts {
        self.arena.node_counts()
    }

    /// Returns the memory that the tree occupies, in bytes.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    fn out_of_bounds_access(&mut self) -> Inserted {
        self.wild = self.wild.wrapping_add(1);
        Inserted::Wild
    }

    /// InsertART (Fig. 7 a).
    pub fn insert(&mut self, gpa: u64, giova: u64) -> Inserted {
        if self.root.is_none() {
            self.root = self.arena.add(false, None);
        }
        let (mut at, mut bit) = (self.root, 63);
        while let Some(node) = at {
            let (key, next) = key_down(gpa, bit);
            match self.step(node, key, next, giova) {
                Ok(done) => return done,
                Err(child) => (at, bit) = (NodeId::of(child), next),
            }
        }
        self.out_of_bounds_access()
    }

    /// One call of Insert (Fig. 7 b), with `bit` already past the key. Returns its result, or `Err`
    /// with the pointer for the recursion.
    fn step(&mut self, id: NodeId, key: u8, bit: i32, giova: u64) -> Result<Inserted, u64> {
        let leaf = bit <= 4;
        let Some(node) = self.arena.get_mut(id) else {
            return Ok(self.out_of_bounds_access());
        };
        let (kind, length) = (node.kind, node.length);
        match kind {
            Some(kind) if kind.is_sorted() => {
                // 09
                if let Some(index) = node.binary_search(key, &mut self.comparisons) {
                    return match leaf {
                        true => Ok(self.exists(id, index)),
                        false => Err(node.pointer(index)),
                    };
                }
                // 19, 28 to 31: full nodes grow; all sorted types follow the same path.
                let mut kind = kind;
                if length >= kind.pointers()
                    && let Some(larger) = kind.larger()
                {
                    if !self.grow(id, larger) {
                        return Ok(self.out_of_bounds_access());
                    }
                    kind = larger;
                }
                let Some(node) = self.arena.get_mut(id) else {
                    return Ok(self.out_of_bounds_access());
                };
                let index = match kind {
                    // 41: no line has set it.
                    NodeKind::Node64 => node.indirect(key),
                    // 20, 32
                    _ => node.insert_sort(key, &mut self.comparisons),
                };
                self.store(id, index, leaf, bit, giova)
            }
            Some(NodeKind::Node64) => {
                // 50
                let index = node.indirect(key);
                if index < length {
                    return match leaf {
                        // 52: sets the bit by key, although line 60 clears it by index.
                        true => Ok(self.exists(id, usize::from(key))),
                        false => Err(node.pointer(index)),
                    };
                }
                if length < 64 {
                    // 57
                    let index = length + 1;
                    node.set_indirect(key, index);
                    node.length += 1;
                    return self.store(id, index, leaf, bit, giova);
                }
                // 66
                if !self.grow(id, NodeKind::Node256) {
                    return Ok(self.out_of_bounds_access());
                }
                self.store_direct(id, key, leaf, bit, giova)
            }
            _ => {
                // 75
                let pointer = node.pointer(usize::from(key));
                match (pointer != NULL, leaf) {
                    (true, true) => Ok(self.exists(id, usize::from(key))),
                    (true, false) => Err(pointer),
                    (false, _) => self.store_direct(id, key, leaf, bit, giova),
                }
            }
        }
    }

    fn store_direct(
        &mut self,
        id: NodeId,
        key: u8,
        leaf: bool,
        bit: i32,
        giova: u64,
    ) -> Result<Inserted, u64> {
        if let Some(node) = self.arena.get_mut(id) {
            node.length += 1;
        }
        self.store(id, usize::from(key), leaf, bit, giova)
    }

    /// Lines 21 to 27 and their equivalents: stores the address and clears the REUSING bit in a
    /// leaf, and allocates a Node2 in an inner node.
    fn store(
        &mut self,
        id: NodeId,
        index: usize,
        leaf: bool,
        bit: i32,
        giova: u64,
    ) -> Result<Inserted, u64> {
        let pointer = if leaf {
            self.set_bit(id, index, false);
            giova
        } else {
            // The new node is a leaf if the next key is the last one. Only its size depends on
            // this.
            let last = bit - 8 <= 4;
            match self.arena.add(last, Some(id)) {
                Some(new) => new.pointer(),
                None => return Ok(self.out_of_bounds_access()),
            }
        };
        let stored = self
            .arena
            .get_mut(id)
            .is_some_and(|node| node.set_pointer(index, pointer));
        match (stored, leaf) {
            (true, true) => Ok(Inserted::Success),
            (true, false) => Err(pointer),
            (false, leaf) => {
                if !leaf && let Some(lost) = NodeId::of(pointer) {
                    self.arena.remove(lost);
                }
                Ok(self.out_of_bounds_access())
            }
        }
    }

    fn grow(&mut self, id: NodeId, larger: NodeKind) -> bool {
        self.arena
            .change(id, larger, |index, length| index < length)
    }

    fn exists(&mut self, leaf: NodeId, bit: usize) -> Inserted {
        self.set_bit(leaf, bit, true);
        Inserted::AlreadyExist
    }

    /// SearchART (Fig. 8): returns the pointer after 52 bits. Insert has stored a leaf there, not
    /// an address.
    pub fn search(&mut self, gpa: u64) -> Option<NodeId> {
        let (mut pointer, mut bit) = (self.root?.pointer(), 63);
        // 02
        while bit >= 12 {
            let node = self.arena.get(NodeId::of(pointer)?)?;
            let (key, next) = key_down(gpa, bit);
            pointer = match node.kind? {
                NodeKind::Node256 => node.pointer(usize::from(key)),
                NodeKind::Node64 => match node.indirect(key) {
                    // 18
                    index if index <= node.length => node.pointer(index),
                    _ => return None,
                },
                _ => {
                    let index = node.binary_search(key, &mut self.comparisons)?;
                    node.pointer(index)
                }
            };
            bit = next;
        }
        NodeId::of(pointer)
    }

    /// Looks up the address in the leaf that Search returned: the eighth key, bits 11 to 4 of the
    /// guest address. Callers of Search must do this.
    pub fn in_leaf(&mut self, leaf: NodeId, gpa: u64) -> Option<u64> {
        let index = self.index_in(leaf, gpa)?;
        let giova = self.arena.get(leaf)?.pointer(index);
        Some(giova).filter(|giova| *giova != NULL)
    }

    fn index_in(&mut self, leaf: NodeId, gpa: u64) -> Option<usize> {
        let node = self.arena.get(leaf)?;
        let key = (gpa >> 4) as u8;
        match node.kind? {
            NodeKind::Node256 => Some(usize::from(key)),
            NodeKind::Node64 => Some(node.indirect(key)).filter(|index| *index <= node.length),
            _ => node.binary_search(key, &mut self.comparisons),
        }
    }

    /// Returns the REUSING bit of `gpa` in `leaf`.
    pub fn is_reusing(&mut self, leaf: NodeId, gpa: u64) -> bool {
        let index = self.index_in(leaf, gpa);
        let bits = self.arena.get(leaf).map(|node| node.reusing);
        let word = bits.and_then(|bits| bits.get(index? / 64).copied());
        word.is_some_and(|word| word >> (index.unwrap_or(0) % 64) & 1 == 1)
    }

    /// Sets or clears the REUSING bit of `gpa` in `leaf`.
    pub fn set_reusing(&mut self, leaf: NodeId, gpa: u64, reusing: bool) {
        if let Some(index) = self.index_in(leaf, gpa) {
            self.set_bit(leaf, index, reusing);
        }
    }

    /// Set_bit and Clear_bit. A leaf has one bit for each pointer; other indices are out of bounds.
    fn set_bit(&mut self, leaf: NodeId, index: usize, set: bool) {
        let node = self.arena.get_mut(leaf);
        let inside = |bits: usize| index < bits;
        let bits = node.filter(|node| node.kind.is_some_and(|kind| inside(kind.pointers())));
        match bits.and_then(|node| node.reusing.get_mut(index / 64)) {
            Some(word) if set => *word |= 1 << (index % 64),
            Some(word) => *word &= !(1 << (index % 64)),
            None => self.wild = self.wild.wrapping_add(1),
        }
    }

    /// Delete (Fig. 9), starting at the leaf and bit 4, where Insert has stored the last key.
    /// Returns false for NOT_EXIST.
    pub fn delete(&mut self, leaf: NodeId, gpa: u64) -> bool {
        let (mut at, mut bit) = (Some(leaf), 4);
        // 02, 04
        while bit < 64
            && let Some(id) = at
        {
            let key = match bit {
                60 => (gpa >> 60) as u8,
                _ => (gpa >> bit) as u8,
            };
            let Some(node) = self.arena.get_mut(id) else {
                self.out_of_bounds_access();
                return false;
            };
            let Some(kind) = node.kind else {
                return false;
            };
            match kind {
                NodeKind::Node64 => {
                    // 25
                    let index = node.indirect(key);
                    if index >= node.length {
                        return false;
                    }
                    node.length -= 1;
                    let length = node.length;
                    if length == 32 {
                        // 29, before the key is removed.
                        self.arena
                            .change(id, NodeKind::Node32, |index, length| index < length);
                    } else {
                        // 31, 32
                        node.set_pointer(index, NULL);
                        node.set_indirect(key, length);
                    }
                    return true;
                }
                NodeKind::Node256 => {
                    // 34
                    if node.pointer(usize::from(key)) == NULL {
                        return false;
                    }
                    node.length = node.length.saturating_sub(1);
                    if node.length == 64 {
                        // 38, before the key is removed.
                        self.arena
                            .change(id, NodeKind::Node64, |index, _| index < usize::from(ABSENT));
                    } else {
                        node.set_pointer(usize::from(key), NULL);
                    }
                    return true;
                }
                _ => {
                    // 11 to 16
                    let Some(index) = node.binary_search(key, &mut self.comparisons) else {
                        return false;
                    };
                    node.move_left(index);
                    let (length, parent) = (node.length, node.parent);
                    match kind.smaller() {
                        // 18, 19
                        Some(smaller) if length == smaller.pointers() => {
                            self.arena
                                .change(id, smaller, |index, length| index < length);
                            return true;
                        }
                        Some(_) => return true,
                        None if length > 0 => return true,
                        None => {}
                    }
                    // 23. An empty root stays.
                    if parent.is_some() {
                        self.arena.remove(id);
                    }
                    (at, bit) = (parent, bit + 8);
                }
            }
        }
        true
    }
}
