//! Compares the tree with a sorted map, and checks the invariants of red-black trees after every
//! step.

extern crate std;

use std::collections::BTreeMap;
use std::vec::Vec;

use super::*;

/// Number of pages in the subtree. A single missed refresh makes it wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Pages(u64);

impl Summary for Pages {
    const TRACKED: bool = true;

    fn of(lo: u64, hi: u64, left: &Self, right: &Self) -> Self {
        Self(hi - lo + 1 + left.0 + right.0)
    }
}

impl<A: Summary> RbTree<A> {
    /// Returns the colour of each node, by index: true if red.
    pub(crate) fn colours(&self) -> Vec<bool> {
        self.nodes.iter().map(|node| node.red).collect()
    }
}

/// Checks order, links, colours and summaries below `index`; returns its black height.
fn check(tree: &RbTree<Pages>, index: Index, parent: Index) -> u32 {
    if index == NIL {
        return 1;
    }
    let node = *tree.node(index);
    assert_eq!(node.parent, parent, "parent link of {index}");
    if node.red {
        assert!(
            !tree.is_red(node.left) && !tree.is_red(node.right),
            "two red nodes in a row"
        );
    }
    if node.left != NIL {
        assert!(tree.hi(node.left) < node.lo);
    }
    if node.right != NIL {
        assert!(tree.lo(node.right) > node.hi);
    }
    let left = check(tree, node.left, index);
    let right = check(tree, node.right, index);
    assert_eq!(left, right, "black height");
    let pages = Pages::of(
        node.lo,
        node.hi,
        tree.summary(node.left),
        tree.summary(node.right),
    );
    assert_eq!(node.summary, pages, "summary of {index}");
    left + u32::from(!node.red)
}

#[test]
fn agrees_with_a_sorted_set_and_stays_balanced() {
    for seed in 1..=20_u64 {
        let mut random = seed;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut tree = RbTree::<Pages>::new();
        let mut model = BTreeMap::new();
        let mut names = BTreeMap::new();
        for step in 0..1500 {
            let slot = next() % 300;
            let lo = slot * 10;
            let growing = step % 500 < 300;
            if model.contains_key(&lo) == growing {
                continue;
            }
            if growing {
                let hi = lo + next() % 10;
                names.insert(lo, tree.insert(lo, hi).unwrap());
                model.insert(lo, hi);
            } else {
                model.remove(&lo);
                tree.erase(names.remove(&lo).unwrap());
            }
            assert!(!tree.is_red(tree.root()));
            check(&tree, tree.root(), NIL);
            assert_eq!(tree.len(), model.len());
            let mut up = Vec::new();
            let mut index = tree.first();
            while index != NIL {
                up.push((tree.lo(index), tree.hi(index)));
                index = tree.next(index);
            }
            assert!(
                up.iter()
                    .copied()
                    .eq(model.iter().map(|(lo, hi)| (*lo, *hi)))
            );
            let mut index = tree.last();
            while index != NIL {
                assert_eq!(up.pop(), Some((tree.lo(index), tree.hi(index))));
                index = tree.prev(index);
            }
            let page = next() % 3000;
            let want = model.range(..=page).next_back();
            let found = tree.at_or_below(page);
            assert_eq!(
                want.map(|(lo, _)| *lo),
                (found != NIL).then(|| tree.lo(found))
            );
            let inside = want.is_some_and(|(_, hi)| *hi >= page);
            assert_eq!(inside, tree.containing(page) != NIL);
            for (lo, name) in &names {
                assert_eq!(
                    tree.lo(*name),
                    *lo,
                    "a name must survive the erasure of others"
                );
            }
        }
    }
}

#[test]
fn reuses_the_slots_of_erased_nodes() {
    let mut tree = RbTree::<()>::new();
    for round in 0..100_u64 {
        let names: Vec<_> = (0..10)
            .map(|i| tree.insert(round + i * 200, round + i * 200).unwrap())
            .collect();
        for name in names {
            tree.erase(name);
        }
    }
    assert!(tree.nodes.len() <= 10);
}
