//! Balancing of the tree: rotations, and the repairs after an insertion or a deletion.

use super::{Index, NIL, Node, RbTree, Summary};

impl<A: Summary> RbTree<A> {
    /// Replaces `old` with `new` as the child of `old`'s parent.
    fn replace(&mut self, old: Index, new: Index) {
        let parent = self.node(old).parent;
        if parent == NIL {
            self.root = new;
        } else if self.left(parent) == old {
            self.node_mut(parent).left = new;
        } else {
            self.node_mut(parent).right = new;
        }
        // Also for NIL: deletion walks up through the sentinel.
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
    pub(super) fn is_red(&self, index: Index) -> bool {
        self.node(index).red
    }

    #[inline]
    fn paint(&mut self, index: Index, red: bool) {
        if index != NIL {
            self.node_mut(index).red = red;
        }
    }

    pub(super) fn insert_fixup(&mut self, mut z: Index) {
        loop {
            let parent = self.node(z).parent;
            if !self.is_red(parent) {
                break;
            }
            // A red node is never the root, so a grandparent exists.
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

    /// Erases a range. A later insertion may reuse its index.
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
