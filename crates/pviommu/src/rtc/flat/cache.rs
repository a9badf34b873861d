//! The cache over the flat table.

use ringfence_types::Iova;

use super::slot::Slot;
use super::table::Table;
use crate::rtc::reuse::Gaps;
use crate::rtc::{Cache, Cycles, Key, NotCached, NotHeld, Residency, Stats};

/// The flat reverse translation cache, with the document's residency or one that follows reuse.
///
/// At its limit it holds no more mappings than that, whoever uses them; keys that it remembers of mappings that left count too, and give way.
/// A mapping has up to 1023 users; the next one gets none from the cache.
#[derive(Debug)]
pub struct FlatRtc {
    table: Table,
    gaps: Gaps,
    cycles: Cycles,
    limit: usize,
    /// The running cycle, in the eight bits that entries have for it.
    now: u8,
    /// Mappings that nobody uses, by the cycle of their release.
    released_in: [u32; 256],
    /// Keys of mappings that left.
    ghosts: usize,
    counts: Stats,
}

impl FlatRtc {
    /// An empty cache of at most `limit` mappings. It takes memory as it fills and gives it back when it empties: 16 bytes an entry, at most five
    /// eighths of the entries occupied.
    pub fn new(cycles: Cycles, limit: usize, residency: Residency) -> Self {
        Self {
            table: Table::new(limit),
            gaps: Gaps::new(residency, cycles),
            cycles,
            limit,
            now: 0,
            released_in: [0; 256],
            ghosts: 0,
            counts: Stats::default(),
        }
    }

    fn drop_ghosts(&mut self) {
        if self.ghosts > 0 {
            self.table.retain(|slot| !slot.is_ghost());
            self.ghosts = 0;
        }
    }

    /// Released mappings of this age.
    fn of_age(&self, age: u8) -> u32 {
        let cycle = self.now.wrapping_sub(age);
        let released = self.released_in.get(usize::from(cycle));
        released.copied().unwrap_or(0)
    }

    #[inline]
    fn count_released(&mut self, cycle: u8, more: i32) {
        if let Some(count) = self.released_in.get_mut(usize::from(cycle)) {
            *count = count.wrapping_add_signed(more);
        }
    }

    /// Walks the table: of each released mapping and each ghost, `leaves` says by its key's word, age, and whether it is a ghost, if it leaves. Of a
    /// mapping that leaves before C cycles are over the key stays where gaps are counted.
    fn forget(
        &mut self,
        mut leaves: impl FnMut(u64, u8, bool) -> bool,
        mut expired: impl FnMut(Key, Iova),
    ) -> u64 {
        let (now, remembered) = (self.now, self.gaps.counted().then_some(self.cycles.get()));
        let (mut gone, mut laid, mut vanished) = (0_usize, 0_usize, 0_usize);
        let released_in = &mut self.released_in;
        self.table.retain(|slot| {
            let age = slot.age(now);
            if slot.users() > 0 || !leaves(slot.key(), age, slot.is_ghost()) {
                return true;
            }
            if slot.is_ghost() {
                vanished += 1;
                return false;
            }
            gone += 1;
            if let Some(count) = released_in.get_mut(usize::from(now.wrapping_sub(age))) {
                *count = count.wrapping_sub(1);
            }
            expired(Key::from_word(slot.key()), slot.giova());
            let stays = remembered.is_some_and(|cycles| age <= cycles);
            if stays {
                slot.lay_ghost();
                laid += 1;
            }
            stays
        });
        self.ghosts = self.ghosts.wrapping_add(laid).wrapping_sub(vanished);
        gone as u64
    }
}

