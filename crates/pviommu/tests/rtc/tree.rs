//! The radix trees: the fixed one against a sorted map, and each defect of the as-published one.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use ringfence_papers::rtc::tree::{Inserted, NodeKind, Tree, TreeAsPublished, TreeError};

/// Pages that share nodes of every size: adjacent pages, strides of a byte at every level, and
/// arbitrary ones.
fn page() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..300_u64,
        2 => (0..300_u64, 0..7_u32).prop_map(|(at, level)| (at << (8 * level)) & ((1 << 52) - 1)),
        1 => 0..1_u64 << 52,
    ]
}

fn steps() -> impl Strategy<Value = Vec<(bool, u64)>> {
    // Long runs of inserts or removes, so that nodes fill and empty.
    let runs = prop::collection::vec((any::<bool>(), prop::collection::vec(page(), 1..200)), 1..8);
    runs.prop_map(|runs| {
        let of_run =
            |(insert, pages): (bool, Vec<u64>)| pages.into_iter().map(move |page| (insert, page));
        runs.into_iter().flat_map(of_run).collect()
    })
}

/// Returns the number of inner nodes of each type, which follows from the children of each node.
fn inner_nodes(map: &BTreeMap<u64, u64>) -> [usize; 6] {
    let mut nodes = [0; 6];
    for shift in (8..=48).step_by(8) {
        let children: BTreeSet<u64> = map.keys().map(|page| page >> shift).collect();
        let mut children_of: BTreeMap<u64, usize> = BTreeMap::new();
        for child in children {
            *children_of.entry(child >> 8).or_default() += 1;
        }
        for (kind, nodes) in NodeKind::ALL.iter().zip(&mut nodes) {
            let range = kind.least_keys()..=kind.pointers();
            let fit = children_of.values().filter(|keys| range.contains(keys));
            *nodes += fit.count();
        }
    }
    nodes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn fixed_tree_is_a_sorted_map(steps in steps()) {
        let (mut tree, mut map) = (Tree::new(), BTreeMap::new());
        for (at, (insert, page)) in steps.into_iter().enumerate() {
            let value = at as u64 + 1;
            if insert {
                let inserted = tree.insert(page, value);
                match map.entry(page) {
                    Entry::Occupied(_) => prop_assert_eq!(inserted, Err(TreeError::Present)),
                    Entry::Vacant(free) => {
                        prop_assert!(inserted.is_ok());
                        free.insert(value);
                    }
                }
            } else if let Some((value, leaf)) = tree.get(page) {
                prop_assert_eq!(map.remove(&page), Some(value));
                prop_assert_eq!(tree.remove(leaf, page), Some(value));
                prop_assert_eq!(tree.get(page), None);
            } else {
                prop_assert!(!map.contains_key(&page));
            }
        }
        for (page, value) in &map {
            prop_assert_eq!(tree.get(*page).map(|(value, _)| value), Some(*value));
        }
        // Each run of 256 pages has a leaf, whose type follows from its number of pages.
        let mut pages_of: BTreeMap<u64, usize> = BTreeMap::new();
        for page in map.keys() {
            *pages_of.entry(page >> 8).or_default() += 1;
        }
        for (kind, nodes) in NodeKind::ALL.iter().zip(tree.node_counts().leaves) {
            let range = kind.least_keys()..=kind.pointers();
            let fit = pages_of.values().filter(|pages| range.contains(pages));
            prop_assert_eq!(nodes, fit.count(), "{:?}", kind);
        }
        if !map.is_empty() {
            prop_assert_eq!(tree.node_counts().inner, inner_nodes(&map));
        }
        let pages: Vec<u64> = map.keys().copied().collect();
        for page in pages {
            let (_, leaf) = tree.get(page).unwrap();
            prop_assert!(tree.remove(leaf, page).is_some());
        }
        prop_assert_eq!(tree.node_counts().leaves, [0; 6]);
    }
}

const MIB: u64 = 1 << 20;

fn as_published(pages: u64) -> TreeAsPublished {
    let mut tree = TreeAsPublished::new();
    for page in 0..pages {
        tree.insert(page << 12, 0x100_0000 + (page << 12));
    }
    tree
}

/// Returns the address that Search and a lookup in the leaf find.
fn found(tree: &mut TreeAsPublished, gpa: u64) -> Option<u64> {
    let leaf = tree.search(gpa)?;
    tree.in_leaf(leaf, gpa)
}

