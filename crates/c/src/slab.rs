//! Tokens: numbers that name objects, and that name nothing after their object is removed.

/// Objects with tokens. A token is the index of a slot and the slot's generation.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Never 0, so that no token is 0.
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    /// Inserts `value`, and returns its token. `None` if 2^32 slots are in use.
    pub(crate) fn insert(&mut self, value: T) -> Option<u64> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).ok()?;
                self.slots.push(Slot {
                    generation: 1,
                    value: None,
                });
                index
            }
        };
        let slot = self.slots.get_mut(index as usize)?;
        slot.value = Some(value);
        Some(token(slot.generation, index))
    }

    /// Returns the object of `token`.
    pub(crate) fn get_mut(&mut self, token: u64) -> Option<&mut T> {
        self.slot(token)?.value.as_mut()
    }

    /// Removes the object of `token`, which names nothing from now on.
    pub(crate) fn remove(&mut self, token: u64) -> Option<T> {
        let slot = self.slot(token)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        // A slot that has used up its generations is not used again.
        if slot.generation != 0 {
            self.free.push(token as u32);
        }
        Some(value)
    }

    /// Returns the token of the first object for which `matches` returns true.
    pub(crate) fn find(&self, mut matches: impl FnMut(&T) -> bool) -> Option<u64> {
        let is_found = |slot: &Slot<T>| slot.value.as_ref().is_some_and(&mut matches);
        let index = self.slots.iter().position(is_found)?;
        let slot = self.slots.get(index)?;
        Some(token(slot.generation, index as u32))
    }

    fn slot(&mut self, token: u64) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut(token as u32 as usize)?;
        (u64::from(slot.generation) == token >> 32).then_some(slot)
    }
}

fn token(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_object_only_until_its_removal() {
        let mut slab = Slab::default();
        let first = slab.insert('a').unwrap();
        assert_eq!(slab.get_mut(first), Some(&mut 'a'));
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b').unwrap();
        assert_eq!(second as u32, first as u32, "the slot is used again");
        assert_eq!(slab.get_mut(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.find(|value| *value == 'b'), Some(second));
        for never in [0, 1, u64::MAX, second | 1 << 31] {
            assert_eq!(slab.get_mut(never), None);
        }
    }

    #[test]
    fn the_last_generation_retires_its_slot() {
        let mut slab = Slab::default();
        let token = slab.insert(()).unwrap();
        slab.slots[0].generation = u32::MAX;
        assert_eq!(slab.remove(u64::from(u32::MAX) << 32), Some(()));
        assert_eq!(slab.get_mut(token), None);
        assert_eq!(slab.insert(()).unwrap() as u32, 1);
    }
}
