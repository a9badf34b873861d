//! A red-black tree of disjoint page ranges in one vector: nodes are named by index, so no pointer and no unsafe code is
//! needed, and a name stays valid until its own node is erased.
//!
//! Insertion and deletion follow Cormen, Leiserson, Rivest and Stein, "Introduction to Algorithms", chapter 13. A tree can
//! carry a summary of each subtree ([`Summary`]); rotations keep it.

use alloc::vec::Vec;

/// What a node knows about its subtree.
pub(crate) trait Summary: Copy + Default {
    /// Whether there is anything to keep up to date.
    const TRACKED: bool;

    /// The summary of a node `[lo, hi]` with these summaries below it; `Default` stands for an empty subtree.
    fn of(lo: u64, hi: u64, left: &Self, right: &Self) -> Self;
}

impl Summary for () {
    const TRACKED: bool = false;

    fn of(_: u64, _: u64, (): &Self, (): &Self) -> Self {}
}

/// Name of a node; [`NIL`] names none.
pub(crate) type Index = u32;

/// No node.
pub(crate) const NIL: Index = 0;

/// No memory for one more node.
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

/// The tree. Ranges are ordered by their first page and never overlap; both are the caller's to keep.
#[derive(Debug)]
pub(crate) struct RbTree<A> {
    /// Node `i` lives in slot `i - 1`.
    nodes: Vec<Node<A>>,
    /// What reading [`NIL`] yields. Deletion writes its parent, as the book's sentinel.
    nil: Node<A>,
    root: Index,
    /// First of the erased nodes, linked by `right`.
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

    /// Number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of all slots, used or spare.
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

    /// First page of a range.
    #[inline]
    pub(crate) fn lo(&self, index: Index) -> u64 {
        self.node(index).lo
    }

    /// Last page of a range.
    #[inline]
    pub(crate) fn hi(&self, index: Index) -> u64 {
        self.node(index).hi
    }

    #[inline]
    pub(crate) fn summary(&self, index: Index) -> &A {
        &self.node(index).summary
    }

    /// The range with the lowest pages.
    pub(crate) fn first(&self) -> Index {
        self.leftmost(self.root)
    }

    /// The range with the highest pages.
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

    /// The range above `index` ("rb_next").
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

    /// The range below `index` ("rb_prev").
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

    /// The highest range that begins at or below `page`.
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

    /// The range that contains `page`.
    #[inline]
    pub(crate) fn containing(&self, page: u64) -> Index {
        let index = self.at_or_below(page);
        if index != NIL && self.hi(index) >= page {
            index
        } else {
            NIL
        }
    }

    /// Makes sure that the tree can grow to `ranges` ranges without asking for memory.
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

    /// Adds a range that overlaps none.
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

    /// Moves the ends of a range. Its place in the order must not change.
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

    /// Puts `new` where `old` hangs.
    fn replace(&mut self, old: Index, new: Index) {
        let parent = self.node(old).parent;
        if parent == NIL {
            self.root = new;
        } else if self.left(parent) == old {
            self.node_mut(parent).left = new;
        } else {
            self.node_mut(parent).right = new;
        }
        // Also for NIL: deletion finds its way up through the sentinel.
        self.node_mut(new).parent = parent;
    }

    fn rotate_left(&mut self, x: Index) {
        let y = self.right(x);
        let inner = self.left(y);
        self.node_mut(x).right = inner;
        if inner != NIL {
            self.node_mut(inner).parent = x;
        }
        self.replace(x, y);
        self.node_mut(y).left = x;
        self.node_mut(x).parent = y;
        self.refresh(x);
        self.refresh(y);
    }

    fn rotate_right(&mut self, x: Index) {
        let y = self.left(x);
        let inner = self.right(y);
        self.node_mut(x).left = inner;
        if inner != NIL {
            self.node_mut(inner).parent = x;
        }
        self.replace(x, y);
        self.node_mut(y).right = x;
        self.node_mut(x).parent = y;
        self.refresh(x);
        self.refresh(y);
    }

    #[inline]
    fn is_red(&self, index: Index) -> bool {
        self.node(index).red
    }

    #[inline]
    fn paint(&mut self, index: Index, red: bool) {
        if index != NIL {
            self.node_mut(index).red = red;
        }
    }

