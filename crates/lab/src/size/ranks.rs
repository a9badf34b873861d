//! A set of ascending numbers with removal in any order; a removal counts the smaller numbers.

/// Minimum number of entries for compaction.
const SMALL: usize = 64;

/// Counts with a Fenwick tree (Fenwick 1994): operations take logarithmic time.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranks {
    /// Ascending. Removed numbers stay until they outnumber the present ones.
    numbers: Vec<u64>,
    present: Vec<bool>,
    /// `tree[i]` counts the last `lowest_bit(i + 1)` entries up to `i`.
    tree: Vec<u32>,
    count: usize,
}

fn lowest_bit(node: usize) -> usize {
    node & node.wrapping_neg()
}

impl Ranks {
    /// Returns the number of present numbers.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Adds a number larger than all others.
    pub(super) fn push(&mut self, number: u64) {
        self.numbers.push(number);
        self.present.push(true);
        let node = self.numbers.len();
        let mut sum = 1;
        let mut below = node - 1;
        while below > node - lowest_bit(node) {
            sum += self.tree[below - 1];
            below -= lowest_bit(below);
        }
        self.tree.push(sum);
        self.count += 1;
    }

    /// Removes a number and returns how many smaller ones remain. `None` if the number is absent.
    pub(super) fn remove(&mut self, number: u64) -> Option<usize> {
        let index = self.numbers.binary_search(&number).ok()?;
        if !std::mem::replace(&mut self.present[index], false) {
            return None;
        }
        self.count -= 1;
        let mut smaller = 0;
        let mut node = index;
        while node > 0 {
            smaller += self.tree[node - 1] as usize;
            node -= lowest_bit(node);
        }
        let mut node = index + 1;
        while node <= self.tree.len() {
            self.tree[node - 1] -= 1;
            node += lowest_bit(node);
        }
        if self.numbers.len() > SMALL && self.count * 2 < self.numbers.len() {
            self.compact();
        }
        Some(smaller)
    }

    fn compact(&mut self) {
        let all = std::mem::take(self);
        let left = all.numbers.into_iter().zip(all.present);
        for (number, present) in left {
            if present {
                self.push(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_sorted_list() {
        let mut seed = 1_u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
            (seed >> 33) as usize % below
        };
        let (mut ranks, mut list) = (Ranks::default(), Vec::new());
        for step in 0..20_000_u64 {
            // The list grows to thousands of entries and then shrinks.
            if random(10) < 6 + 2 * usize::from(step < 9000) - 4 * usize::from(step > 15_000) {
                ranks.push(step);
                list.push(step);
            } else if !list.is_empty() {
                let rank = random(list.len());
                let number = list.remove(rank);
                assert_eq!(ranks.remove(number), Some(rank));
                assert_eq!(ranks.remove(number), None);
            }
            assert_eq!(ranks.len(), list.len());
            assert!(ranks.numbers.len() <= 2 * list.len() + SMALL + 1);
        }
        assert_eq!(ranks.remove(u64::MAX), None);
    }
}
