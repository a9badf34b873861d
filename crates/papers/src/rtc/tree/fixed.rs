//! The tree of Figures 7 to 9 of the PVIOMMU paper, with its defects fixed (errata 11):
//!
//! - Insert and Search both use 52-bit keys, so seven levels end at a value.
//! - The pointers of a Node64 have no gaps, so its length tells which indices are valid.
//! - Delete moves the last pointer of a Node64 into the gap.

use core::fmt;

use super::arena::{Arena, NodeCounts, NodeId};
use super::kind::NodeKind;
use super::node::{ABSENT, NULL};

/// Maps guest page numbers (52 bits) to values other than 0, in seven levels: 4 bits, then 8 each.
#[derive(Debug, Default)]
pub struct Tree {
    arena: Arena,
    root: Option<NodeId>,
    comparisons: u64,
}

/// Reason why an insertion failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TreeError {
    /// The page has a value already.
    Present,
    /// The value is 0, which means no value.
    Zero,
    /// Out of memory; the tree is unchanged.
    OutOfMemory,
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Present => "the page has a value already",
            Self::Zero => "0 is not a valid value",
            Self::OutOfMemory => "no memory",
        })
    }
}

impl core::error::Error for TreeError {}

/// Shifts of the keys in the root and in a leaf.
const ROOT: u32 = 48;
const LEAF: u32 = 0;

/// Returns the key of `page` in a node at `shift`. The root's key has 4 bits, for a total of 52.
#[inline]
fn key_at(page: u64, shift: u32) -> u8 {
    let mask = if shift == ROOT { 0xf } else { 0xff };
    (page >> shift & mask) as u8
}

impl Tree {
    /// Creates an empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the comparisons of key bytes since the tree was created.
    pub fn comparisons(&self) -> u64 {
        self.comparisons
    }

    /// Returns the number of nodes of each type.
    pub fn node_counts(&self) -> NodeCounts {
        self.arena.node_counts()
    }

    /// Returns the memory that the tree occupies, in bytes.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// Search (Fig. 8): returns the value of `page` and the leaf that contains it.
    #[inline]
    pub fn get(&mut self, page: u64) -> Option<(u64, NodeId)> {
        let (mut node, mut shift) = (self.root?, ROOT);
        loop {
            let pointer = self.pointer_of(node, key_at(page, shift))?;
            if shift == LEAF {
                return Some((pointer, node));
            }
            (node, shift) = (NodeId::of(pointer)?, shift - 8);
        }
    }

    /// Returns the pointer of `key` in `node`.
    #[inline]
    fn pointer_of(&mut self, node: NodeId, key: u8) -> Option<u64> {
        let node = self.arena.get(node)?;
        let index = match node.kind? {
            NodeKind::Node256 => usize::from(key),
            NodeKind::Node64 => match node.indirect(key) {
                index if index < node.length => index,
                _ => return None,
            },
            _ => node.binary_search(key, &mut self.comparisons)?,
        };
        Some(node.pointer(index)).filter(|pointer| *pointer != NULL)
    }

    /// Insert (Fig. 7): sets the value of `page` and returns its leaf.
    ///
    /// # Errors
    /// See [`TreeError`].
    pub fn insert(&mut self, page: u64, value: u64) -> Result<NodeId, TreeError> {
        if value == NULL {
            return Err(TreeError::Zero);
        }
        let mut node = match self.root {
            Some(root) => root,
            None => {
                let root = self.arena.add(false, None).ok_or(TreeError::OutOfMemory)?;
                *self.root.insert(root)
            }
        };
        let mut shift = ROOT;
        // Descend to the node that lacks the key.
        while let Some(pointer) = self.pointer_of(node, key_at(page, shift)) {
            if shift == LEAF {
                return Err(TreeError::Present);
            }
            node = NodeId::of(pointer).ok_or(TreeError::OutOfMemory)?;
            shift -= 8;
        }
        // Allocate the path below before linking it, so that running out of memory changes nothing.
        let (mut pointer, mut leaf, mut level) = (value, node, LEAF);
        let mut child: Option<NodeId> = None;
        while level < shift {
            match self.arena.add(level == LEAF, None) {
                Some(new) => {
                    self.put(new, key_at(page, level), pointer);
                    self.set_parent(child, new);
                    if level == LEAF {
                        leaf = new;
                    }
                    (pointer, child) = (new.pointer(), Some(new));
                }
                None => return Err(self.undo(child, page, level)),
            }
            level += 8;
        }
        if !self.grow_if_full(node) {
            return Err(self.undo(child, page, shift));
        }
        self.put(node, key_at(page, shift), pointer);
        self.set_parent(child, node);
        Ok(leaf)
    }

    /// Replaces the value of `page`. Returns false if `page` has none, or if `value` is 0.
    pub fn replace(&mut self, page: u64, value: u64) -> bool {
        let Some((_, leaf)) = self.get(page).filter(|_| value != NULL) else {
            return false;
        };
        let key = key_at(page, LEAF);
        let Some(node) = self.arena.get_mut(leaf) else {
            return false;
        };
        let index = match node.kind {
            Some(NodeKind::Node256) => usize::from(key),
            Some(NodeKind::Node64) => node.indirect(key),
            _ => match node.binary_search(key, &mut self.comparisons) {
                Some(index) => index,
                None => return false,
            },
        };
        node.set_pointer(index, value)
    }

