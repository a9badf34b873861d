//! Tables 7 and 8 of the PVIOMMU paper, recomputed (PV20, X23). Comparisons are counted on
//! worst-case trees; sizes follow from the node types.

use alloc::vec::Vec;

use super::tree::{NodeKind, Tree};

/// Size of a node's header by section 4.5 of the PVIOMMU paper: "13-bytes extra space".
pub const HEADER_AS_PUBLISHED: usize = 13;

/// Sum of the header fields that the paper lists: type 1, length 2, parent 8 (errata 15).
pub const HEADER_LISTED: usize = 11;

/// A row of Table 8.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpaceRow {
    /// The node type.
    pub kind: NodeKind,
    /// Bytes of an inner node and of a leaf.
    pub bytes: [usize; 2],
    /// Minimum and maximum number of keys.
    pub keys: [usize; 2],
    /// Bytes per key with the minimum number of keys: inner, leaf.
    pub at_least: [f64; 2],
    /// Bytes per key with the maximum number of keys: inner, leaf.
    pub at_most: [f64; 2],
}

/// Computes Table 8 for nodes with `header` bytes in addition to their arrays.
pub fn space(header: usize) -> [SpaceRow; 6] {
    NodeKind::ALL.map(|kind| {
        let bytes = [kind.inner_bytes(header), kind.leaf_bytes(header)];
        let keys = [kind.least_keys(), kind.pointers()];
        let [least, most] = keys.map(|keys| bytes.map(|bytes| bytes as f64 / keys as f64));
        SpaceRow {
            kind,
            bytes,
            keys,
            at_least: least,
            at_most: most,
        }
    })
}

/// Worst-case and best-case comparisons of key bytes. One operation on a tree built for it reaches
/// each value, except `insert_sum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comparisons {
    /// SearchART: 16 keys in the root, which has 4 bits, and 32 in every node below. The PVIOMMU
    /// paper prints 42, with a root of 32 keys.
    pub search: u64,
    /// InsertART: the worst single insertion. Only one node sorts, because all nodes below a
    /// missing key are new.
    pub insert: u64,
    /// The paper's sum for InsertART, 259 = 42 + 7 x 31, but with a root of 16 keys: a search that
    /// finds a key in every node, and a sort into every node. No single insertion does both.
    pub insert_sum: u64,
    /// Delete in a leaf of 32 keys, the paper's worst case; the paper prints 6.
    pub delete_in_leaf: u64,
    /// Delete that also removes parents with one key, which the paper does not count.
    pub delete: u64,
    /// The best search: nodes of more than 32 keys, Node64 or Node256, at all levels below a root
    /// of one key. The paper prints 0, but a root never has more than 16 keys, and the search
    /// compares them.
    pub best: u64,
    /// The best insertion of the paper: the same nodes, and the leaf lacks the key. It searches the
    /// root as well.
    pub best_insert: u64,
    /// The best deletion: from a leaf of more than 32 keys.
    pub best_delete: u64,
}

/// Levels below the root, with keys of 8 bits.
const BELOW_ROOT: u32 = 6;

/// Builds a tree with `keys[level]` keys in the node at each level of page 0's path, the root
/// first. The path's own key is the smallest. If `path` is false, the tree omits page 0.
fn along_path(keys: &[u64], path: bool) -> Tree {
    let mut tree = Tree::new();
    for (level, keys) in keys.iter().enumerate() {
        let shift = 8 * BELOW_ROOT.saturating_sub(level as u32);
        for key in 1..*keys {
            // Without memory, the tree needs fewer comparisons and the tests of this module fail.
            let _ = tree.insert(key << shift, 1);
        }
    }
    if path {
        let _ = tree.insert(0, 1);
    }
    tree
}

/// Returns the comparisons of one operation.
fn counted(tree: &mut Tree, operation: impl FnOnce(&mut Tree)) -> u64 {
    let before = tree.comparisons();
    operation(tree);
    tree.comparisons().wrapping_sub(before)
}