/// Errata 11: Insert ends at `bit <= 4`, Search at `bit < 12`.
#[test]
fn search_ends_at_a_leaf_where_an_address_should_be() {
    let mut tree = TreeAsPublished::new();
    assert_eq!(tree.insert(0x1000, 0xa000), Inserted::Success);
    assert_eq!(
        tree.insert(0x1010, 0xb000),
        Inserted::Success,
        "a second one in the same page"
    );
    let leaf = tree.search(0x1000).unwrap();
    assert_eq!(tree.search(0x1ff0), Some(leaf), "whatever the offset");
    assert_eq!(tree.in_leaf(leaf, 0x1000), Some(0xa000));
    assert_eq!(tree.in_leaf(leaf, 0x1010), Some(0xb000));
    assert_eq!(tree.in_leaf(leaf, 0x1020), None);
    // Eight levels: seven inner nodes and a leaf. With keys of 52 bits there are six inner nodes.
    let node_counts = tree.node_counts();
    assert_eq!(
        (
            node_counts.inner.iter().sum::<usize>(),
            node_counts.leaves[0]
        ),
        (7, 1)
    );
}

/// The line after Grow reads an index that no line has set.
#[test]
fn the_33rd_page_of_a_mebibyte_is_lost() {
    let mut tree = as_published(32);
    assert_eq!(tree.insert(32 << 12, 0x120_0000), Inserted::Wild);
    assert_eq!(found(&mut tree, 32 << 12), None);
    // The next page finds a Node64, and succeeds.
    assert_eq!(tree.insert(33 << 12, 0x121_0000), Inserted::Success);
    assert_eq!(found(&mut tree, 33 << 12), Some(0x121_0000));
}

/// Errata 11: the index `length + 1` of the 64th key is outside the pointer array.
#[test]
fn the_last_key_of_a_node_of_64_lies_outside() {
    let mut tree = as_published(64);
    // Page 32 was lost when the node grew; page 64 would fill the last slot.
    let wild = tree.wild();
    assert_eq!(tree.insert(64 << 12, 0x140_0000), Inserted::Wild);
    assert_eq!(tree.wild(), wild + 1);
}

/// Insert tests `< length`, and the newest key has the index `length`.
#[test]
fn the_newest_key_is_inserted_twice() {
    let mut tree = as_published(40);
    assert_eq!(tree.insert(39 << 12, 0xdead_0000), Inserted::Success);
    assert_eq!(
        found(&mut tree, 39 << 12),
        Some(0xdead_0000),
        "and the mapping before is lost"
    );
    let mut tree = as_published(20);
    assert_eq!(tree.insert(19 << 12, 0xdead_0000), Inserted::AlreadyExist);
}

/// Errata 11: after Delete, Search takes the key's mark for an index, and finds another page's
/// pointer.
#[test]
fn a_deleted_page_finds_another_ones_mapping() {
    let mut tree = as_published(40);
    let victim = 7 << 12;
    let leaf = tree.search(victim).unwrap();
    assert!(tree.delete(leaf, victim));
    let mut strangers = Vec::new();
    for page in 0..40_u64 {
        if let Some(giova) = found(&mut tree, page << 12)
            && giova != 0x100_0000 + (page << 12)
        {
            strangers.push((page, giova));
        }
    }
    assert_eq!(strangers, [(7, 0x100_0000 + (38 << 12))]);
}

/// Delete shrinks the node before it removes the key.
#[test]
fn a_node_that_shrinks_keeps_the_deleted_key() {
    let mut tree = as_published(34);
    // Pages 0 to 31 and 33. The newest page cannot be deleted: its leaf is removed, but the pointer
    // to it stays.
    let newest = tree.search(33 << 12).unwrap();
    assert!(!tree.delete(newest, 33 << 12));
    assert_eq!(tree.search(33 << 12), Some(newest));
    let leaf = tree.search(5 << 12).unwrap();
    tree.delete(leaf, 5 << 12);
    assert_eq!(
        tree.search(5 << 12),
        Some(leaf),
        "a pointer to a leaf that is gone"
    );
}

/// A REUSING bit does not move with its key.
#[test]
fn bit_does_not_move_with_its_key() {
    let mut tree = TreeAsPublished::new();
    tree.insert(0x1020, 0xb000);
    let leaf = tree.search(0x1000).unwrap();
    tree.set_reusing(leaf, 0x1020, true);
    assert!(tree.is_reusing(leaf, 0x1020));
    tree.insert(0x1010, 0xa000);
    assert!(!tree.is_reusing(leaf, 0x1020), "its key has moved");
}

/// On any sequence of operations, the tree gives at worst wrong results.
#[test]
fn tree_as_published_survives_any_operations() {
    let mut state = 0x5eed_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let mut tree = TreeAsPublished::new();
    for _ in 0..200_000 {
        let gpa = match random(3) {
            0 => random(300) << 12,
            1 => (random(300) * MIB) | (random(256) << 4),
            _ => (random(200) << 4) | (random(16) << 60),
        };
        match random(4) {
            0 | 1 => {
                tree.insert(gpa, random(u64::MAX >> 33));
            }
            2 => {
                if let Some(leaf) = tree.search(gpa) {
                    tree.is_reusing(leaf, gpa);
                    tree.set_reusing(leaf, gpa, random(2) == 0);
                    tree.delete(leaf, gpa);
                }
            }
            _ => {
                found(&mut tree, gpa);
            }
        }
    }
    assert!(tree.wild() > 0);
}