impl Cache for FlatRtc {
    #[inline]
    fn take(&mut self, key: Key) -> Option<Iova> {
        if let Some(slot) = self.table.find(key.word())
            && !slot.is_ghost()
        {
            let (first, cycle, giova) = (slot.users() == 0, slot.cycle(), slot.giova());
            if slot.add_user() {
                if first {
                    self.count_released(cycle, -1);
                    if self.gaps.counted() {
                        self.gaps.count(key.word(), self.now.wrapping_sub(cycle));
                    }
                }
                self.counts.hits = self.counts.hits.wrapping_add(1);
                return Some(giova);
            }
        }
        self.counts.misses = self.counts.misses.wrapping_add(1);
        None
    }

    fn insert(&mut self, key: Key, giova: Iova) -> Result<(), NotCached> {
        let fresh = Slot::in_use(key.word(), giova).ok_or(NotCached::Address(giova))?;
        let mut entry = self.table.entry(key.word());
        let ghost = self.table.get(entry).copied();
        match ghost {
            Some(slot) if !slot.is_ghost() => return Err(NotCached::Present),
            // It left too early.
            Some(slot) => self.gaps.count(key.word(), slot.age(self.now)),
            None if self.table.occupied() >= self.limit => {
                if self.ghosts > 0 {
                    self.drop_ghosts();
                    entry = self.table.entry(key.word());
                }
                if self.table.occupied() >= self.limit {
                    return Err(NotCached::Full);
                }
            }
            None => {}
        }
        if !self.table.put(entry, fresh) {
            return Err(NotCached::OutOfMemory);
        }
        self.ghosts = self.ghosts.saturating_sub(usize::from(ghost.is_some()));
        self.counts.inserted = self.counts.inserted.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn release(&mut self, key: Key) -> Result<(), NotHeld> {
        let now = self.now;
        match self
            .table
            .find(key.word())
            .and_then(|slot| slot.drop_user(now))
        {
            Some(0) => {
                self.count_released(now, 1);
                Ok(())
            }
            Some(_) => Ok(()),
            None => Err(NotHeld(key)),
        }
    }

    fn tick(&mut self, expired: impl FnMut(Key, Iova)) {
        self.now = self.now.wrapping_add(1);
        self.gaps.settle();
        let (cycles, gaps) = (self.cycles.get(), self.gaps.clone());
        let due = |age| self.of_age(age) > 0;
        // Most cycles end without anything to look for.
        if self.ghosts > 0 || (gaps.least()..=cycles).any(|age| due(age + 1)) {
            let gone = self.forget(
                |key, age, ghost| age > if ghost { cycles } else { gaps.patience(key) },
                expired,
            );
            self.counts.expired = self.counts.expired.wrapping_add(gone);
        }
        self.table.shrink();
    }

    fn shed(&mut self, expired: impl FnMut(Key, Iova)) {
        self.drop_ghosts();
        let mut left = u32::try_from(self.limit.div_ceil(16)).unwrap_or(u32::MAX);
        // How many leave of each age: the oldest, and of the youngest that leave as many as are wanted.
        let mut leave = [0_u32; 256];
        for (age, leave) in leave.iter_mut().enumerate().rev() {
            *leave = self.of_age(u8::try_from(age).unwrap_or(u8::MAX)).min(left);
            left -= *leave;
        }
        let gone = self.forget(
            |_, age, _| match leave.get_mut(usize::from(age)) {
                Some(count) if *count > 0 => {
                    *count -= 1;
                    true
                }
                _ => false,
            },
            expired,
        );
        self.counts.forced = self.counts.forced.wrapping_add(gone);
        // They left for want of room, which is no verdict on their gaps.
        self.drop_ghosts();
    }

    fn drain(&mut self, expired: impl FnMut(Key, Iova)) {
        let gone = self.forget(|_, _, _| true, expired);
        self.counts.forced = self.counts.forced.wrapping_add(gone);
        self.drop_ghosts();
        self.table.shrink();
    }

    fn stats(&self) -> Stats {
        Stats {
            mappings: self.table.occupied().saturating_sub(self.ghosts),
            released: self.released_in.iter().map(|count| *count as usize).sum(),
            bytes: self.table.bytes(),
            ..self.counts
        }
    }
}
