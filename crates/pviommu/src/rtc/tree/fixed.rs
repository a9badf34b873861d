//! The tree with the defects of Figures 7 to 9 repaired (errata 11): 52-bit keys on both ways, so
//! that seven levels end at a value; a Node64's pointers without gaps, so that an index is there or
//! not; deletion that moves what it must.

use core::fmt;

use super::arena::{Arena, Census, NodeId};
use super::kind::NodeKind;
use super::node::{ABSENT, NULL};

/// From guest page numbers (52 bits) to values other than 0, seven levels: 4 bits, then 8 each.
#[derive(Debug, Default)]
pub struct Tree {
    arena: Arena,
    root: Option<NodeId>,
    comparisons: u64,
}

/// Why nothing was inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TreeError {
    /// The page has a value already.
    Present,
    /// 0 stands for no value.
    Zero,
    /// No memory; the tree is as before.
    OutOfMemory,
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Present => "the page has a value already",
            Self::Zero => "0 is no value",
            Self::OutOfMemory => "no memory",
        })
    }
}

impl core::error::Error for TreeError {}

/// The shift of a root's key, and of a leaf's.
const ROOT: u32 = 48;
const LEAF: u32 = 0;

/// The key of `page` in a node at `shift`; the root's has 4 bits because a page number has 52.
#[inline]
fn key_at(page: u64, shift: u32) -> u8 {
    let mask = if shift == ROOT { 0xf } else { 0xff };
    (page >> shift & mask) as u8
}

impl Tree {
    /// An empty tree.
    pub fn new() -> Self {
        Self::default()
    }

    /// Comparisons of key bytes since the tree was made.
    pub fn comparisons(&self) -> u64 {
        self.comparisons
    }

    /// How many nodes of each type there are.
    pub fn census(&self) -> Census {
        self.arena.census()
    }

    /// Bytes that the tree occupies here.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// Search (Fig. 8): the value of `page` and the leaf that has it.
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

    /// The pointer of `key` in `node`.
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

    /// Insert (Fig. 7): gives `page` a value; returns its leaf.
    ///
    /// # Errors
    /// As [`TreeError`] says.
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
        // Down to the node that lacks the key.
        while let Some(pointer) = self.pointer_of(node, key_at(page, shift)) {
            if shift == LEAF {
                return Err(TreeError::Present);
            }
            node = NodeId::of(pointer).ok_or(TreeError::OutOfMemory)?;
            shift -= 8;
        }
        // What goes below it is made before it is linked, so that a lack of memory changes nothing.
        let (mut pointer, mut leaf, mut below) = (value, node, LEAF);
        let mut child: Option<NodeId> = None;
        while below < shift {
            match self.arena.add(below == LEAF, None) {
                Some(made) => {
                    self.put(made, key_at(page, below), pointer);
                    self.adopt(child, made);
                    if below == LEAF {
                        leaf = made;
                    }
                    (pointer, child) = (made.pointer(), Some(made));
                }
                None => return Err(self.undo(child, page, below)),
            }
            below += 8;
        }
        if !self.make_room(node) {
            return Err(self.undo(child, page, shift));
        }
        self.put(node, key_at(page, shift), pointer);
        self.adopt(child, node);
        Ok(leaf)
    }

    /// Gives `page` another value; false if it has none, or if `value` is 0.
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

    fn adopt(&mut self, child: Option<NodeId>, parent: NodeId) {
        if let Some(child) = child.and_then(|child| self.arena.get_mut(child)) {
            child.parent = Some(parent);
        }
    }

    /// Removes the nodes that were made for `page` from `top`, at a shift below `above`, down.
    fn undo(&mut self, top: Option<NodeId>, page: u64, above: u32) -> TreeError {
        let (mut node, mut shift) = (top, above);
        while let (Some(id), Some(here)) = (node, shift.checked_sub(8)) {
            node = match here {
                LEAF => None,
                _ => self.pointer_of(id, key_at(page, here)).and_then(NodeId::of),
            };
            self.arena.remove(id);
            shift = here;
        }
        TreeError::OutOfMemory
    }

    /// Grow, if the node is full; false without memory.
    fn make_room(&mut self, id: NodeId) -> bool {
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

    fn shape(&self, id: NodeId) -> Option<(NodeKind, usize)> {
        let node = self.arena.get(id)?;
        Some((node.kind?, node.length))
    }

    /// Adds `key`, which is not there, to a node with room.
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
                // The figure writes node.length + 1 and leaves a gap.
                let index = node.length;
                node.set_indirect(key, index);
                node.length += 1;
                index
            }
            _ => node.insert_sort(key, comparisons),
        };
        node.set_pointer(index, pointer);
    }

    /// Delete (Fig. 9), from the leaf upwards: takes the value of `page` out of `leaf`, and every
    /// node that becomes empty out of its parent. `None`: it was not there, and nothing changes.
    pub fn remove(&mut self, leaf: NodeId, page: u64) -> Option<u64> {
        let (mut id, mut shift) = (leaf, LEAF);
        let mut value = None;
        loop {
            let taken = self.take_out(id, key_at(page, shift))?;
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

    /// Shrink, if the node has no more keys than the next smaller type has room for. Without memory
    /// it stays as it is.
    fn shrink(&mut self, id: NodeId) {
        if let Some((kind, length)) = self.shape(id)
            && let Some(smaller) = kind.smaller()
            && length <= smaller.pointers()
        {
            self.arena
                .change(id, smaller, |index, length| index < length);
        }
    }

    /// Removes `key` from a node; its pointer.
    fn take_out(&mut self, id: NodeId, key: u8) -> Option<u64> {
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
                // The figure clears the pointer and leaves a hole below the length: the last one
                // moves into it.
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
