//! A red-black tree of disjoint page ranges, stored in one vector. Indices replace pointers, so the
//! code needs no unsafe block. An index stays valid until its own node is erased.
//!
//! Insertion and deletion follow Cormen, Leiserson, Rivest and Stein, "Introduction to Algorithms",
//! chapter 13. A tree can maintain a summary of each subtree ([`Summary`]); rotations update it.

mod balance;

use alloc::vec::Vec;

/// The summary of a node's subtree.
pub(crate) trait Summary: Copy + Default {
    /// True if the tree must keep summaries up to date.
    const TRACKED: bool;

    /// Returns the summary of a node `[lo, hi]` with the given summaries of its children. `Default`
    /// is the summary of an empty subtree.
    fn of(lo: u64, hi: u64, left: &Self, right: &Self) -> Self;
}

impl Summary for () {
    const TRACKED: bool = false;

    fn of(_: u64, _: u64, (): &Self, (): &Self) -> Self {}
}

/// Index of a node, or [`NIL`].
pub(crate) type Index = u32;

/// The index that refers to no node.
pub(crate) const NIL: Index = 0;

/// The vector could not grow for another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoMemory;

#[derive(Debug, Clone, Copy)]
struct Node<A> {
    lo: u64,
    hi: u64,
    summary: A,
    left: Index,
    right: Index,
    parent: Index,
    red: bool,
}

/// The tree. It orders ranges by their first page. The caller ensures that ranges never overlap.
#[derive(Debug)]
pub(crate) struct RbTree<A> {
    /// Node `i` is at position `i - 1`.
    nodes: Vec<Node<A>>,
    /// The value of node [`NIL`]. Deletion writes its parent, like the book's sentinel.
    nil: Node<A>,
    root: Index,
    /// First erased node; `right` links the others.
    spare: Index,
    len: usize,
}

impl<A: Summary> RbTree<A> {
    pub(crate) fn new() -> Self {
        Self {
            nodes: Vec::new(),
            nil: Node {
                lo: 0,
                hi: 0,
                summary: A::default(),
                left: NIL,
                right: NIL,
                parent: NIL,
                red: false,
            },
            root: NIL,
            spare: NIL,
            len: 0,
        }
    }

    #[inline]
    fn node(&self, index: Index) -> &Node<A> {
        self.nodes
            .get((index as usize).wrapping_sub(1))
            .unwrap_or(&self.nil)
    }

