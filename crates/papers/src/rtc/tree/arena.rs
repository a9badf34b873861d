//! Storage of nodes. A node keeps its number when it changes its type, so pointers to it stay
//! valid. (In the PVIOMMU paper's code, the queue points to leaves that Grow and Shrink have
//! replaced.)

use alloc::vec::Vec;

use super::kind::NodeKind;
use super::node::{NULL, Node, arrays};

/// Number of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(u32);

impl NodeId {
    #[inline]
    pub(super) fn pointer(self) -> u64 {
        u64::from(self.0) + 1
    }

    /// Returns the node that a pointer of an inner node refers to.
    #[inline]
    pub(super) fn of(pointer: u64) -> Option<Self> {
        u32::try_from(pointer.checked_sub(1)?).ok().map(Self)
    }
}

/// Number of nodes of each type in a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Inner nodes, in the order of [`NodeKind::ALL`].
    pub inner: [usize; 6],
    /// Leaves, in the same order.
    pub leaves: [usize; 6],
}

impl NodeCounts {
    /// Size of these nodes by Table 8 in bytes, with headers of `header` bytes.
    pub fn bytes(&self, header: usize) -> usize {
        let inner = NodeKind::ALL.iter().zip(self.inner);
        let leaves = NodeKind::ALL.iter().zip(self.leaves);
        inner
            .map(|(kind, nodes)| kind.inner_bytes(header).saturating_mul(nodes))
            .chain(leaves.map(|(kind, nodes)| kind.leaf_bytes(header).saturating_mul(nodes)))
            .fold(0, usize::saturating_add)
    }
}

#[derive(Debug, Default)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    node_counts: NodeCounts,
}

impl Arena {
    /// Allocates a Node2; `None` if out of memory.
    pub(super) fn add(&mut self, leaf: bool, parent: Option<NodeId>) -> Option<NodeId> {
        let (keys, pointers) = arrays(NodeKind::Node2)?;
        let node = Node {
            kind: Some(NodeKind::Node2),
            leaf,
            parent,
            keys,
            pointers,
            ..Node::default()
        };
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                self.nodes.try_reserve(1).ok()?;
                // Reserve the slot in the free list, so that freeing a node needs no memory.
                self.free
                    .try_reserve(self.nodes.len().saturating_add(1))
                    .ok()?;
                let id = NodeId(u32::try_from(self.nodes.len()).ok()?);
                self.nodes.push(Node::default());
                id
            }
        };
        if let Some(slot) = self.nodes.get_mut(id.0 as usize) {
            *slot = node;
        }
        self.counted(leaf, NodeKind::Node2, 1);
        Some(id)
    }

    pub(super) fn remove(&mut self, id: NodeId) {
        let removed = self.nodes.get_mut(id.0 as usize).map(core::mem::take);
        if let Some((kind, leaf)) = removed.and_then(|node| Some((node.kind?, node.leaf))) {
            self.counted(leaf, kind, -1);
            self.free.push(id);
        }
    }

    #[inline]
    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes
            .get(id.0 as usize)
            .filter(|node| node.kind.is_some())
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        let node = self.nodes.get_mut(id.0 as usize);
        node.filter(|node| node.kind.is_some())
    }

    /// Grow and Shrink: converts the node to `kind`. For a Node64, keeps the entries for which
    /// `is_there` returns true, given the entry's index and the node's length. Returns false and
    /// changes nothing if out of memory.
    pub(super) fn change(
        &mut self,
        id: NodeId,
        kind: NodeKind,
        is_there: impl Fn(usize, usize) -> bool,
    ) -> bool {
        let Some(new) = arrays(kind) else {
            return false;
        };
        let Some(node) = self.get_mut(id) else {
            return false;
        };
        let Some(old) = node.kind else {
            return false;
        };
        let (keys, pointers, length) = (
            core::mem::take(&mut node.keys),
            core::mem::take(&mut node.pointers),
            node.length,
        );
        let at = |index: usize| pointers.get(index).copied().unwrap_or(NULL);
        let all = 0..=u8::MAX;
        match old {
            NodeKind::Node256 => {
                let entries = all.map(|key| (key, at(usize::from(key))));
                node.refill(kind, new, entries.filter(|(_, pointer)| *pointer != NULL));
            }
            NodeKind::Node64 => {
                let entries = all
                    .zip(&keys)
                    .filter(|(_, index)| is_there(usize::from(**index), length));
                node.refill(
                    kind,
                    new,
                    entries.map(|(key, index)| (key, at(usize::from(*index)))),
                );
            }
            _ => {
                let entries = keys.iter().copied().zip(pointers.iter().copied());
                node.refill(kind, new, entries.take(length));
            }
        }
        let leaf = node.leaf;
        self.counted(leaf, old, -1);
        self.counted(leaf, kind, 1);
        true
    }

    fn counted(&mut self, leaf: bool, kind: NodeKind, more: isize) {
        let counts = if leaf {
            &mut self.node_counts.leaves
        } else {
            &mut self.node_counts.inner
        };
        if let Some(count) = counts.get_mut(kind.index()) {
            *count = count.saturating_add_signed(more);
        }
    }

    pub(super) fn node_counts(&self) -> NodeCounts {
        self.node_counts
    }

    /// Memory that the nodes occupy, in bytes. Larger than in the PVIOMMU paper: a `Vec` is larger
    /// than a pointer.
    pub(super) fn bytes(&self) -> usize {
        let arrays = self.node_counts.bytes(0);
        self.nodes
            .capacity()
            .saturating_mul(size_of::<Node>())
            .saturating_add(self.free.capacity().saturating_mul(size_of::<NodeId>()))
            .saturating_add(arrays)
    }
}
