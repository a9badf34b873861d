//! A bounded map in order of last use, for prediction tables, the recency stack and the small
//! caches.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::MAX_HISTORY;

/// Marks the absence of a node.
const NIL: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Node<V> {
    key: u64,
    value: V,
    /// Next more recently used entry.
    newer: u32,
    older: u32,
}

/// At most `capacity` entries. Memory grows with the number of entries used and is not freed. Each
/// operation takes logarithmic time.
#[derive(Debug, Clone)]
pub(super) struct Lru<V> {
    nodes: Vec<Node<V>>,
    index: BTreeMap<u64, u32>,
    /// Free nodes of removed entries.
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    capacity: usize,
}

impl<V: Default> Lru<V> {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            nodes: Vec::new(),
            index: BTreeMap::new(),
            free: Vec::new(),
            newest: NIL,
            oldest: NIL,
            capacity: capacity.min(MAX_HISTORY) as usize,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) fn contains(&self, key: u64) -> bool {
        self.index.contains_key(&key)
    }

    /// Returns the value under `key` without counting as a use.
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        let id = *self.index.get(&key)?;
        self.nodes.get_mut(id as usize).map(|node| &mut node.value)
    }

    /// Returns the value under `key` and makes it the most recently used.
    pub(super) fn touch(&mut self, key: u64) -> Option<&mut V> {
        let id = *self.index.get(&key)?;
        self.unlink(id);
        self.link_newest(id);
        self.nodes.get_mut(id as usize).map(|node| &mut node.value)
    }

    /// Inserts an entry as the most recently used; replaces an entry with the same key. A full map
    /// evicts and returns the least recently used entry. A map of capacity 0 returns the new entry.
    pub(super) fn insert(&mut self, key: u64, value: V) -> Option<(u64, V)> {
        if self.capacity == 0 {
            return Some((key, value));
        }
        if let Some(old) = self.touch(key) {
            *old = value;
            return None;
        }
        let evicted = match self.len() >= self.capacity {
            true => self.key_of(self.oldest),
            false => None,
        };
        let evicted = evicted.and_then(|old| Some((old, self.remove(old)?)));
        let node = Node {
            key,
            value,
            newer: NIL,
            older: NIL,
        };
        let id = match self.free.pop() {
            Some(id) => id,
            // Capacity is at most `MAX_HISTORY`, so the index fits in a `u32`.
            None => self.nodes.len() as u32,
        };
        match self.nodes.get_mut(id as usize) {
            Some(slot) => *slot = node,
            None => self.nodes.push(node),
        }
        self.index.insert(key, id);
        self.link_newest(id);
        evicted
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<V> {
        let id = self.index.remove(&key)?;
        self.unlink(id);
        self.free.push(id);
        self.nodes
            .get_mut(id as usize)
            .map(|node| core::mem::take(&mut node.value))
    }

    /// Returns the neighbours of `key` in order of use: the next newer key and the next older key.
    pub(super) fn neighbours(&self, key: u64) -> [Option<u64>; 2] {
        let node = self.index.get(&key);
        let node = node.and_then(|&id| self.nodes.get(id as usize));
        node.map_or([None, None], |node| {
            [self.key_of(node.newer), self.key_of(node.older)]
        })
    }

    fn key_of(&self, id: u32) -> Option<u64> {
        self.nodes.get(id as usize).map(|node| node.key)
    }

    fn link_newest(&mut self, id: u32) {
        let second = core::mem::replace(&mut self.newest, id);
        if let Some(node) = self.nodes.get_mut(id as usize) {
            node.newer = NIL;
            node.older = second;
        }
        match self.nodes.get_mut(second as usize) {
            Some(node) => node.newer = id,
            None => self.oldest = id,
        }
    }

    fn unlink(&mut self, id: u32) {
        let Some(node) = self.nodes.get(id as usize) else {
            return;
        };
        let (newer, older) = (node.newer, node.older);
        match self.nodes.get_mut(newer as usize) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u64, u8),
        Touch(u64),
        Remove(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..12_u64, any::<u8>()).prop_map(|(key, value)| Step::Insert(key, value)),
            (0..12_u64).prop_map(Step::Touch),
            (0..12_u64).prop_map(Step::Remove),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn equals_a_list_in_order_of_use(capacity in 0..9_u32, steps in steps()) {
            let mut lru = Lru::new(capacity);
            // The newest entry is last.
            let mut list: Vec<(u64, u8)> = Vec::new();
            let at = |list: &Vec<(u64, u8)>, key| list.iter().position(|entry| entry.0 == key);
            for step in steps {
                match step {
                    Step::Insert(key, value) => {
                        let old = at(&list, key).map(|at| list.remove(at));
                        list.push((key, value));
                        let lost = (list.len() > capacity as usize).then(|| list.remove(0));
                        prop_assert!(old.is_none() || lost.is_none());
                        prop_assert_eq!(lru.insert(key, value), lost);
                    }
                    Step::Touch(key) => {
                        let found = at(&list, key).map(|at| list.remove(at));
                        list.extend(found);
                        prop_assert_eq!(lru.touch(key).copied(), found.map(|entry| entry.1));
                    }
                    Step::Remove(key) => {
                        let found = at(&list, key).map(|at| list.remove(at));
                        prop_assert_eq!(lru.remove(key), found.map(|entry| entry.1));
                    }
                }
                prop_assert_eq!(lru.len(), list.len());
                prop_assert!(lru.nodes.len() <= capacity as usize);
                for key in 0..12 {
                    let position = at(&list, key);
                    prop_assert_eq!(lru.contains(key), position.is_some());
                    prop_assert_eq!(lru.get_mut(key).copied(), position.map(|at| list[at].1));
                    let beside =
                        |by: usize| position.and_then(|at| Some(list.get(at.wrapping_add(by))?.0));
                    prop_assert_eq!(lru.neighbours(key), [beside(1), beside(usize::MAX)]);
                }
            }
        }
    }
}