fn search(tree: &mut Tree) -> u64 {
    counted(tree, |tree| {
        tree.get(0);
    })
}

fn delete(keys: &[u64]) -> u64 {
    let mut tree = along_path(keys, true);
    match tree.get(0) {
        Some((_, leaf)) => counted(&mut tree, |tree| {
            tree.remove(leaf, 0);
        }),
        None => 0,
    }
}

impl Comparisons {
    /// Builds the trees and counts.
    pub fn count() -> Self {
        let full = [16, 32, 32, 32, 32, 32, 32];
        let found = search(&mut along_path(&full, true));
        // For each first level that lacks the key, vary its number of other keys. All levels above
        // are full.
        let mut insert = 0;
        for level in 0..full.len() {
            let most = full.get(level).copied().unwrap_or(0);
            for beside in 1..=most {
                let mut keys: Vec<u64> = full.iter().copied().take(level).collect();
                keys.push(beside + 1);
                let mut tree = along_path(&keys, false);
                // The nodes above have the path's key, because a neighbour of page 0 at this level
                // has it.
                insert = insert.max(counted(&mut tree, |tree| {
                    let _ = tree.insert(0, 1);
                }));
            }
        }
        // Comparisons to sort the smallest key into a node of `keys` keys.
        let sort = |keys: u64| keys.saturating_sub(1);
        let mut chains = 0;
        for alone in 0..full.len() {
            // From the leaf up, `alone` nodes with the path's key only, below a full node.
            let mut keys = full;
            for keys in keys.iter_mut().rev().take(alone) {
                *keys = 1;
            }
            chains = chains.max(delete(&keys));
        }
        // Node64 and Node256 with few and with all keys, also without the path's key.
        let large = [34, 64, 66, 256].map(|keys| [1, keys, keys, keys, keys, keys, keys]);
        let worst_of = |cost: fn(&[u64]) -> u64| large.iter().map(|keys| cost(keys)).max();
        Self {
            search: found,
            insert,
            insert_sum: found + full.iter().map(|keys| sort(*keys)).sum::<u64>(),
            delete_in_leaf: delete(&full),
            delete: chains,
            best: worst_of(|keys| search(&mut along_path(keys, true))).unwrap_or(0),
            best_insert: worst_of(|keys| {
                counted(&mut along_path(keys, false), |tree| {
                    let _ = tree.insert(0, 1);
                })
            })
            .unwrap_or(0),
            best_delete: worst_of(delete).unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_operations_are_reached() {
        let counted = Comparisons::count();
        assert_eq!(counted.search, 41);
        assert_eq!(counted.insert_sum, 242);
        assert_eq!(counted.insert, 5 + 5 * 6 + 5 + 31);
        assert_eq!(counted.delete_in_leaf, 6);
        assert_eq!(counted.delete, 11);
        assert_eq!(counted.best, 1);
        assert_eq!((counted.best_insert, counted.best_delete), (1, 0));
    }

    #[test]
    fn no_random_tree_is_worse() {
        let worst = Comparisons::count();
        let mut state = 0x5eed_u64;
        let mut tree = Tree::new();
        for _ in 0..60_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Use few values of each key, so that many nodes have about 32.
            let page = (state >> 8) & 0xf_1f1f_0307_1f3f;
            let found = counted(&mut tree, |tree| {
                tree.get(page);
            });
            assert!(found <= worst.search);
            if state.is_multiple_of(3)
                && let Some((_, leaf)) = tree.get(page)
            {
                let deleted = counted(&mut tree, |tree| {
                    tree.remove(leaf, page);
                });
                assert!(deleted <= worst.delete);
            } else {
                let inserted = counted(&mut tree, |tree| {
                    let _ = tree.insert(page, 1);
                });
                assert!(inserted <= worst.insert);
            }
        }
    }
}