    fn insert_fixup(&mut self, mut z: Index) {
        loop {
            let parent = self.node(z).parent;
            if !self.is_red(parent) {
                break;
            }
            // A red node is not the root, so there is a grandparent.
            let grand = self.node(parent).parent;
            let on_left = parent == self.left(grand);
            let uncle = if on_left {
                self.right(grand)
            } else {
                self.left(grand)
            };
            if self.is_red(uncle) {
                self.paint(parent, false);
                self.paint(uncle, false);
                self.paint(grand, true);
                z = grand;
                continue;
            }
            if on_left {
                if z == self.right(parent) {
                    z = parent;
                    self.rotate_left(z);
                }
                let parent = self.node(z).parent;
                self.paint(parent, false);
                self.paint(grand, true);
                self.rotate_right(grand);
            } else {
                if z == self.left(parent) {
                    z = parent;
                    self.rotate_right(z);
                }
                let parent = self.node(z).parent;
                self.paint(parent, false);
                self.paint(grand, true);
                self.rotate_left(grand);
            }
        }
        let root = self.root;
        self.paint(root, false);
    }

    /// Removes a range; its name may be given to another afterwards.
    pub(crate) fn erase(&mut self, z: Index) {
        if z == NIL {
            return;
        }
        let Node { left, right, .. } = *self.node(z);
        let (x, removed_red, lowest);
        if left == NIL || right == NIL {
            x = if left == NIL { right } else { left };
            removed_red = self.is_red(z);
            lowest = self.node(z).parent;
            self.replace(z, x);
        } else {
            let y = self.leftmost(right);
            removed_red = self.is_red(y);
            x = self.right(y);
            if y == right {
                lowest = y;
                self.node_mut(x).parent = y;
            } else {
                lowest = self.node(y).parent;
                self.replace(y, x);
                self.node_mut(y).right = right;
                self.node_mut(right).parent = y;
            }
            self.replace(z, y);
            self.node_mut(y).left = left;
            self.node_mut(left).parent = y;
            let red = self.is_red(z);
            self.paint(y, red);
        }
        self.refresh_upwards(lowest);
        if !removed_red {
            self.erase_fixup(x);
        }
        self.nil.parent = NIL;
        let spare = self.spare;
        self.node_mut(z).right = spare;
        self.spare = z;
        self.len -= 1;
    }

    fn erase_fixup(&mut self, mut x: Index) {
        while x != self.root && !self.is_red(x) {
            let parent = self.node(x).parent;
            if x == self.left(parent) {
                let mut sibling = self.right(parent);
                if self.is_red(sibling) {
                    self.paint(sibling, false);
                    self.paint(parent, true);
                    self.rotate_left(parent);
                    sibling = self.right(parent);
                }
                if !self.is_red(self.left(sibling)) && !self.is_red(self.right(sibling)) {
                    self.paint(sibling, true);
                    x = parent;
                    continue;
                }
                if !self.is_red(self.right(sibling)) {
                    let near = self.left(sibling);
                    self.paint(near, false);
                    self.paint(sibling, true);
                    self.rotate_right(sibling);
                    sibling = self.right(parent);
                }
                let red = self.is_red(parent);
                self.paint(sibling, red);
                self.paint(parent, false);
                let far = self.right(sibling);
                self.paint(far, false);
                self.rotate_left(parent);
            } else {
                let mut sibling = self.left(parent);
                if self.is_red(sibling) {
                    self.paint(sibling, false);
                    self.paint(parent, true);
                    self.rotate_right(parent);
                    sibling = self.left(parent);
                }
                if !self.is_red(self.left(sibling)) && !self.is_red(self.right(sibling)) {
                    self.paint(sibling, true);
                    x = parent;
                    continue;
                }
                if !self.is_red(self.left(sibling)) {
                    let near = self.right(sibling);
                    self.paint(near, false);
                    self.paint(sibling, true);
                    self.rotate_left(sibling);
                    sibling = self.left(parent);
                }
                let red = self.is_red(parent);
                self.paint(sibling, red);
                self.paint(parent, false);
                let far = self.left(sibling);
                self.paint(far, false);
                self.rotate_right(parent);
            }
            x = self.root;
        }
        self.paint(x, false);
    }
}

#[cfg(test)]
mod tests;
