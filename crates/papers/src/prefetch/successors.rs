//! The successors in a row of a prediction table.

use super::MAX_SLOTS;

/// Up to [`MAX_SLOTS`] distinct values, the latest first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Successors {
    values: [u64; MAX_SLOTS as usize],
    used: u8,
}

impl Successors {
    /// Moves or inserts `value` at the front. Returns the oldest value if it was dropped to stay
    /// within `limit`.
    pub(super) fn note(&mut self, value: u64, limit: u8) -> Option<u64> {
        let known = self.iter().position(|other| other == value);
        let limit = limit.clamp(1, MAX_SLOTS);
        let lost = match known {
            Some(_) => None,
            None if self.used >= limit => self.values.get(usize::from(self.used) - 1).copied(),
            None => {
                self.used += 1;
                None
            }
        };
        let moved = known.unwrap_or(usize::from(self.used) - 1);
        let mut carried = value;
        for slot in self.values.iter_mut().take(moved + 1) {
            core::mem::swap(slot, &mut carried);
        }
        lost
    }

    /// Removes `value` and keeps the order of the others.
    pub(super) fn forget(&mut self, value: u64) {
        let Some(at) = self.iter().position(|other| other == value) else {
            return;
        };
        self.used -= 1;
        if let Some(rest) = self.values.get_mut(at..) {
            rest.rotate_left(1);
        }
    }

    /// Returns the values, the latest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.values.into_iter().take(usize::from(self.used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn the_latest_stand_in_front_and_the_oldest_goes() {
        let mut few = Successors::default();
        let steps: [(u64, Option<u64>, &[u64]); 6] = [
            (1, None, &[1]),
            (2, None, &[2, 1]),
            (1, None, &[1, 2]),
            (3, Some(2), &[3, 1]),
            (3, None, &[3, 1]),
            (0, Some(1), &[0, 3]),
        ];
        for (value, lost, left) in steps {
            assert_eq!(few.note(value, 2), lost);
            assert_eq!(few.iter().collect::<Vec<_>>(), left);
        }
        few.forget(7);
        few.forget(0);
        assert_eq!(few.iter().collect::<Vec<_>>(), [3]);
        few.forget(3);
        assert_eq!(few.iter().count(), 0);
    }

    #[test]
    fn limits_out_of_range_are_cut() {
        let mut few = Successors::default();
        for value in 0..20 {
            few.note(value, 0);
            assert_eq!(few.iter().collect::<Vec<_>>(), [value]);
        }
        for value in 0..20 {
            few.note(value, u8::MAX);
        }
        assert_eq!(few.iter().collect::<Vec<_>>(), [19, 18, 17, 16]);
    }
}