    /// Sets the parent of `child`, if there is one.
    fn set_parent(&mut self, child: Option<NodeId>, parent: NodeId) {
        if let Some(child) = child.and_then(|child| self.arena.get_mut(child)) {
            child.parent = Some(parent);
        }
    }

    /// Removes the new nodes of `page`, from `top` down; `top` is one level below the shift
    /// `above`.
    fn undo(&mut self, top: Option<NodeId>, page: u64, above: u32) -> TreeError {
        let (mut node, mut shift) = (top, above);
        while let (Some(id), Some(child_shift)) = (node, shift.checked_sub(8)) {
            node = match child_shift {
                LEAF => None,
                _ => self
                    .pointer_of(id, key_at(page, child_shift))
                    .and_then(NodeId::of),
            };
            self.arena.remove(id);
            shift = child_shift;
        }
        TreeError::OutOfMemory
    }

    /// Grow (Fig. 7): changes a full node to the next larger type. Returns false if out of memory.
    fn grow_if_full(&mut self, id: NodeId) -> bool {
        let Some((kind, length)) = self.shape(id) else {
            return false;
        };
        match kind.larger() {
            Some(larger) if length >= kind.pointers() => {
                self.arena
                    .change(id, larger, |index, length| index < length)
            }
            _ => true,
        }
    }

    /// Returns the type and the number of pointers of a node.
    fn shape(&self, id: NodeId) -> Option<(NodeKind, usize)> {
        let node = self.arena.get(id)?;
        Some((node.kind?, node.length))
    }

    /// Adds `key`, which must be absent, to a node with room.
    fn put(&mut self, id: NodeId, key: u8, pointer: u64) {
        let comparisons = &mut self.comparisons;
        let Some(node) = self.arena.get_mut(id) else {
            return;
        };
        let index = match node.kind {
            Some(NodeKind::Node256) => {
                node.length += 1;
                usize::from(key)
            }
            Some(NodeKind::Node64) => {
                // The figure uses node.length + 1, which leaves a gap.
                let index = node.length;
                node.set_indirect(key, index);
                node.length += 1;
                index
            }
            _ => node.insert_sort(key, comparisons),
        };
        node.set_pointer(index, pointer);
    }

    /// Delete (Fig. 9): removes the value of `page` from `leaf`, and then every empty node up to
    /// the root. `None` if `leaf` has no such value; the tree is unchanged.
    pub fn remove(&mut self, leaf: NodeId, page: u64) -> Option<u64> {
        let (mut id, mut shift) = (leaf, LEAF);
        let mut value = None;
        loop {
            let taken = self.remove_key(id, key_at(page, shift))?;
            value = value.or(Some(taken));
            let (_, length) = self.shape(id)?;
            let parent = self.arena.get(id)?.parent;
            match parent {
                Some(parent) if length == 0 => {
                    self.arena.remove(id);
                    (id, shift) = (parent, shift + 8);
                }
                _ => {
                    self.shrink(id);
                    return value;
                }
            }
        }
    }

    /// Shrink (Fig. 9): changes a node whose keys fit to the next smaller type. Keeps the node if
    /// out of memory.
    fn shrink(&mut self, id: NodeId) {
        if let Some((kind, length)) = self.shape(id)
            && let Some(smaller) = kind.smaller()
            && length <= smaller.pointers()
        {
            self.arena
                .change(id, smaller, |index, length| index < length);
        }
    }

    /// Removes `key` from a node and returns its pointer.
    fn remove_key(&mut self, id: NodeId, key: u8) -> Option<u64> {
        let comparisons = &mut self.comparisons;
        let node = self.arena.get_mut(id)?;
        match node.kind? {
            NodeKind::Node256 => {
                let taken = Some(node.pointer(usize::from(key))).filter(|taken| *taken != NULL)?;
                node.set_pointer(usize::from(key), NULL);
                node.length = node.length.checked_sub(1)?;
                Some(taken)
            }
            NodeKind::Node64 => {
                let index = node.indirect(key);
                let last = node.length.checked_sub(1)?;
                if index > last {
                    return None;
                }
                // The figure only clears the pointer, which leaves a gap below the length. Move the
                // last pointer into it.
                let (taken, moved) = (node.pointer(index), node.pointer(last));
                node.set_pointer(index, moved);
                node.set_pointer(last, NULL);
                let owner = node
                    .keys
                    .iter()
                    .position(|other| usize::from(*other) == last);
                if let Some(slot) = owner.and_then(|owner| node.keys.get_mut(owner)) {
                    *slot = u8::try_from(index).unwrap_or(ABSENT);
                }
                node.set_indirect(key, usize::from(ABSENT));
                node.length = last;
                Some(taken)
            }
            _ => {
                let index = node.binary_search(key, comparisons)?;
                let taken = node.pointer(index);
                node.move_left(index);
                Some(taken)
            }
        }
    }
}
