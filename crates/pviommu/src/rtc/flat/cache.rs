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
    /// Mappings that nobody uses, and keys of those that left.
    released: usize,
    ghosts: usize,
    counts: Stats,
}

impl FlatRtc {
    /// An empty cache of at most `limit` mappings. It takes memory as it fills and gives it back when it empties: 16 bytes an entry, at most three
    /// quarters of the entries occupied.
    pub fn new(cycles: Cycles, limit: usize, residency: Residency) -> Self {
        Self {
            table: Table::new(limit),
            gaps: Gaps::new(residency, cycles),
            cycles,
            limit,
            now: 0,
            released: 0,
            ghosts: 0,
            counts: Stats::default(),
        }
    }

    fn drop_ghosts(&mut self) {
        self.table.retain(|slot| !slot.is_ghost());
        self.ghosts = 0;
    }

    /// Removes released mappings for which `leaves` says so, by key's word and age; ghosts too where it says so.
    fn forget(
        &mut self,
        mut leaves: impl FnMut(u64, u8) -> bool,
        mut expired: impl FnMut(Key, Iova),
    ) -> u64 {
        let (now, mut gone, mut ghosts) = (self.now, 0_usize, 0_usize);
        self.table.retain(|slot| {
            if slot.users() > 0 || !leaves(slot.key(), slot.age(now)) {
                return true;
            }
            if slot.is_ghost() {
                ghosts += 1;
            } else {
                gone += 1;
                expired(Key::from_word(slot.key()), slot.giova());
            }
            false
        });
        self.released = self.released.saturating_sub(gone);
        self.ghosts = self.ghosts.saturating_sub(ghosts);
        gone as u64
    }

    /// The end of a cycle where mappings may leave before C cycles are over: their keys stay until then.
    fn forget_adaptively(&mut self, mut expired: impl FnMut(Key, Iova)) -> u64 {
        let (now, cycles, gaps) = (self.now, self.cycles.get(), &self.gaps);
        let (mut gone, mut laid, mut vanished) = (0_usize, 0_usize, 0_usize);
        self.table.retain(|slot| {
            let age = slot.age(now);
            if slot.users() > 0 || age <= gaps.patience(slot.key()) {
                return true;
            }
            let stays = age <= cycles;
            if slot.is_ghost() {
                vanished += usize::from(!stays);
                return stays;
            }
            gone += 1;
            expired(Key::from_word(slot.key()), slot.giova());
            if stays {
                slot.lay_ghost();
                laid += 1;
            }
            stays
        });
        self.released = self.released.saturating_sub(gone);
        self.ghosts = self.ghosts.saturating_add(laid).saturating_sub(vanished);
        gone as u64
    }
}

impl Cache for FlatRtc {
    #[inline]
    fn take(&mut self, key: Key) -> Option<Iova> {
        if let Some(slot) = self.table.find(key.word())
            && !slot.is_ghost()
        {
            let first = slot.users() == 0;
            if slot.add_user() {
                if first {
                    self.released = self.released.wrapping_sub(1);
                    if self.gaps.counted() {
                        self.gaps.count(key.word(), slot.age(self.now));
                    }
                }
                self.counts.hits = self.counts.hits.wrapping_add(1);
                return Some(slot.giova());
            }
        }
        self.counts.misses = self.counts.misses.wrapping_add(1);
        None
    }

    fn insert(&mut self, key: Key, giova: Iova) -> Result<(), NotCached> {
        let fresh = Slot::in_use(key.word(), giova).ok_or(NotCached::Address(giova))?;
        let now = self.now;
        let ghost = match self.table.find(key.word()) {
            Some(slot) if !slot.is_ghost() => return Err(NotCached::Present),
            Some(slot) => {
                // It left too early.
                self.gaps.count(key.word(), slot.age(now));
                true
            }
            None => false,
        };
        if !ghost && self.table.occupied() >= self.limit {
            if self.ghosts == 0 {
                return Err(NotCached::Full);
            }
            self.drop_ghosts();
            if self.table.occupied() >= self.limit {
                return Err(NotCached::Full);
            }
        }
        if !self.table.put(fresh) {
            return Err(NotCached::OutOfMemory);
        }
        self.ghosts = self.ghosts.saturating_sub(usize::from(ghost));
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
                self.released = self.released.wrapping_add(1);
                Ok(())
            }
            Some(_) => Ok(()),
            None => Err(NotHeld(key)),
        }
    }

    fn tick(&mut self, expired: impl FnMut(Key, Iova)) {
        self.now = self.now.wrapping_add(1);
        self.gaps.settle();
        let gone = if self.gaps.counted() {
            self.forget_adaptively(expired)
        } else {
            let cycles = self.cycles.get();
            self.forget(|_, age| age > cycles, expired)
        };
        self.counts.expired = self.counts.expired.wrapping_add(gone);
        self.table.shrink();
    }

    fn shed(&mut self, mut expired: impl FnMut(Key, Iova)) {
        self.drop_ghosts();
        // Released mappings by age, so that one more walk removes whole cycles from the oldest on.
        let mut ages = [0_usize; 256];
        let now = self.now;
        self.table.retain(|slot| {
            if slot.users() == 0
                && let Some(count) = ages.get_mut(usize::from(slot.age(now)))
            {
                *count += 1;
            }
            true
        });
        let mut left = self.limit.div_ceil(16).min(self.released);
        // How many leave of each age; of the youngest that leave, some stay.
        for count in ages.iter_mut().rev() {
            *count = (*count).min(left);
            left -= *count;
        }
        let gone = self.forget(
            |_, age| match ages.get_mut(usize::from(age)) {
                Some(count) if *count > 0 => {
                    *count -= 1;
                    true
                }
                _ => false,
            },
            &mut expired,
        );
        self.counts.forced = self.counts.forced.wrapping_add(gone);
    }

    fn drain(&mut self, expired: impl FnMut(Key, Iova)) {
        let gone = self.forget(|_, _| true, expired);
        self.counts.forced = self.counts.forced.wrapping_add(gone);
        self.table.shrink();
    }

    fn stats(&self) -> Stats {
        Stats {
            mappings: self.table.occupied().saturating_sub(self.ghosts),
            released: self.released,
            bytes: self.table.bytes(),
            ..self.counts
        }
    }
}