    #[inline]
    fn node_mut(&mut self, index: Index) -> &mut Node<A> {
        match self.nodes.get_mut((index as usize).wrapping_sub(1)) {
            Some(node) => node,
            None => &mut self.nil,
        }
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the memory of all nodes in bytes, used or erased.
    pub(crate) fn footprint(&self) -> usize {
        self.nodes.capacity().saturating_mul(size_of::<Node<A>>())
    }

    #[inline]
    pub(crate) fn root(&self) -> Index {
        self.root
    }

    #[inline]
    pub(crate) fn left(&self, index: Index) -> Index {
        self.node(index).left
    }

    #[inline]
    pub(crate) fn right(&self, index: Index) -> Index {
        self.node(index).right
    }

    /// Returns the first page of a range.
    #[inline]
    pub(crate) fn lo(&self, index: Index) -> u64 {
        self.node(index).lo
    }

    /// Returns the last page of a range.
    #[inline]
    pub(crate) fn hi(&self, index: Index) -> u64 {
        self.node(index).hi
    }

    #[inline]
    pub(crate) fn summary(&self, index: Index) -> &A {
        &self.node(index).summary
    }

    /// Returns the lowest range.
    pub(crate) fn first(&self) -> Index {
        self.leftmost(self.root)
    }

    /// Returns the highest range.
    pub(crate) fn last(&self) -> Index {
        self.rightmost(self.root)
    }

    fn leftmost(&self, mut index: Index) -> Index {
        while self.left(index) != NIL {
            index = self.left(index);
        }
        index
    }

    fn rightmost(&self, mut index: Index) -> Index {
        while self.right(index) != NIL {
            index = self.right(index);
        }
        index
    }

    /// Returns the next higher range ("rb_next").
    #[inline]
    pub(crate) fn next(&self, mut index: Index) -> Index {
        if self.right(index) != NIL {
            return self.leftmost(self.right(index));
        }
        loop {
            let parent = self.node(index).parent;
            if parent == NIL || index == self.left(parent) {
                return parent;
            }
            index = parent;
        }
    }

    /// Returns the next lower range ("rb_prev").
    #[inline]
    pub(crate) fn prev(&self, mut index: Index) -> Index {
        if self.left(index) != NIL {
            return self.rightmost(self.left(index));
        }
        loop {
            let parent = self.node(index).parent;
            if parent == NIL || index == self.right(parent) {
                return parent;
            }
            index = parent;
        }
    }

    /// Returns the highest range that begins at or below `page`.
    #[inline]
    pub(crate) fn at_or_below(&self, page: u64) -> Index {
        let (mut index, mut best) = (self.root, NIL);
        while index != NIL {
            let node = self.node(index);
            if node.lo <= page {
                best = index;
                index = node.right;
            } else {
                index = node.left;
            }
        }
        best
    }

    /// Returns the range that contains `page`.
    #[inline]
    pub(crate) fn containing(&self, page: u64) -> Index {
        let index = self.at_or_below(page);
        if index != NIL && self.hi(index) >= page {
            index
        } else {
            NIL
        }
    }

    /// Reserves memory, so that the tree can grow to `ranges` ranges without an allocation.
    pub(crate) fn reserve(&mut self, ranges: usize) -> Result<(), NoMemory> {
        if ranges <= self.nodes.capacity() {
            return Ok(());
        }
        if ranges >= Index::MAX as usize {
            return Err(NoMemory);
        }
        self.nodes
            .try_reserve(ranges.saturating_sub(self.nodes.len()))
            .map_err(|_| NoMemory)
    }

    fn new_node(&mut self, lo: u64, hi: u64) -> Result<Index, NoMemory> {
        let node = Node {
            lo,
            hi,
            red: true,
            ..self.nil
        };
        let node = Node {
            parent: NIL,
            summary: A::of(lo, hi, &A::default(), &A::default()),
            ..node
        };
        if self.spare != NIL {
            let index = self.spare;
            self.spare = self.right(index);
            *self.node_mut(index) = node;
            return Ok(index);
        }
        self.reserve(self.nodes.len().saturating_add(1))?;
        self.nodes.push(node);
        Ok(self.nodes.len() as Index)
    }

    /// Inserts a range, which must not overlap another.
    pub(crate) fn insert(&mut self, lo: u64, hi: u64) -> Result<Index, NoMemory> {
        let (mut parent, mut index) = (NIL, self.root);
        while index != NIL {
            parent = index;
            let node = self.node(index);
            index = if lo < node.lo { node.left } else { node.right };
        }
        let new = self.new_node(lo, hi)?;
        self.node_mut(new).parent = parent;
        if parent == NIL {
            self.root = new;
        } else if lo < self.lo(parent) {
            self.node_mut(parent).left = new;
        } else {
            self.node_mut(parent).right = new;
        }
        self.len += 1;
        self.refresh_upwards(parent);
        self.insert_fixup(new);
        Ok(new)
    }

    /// Changes the ends of a range, which must keep its position in the order.
    pub(crate) fn resize(&mut self, index: Index, lo: u64, hi: u64) {
        let node = self.node_mut(index);
        node.lo = lo;
        node.hi = hi;
        self.refresh_upwards(index);
    }

    #[inline]
    fn refresh(&mut self, index: Index) {
        if A::TRACKED && index != NIL {
            let node = self.node(index);
            let summary = A::of(
                node.lo,
                node.hi,
                self.summary(node.left),
                self.summary(node.right),
            );
            self.node_mut(index).summary = summary;
        }
    }

    #[inline]
    fn refresh_upwards(&mut self, mut index: Index) {
        if A::TRACKED {
            while index != NIL {
                self.refresh(index);
                index = self.node(index).parent;
            }
        }
    }
}

#[cfg(test)]
mod tests;
