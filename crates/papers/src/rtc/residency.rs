//! Measures how long a reverse cache keeps released mappings (PVIOMMU section 4.5), on a virtual
//! clock. Every seventh mapping is used again.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova, PhysAddr};

use ringfence_pviommu::rtc::{Cycles, MappingKey, NotCached, ReverseCache};

/// One mapping in this many is used again.
pub const REUSED: u64 = 7;

/// Schedule of releases, in units of time: one mapping in each unit. One in [`REUSED`] mappings is
/// used again and then released for the last time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleaseSchedule {
    /// Number of mappings, and of units in which they are released.
    pub releases: u64,
    /// Further mappings that stay in use, after one release and reuse at the start.
    pub held: u64,
    /// Time from the first release to the next use.
    pub reuse_after: u64,
    /// Time from the first release to the last one; more than `reuse_after`.
    pub last_release_after: u64,
}

impl ReleaseSchedule {
    /// Creates a schedule: reuse after one and a half cycles of `cycle` units, last release two
    /// cycles later. A cycle has at least one unit.
    pub const fn in_cycles(cycle: u64, releases: u64, held: u64) -> Self {
        let cycle = if cycle == 0 { 1 } else { cycle };
        let reuse_after = cycle.saturating_add(cycle / 2);
        Self {
            releases,
            held,
            reuse_after,
            last_release_after: reuse_after.saturating_add(cycle).saturating_add(cycle),
        }
    }

    /// Returns the number of mappings, with those that stay in use.
    const fn mappings(&self) -> u64 {
        self.releases.saturating_add(self.held)
    }

    /// Returns the time of the last release.
    const fn last_release(&self) -> u64 {
        self.releases.saturating_add(self.last_release_after)
    }

    /// Returns the mapping whose first release is `age` units before the end of unit `now`.
    fn released_before(&self, now: u64, age: u64) -> Option<u64> {
        let mapping = now.checked_sub(1)?.checked_sub(age)?;
        (mapping < self.releases).then_some(mapping)
    }

    /// Like [`released_before`](Self::released_before), if the mapping is used again.
    fn reused_before(&self, now: u64, age: u64) -> Option<u64> {
        let mapping = self.released_before(now, age)?;
        mapping.is_multiple_of(REUSED).then_some(mapping)
    }
}

/// Measurements of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Residency {
    /// Times from the last release of a mapping to its expiry, one for each expiry; sorted.
    pub stays: Vec<u64>,
    /// Ends of cycles at which mappings expired, which is the number of unmap requests.
    pub batches: u64,
    /// Reuses that found their mapping. The others had to map again.
    pub hits: u64,
    /// Held mappings that were still cached at the end, after their C cycles were over.
    pub survivors: u64,
    /// Held mappings that expired although they were in use.
    pub held_expired: u64,
}

/// Runs `schedule` on a cache with cycles of `cycle` units, until all mappings expire.
///
/// At one instant, releases precede the end of a cycle: a mapping released at the last instant of a
/// cycle belongs to it.
///
/// # Errors
/// The cache refuses one of the first mappings. It then holds those before it.
pub fn residency(
    cache: &mut impl ReverseCache,
    cycle: u64,
    schedule: ReleaseSchedule,
) -> Result<Residency, NotCached> {
    let cycle = cycle.max(1);
    let mut run = Run::new(cache, schedule);
    run.insert_all()?;
    run.reuse_held();
    let last_release = schedule.last_release();
    // A cache that loses a mapping never expires it. No mapping stays longer than
    // `Cycles::MAX + 1` cycles.
    let end = last_release.saturating_add(cycle.saturating_mul(u64::from(Cycles::MAX) + 2));
    while run.now < last_release || (run.cached > 0 && run.now < end) {
        run.now += 1;
        run.release_due();
        run.reuse_due();
        if run.now.is_multiple_of(cycle) {
            run.end_cycle();
        }
    }
    run.count_survivors();
    run.result.stays.sort_unstable();
    Ok(run.result)
}

/// One run of a schedule. Mappings 0 to `releases` - 1 are released; those above are held.
struct Run<'c, C> {
    cache: &'c mut C,
    schedule: ReleaseSchedule,
    now: u64,
    /// Number of cached mappings that are not held.
    cached: u64,
    /// Time of the latest release of each mapping that is not held.
    released_at: Vec<u64>,
    result: Residency,
}

impl<'c, C: ReverseCache> Run<'c, C> {
    fn new(cache: &'c mut C, schedule: ReleaseSchedule) -> Self {
        Self {
            cache,
            schedule,
            now: 0,
            cached: schedule.releases,
            released_at: alloc::vec![0; usize::try_from(schedule.releases).unwrap_or(0)],
            result: Residency::default(),
        }
    }

    fn insert_all(&mut self) -> Result<(), NotCached> {
        (0..self.schedule.mappings())
            .filter_map(key)
            .try_for_each(|key| self.cache.insert(key, iova(key)))
    }

    /// Returns the keys of the held mappings.
    fn held(&self) -> impl Iterator<Item = MappingKey> + use<C> {
        (self.schedule.releases..self.schedule.mappings()).filter_map(key)
    }

    /// Releases each held mapping once and uses it again.
    fn reuse_held(&mut self) {
        for key in self.held() {
            // A cache under test may lose a mapping: `count_survivors` and `held_expired` tell.
            let _ = self.cache.release(key);
            let _ = self.cache.acquire(key);
        }
    }

    /// Releases the mappings whose first or last release is due.
    fn release_due(&mut self) {
        let first = self.schedule.released_before(self.now, 0);
        let last = self
            .schedule
            .reused_before(self.now, self.schedule.last_release_after);
        for mapping in [first, last].into_iter().flatten() {
            let is_released = key(mapping).is_some_and(|key| self.cache.release(key).is_ok());
            if is_released && let Some(time) = self.released_at.get_mut(mapping as usize) {
                *time = self.now;
            }
        }
    }

    /// Uses the mapping whose reuse is due. Maps it again if it is no longer cached.
    fn reuse_due(&mut self) {
        let reused = self
            .schedule
            .reused_before(self.now, self.schedule.reuse_after);
        let Some(key) = reused.and_then(key) else {
            return;
        };
        if self.cache.acquire(key).is_some() {
            self.result.hits += 1;
        } else if self.cache.insert(key, iova(key)).is_ok() {
            self.cached += 1;
        }
    }

    /// Ends a cycle and records the mappings that expire.
    fn end_cycle(&mut self) {
        let Self {
            cache,
            now,
            cached,
            released_at,
            result,
            ..
        } = self;
        let mut any_expired = false;
        cache.tick(|key, _| {
            any_expired = true;
            let mapping = usize::try_from(key.first().get() >> 12).ok();
            match mapping.and_then(|mapping| released_at.get(mapping)) {
                Some(time) => {
                    result.stays.push(now.saturating_sub(*time));
                    *cached = cached.saturating_sub(1);
                }
                None => result.held_expired += 1,
            }
        });
        result.batches += u64::from(any_expired);
    }

    fn count_survivors(&mut self) {
        for key in self.held() {
            // A cached mapping in use has a user, so its release succeeds.
            self.result.survivors += u64::from(self.cache.release(key).is_ok());
        }
    }
}

fn key(mapping: u64) -> Option<MappingKey> {
    MappingKey::new(PhysAddr::new(mapping << 12), 1, Direction::ToDevice)
}

fn iova(key: MappingKey) -> Iova {
    Iova::new(key.first().get())
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use ringfence_pviommu::rtc::{CacheStats, NotInUse, Retained};

    use super::*;

    /// A cache that keeps released mappings for `COUNT` whole cycles, with a defect.
    #[derive(Default)]
    struct Fake {
        /// Users of each mapping, and the cycles since it was used last.
        mappings: BTreeMap<MappingKey, (u32, u64)>,
        /// Maximum number of mappings.
        limit: usize,
        defect: Defect,
    }

    #[derive(Default, PartialEq, Eq)]
    enum Defect {
        #[default]
        None,
        /// Mappings expire although they are in use.
        ExpiresHeld,
        /// The first mapping disappears at the end of a cycle, and does not expire.
        LosesFirst,
    }

    const COUNT: u64 = 2;

    impl ReverseCache for Fake {
        fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
            let (users, idle) = self.mappings.get_mut(&key)?;
            (*users, *idle) = (*users + 1, 0);
            Some(iova(key))
        }

        fn insert(&mut self, key: MappingKey, _: Iova) -> Result<(), NotCached> {
            if self.mappings.len() == self.limit {
                return Err(NotCached::Full);
            }
            self.mappings.insert(key, (1, 0));
            Ok(())
        }

        fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse> {
            let mapping = self.mappings.get_mut(&key).filter(|(users, _)| *users > 0);
            let (users, idle) = mapping.ok_or(NotInUse(key))?;
            (*users, *idle) = (*users - 1, 0);
            Ok(Retained::Cached)
        }

        fn tick(&mut self, mut expired: impl FnMut(MappingKey, Iova)) {
            if self.defect == Defect::LosesFirst {
                self.mappings.pop_first();
            }
            let ignores_users = self.defect == Defect::ExpiresHeld;
            self.mappings.retain(|key, (users, idle)| {
                *idle += u64::from(*users == 0 || ignores_users);
                let keep = *idle <= COUNT;
                if !keep {
                    expired(*key, iova(*key));
                }
                keep
            });
        }

        fn evict(&mut self, _: impl FnMut(MappingKey, Iova)) {}

        fn drain(&mut self, _: impl FnMut(MappingKey, Iova)) {}

        fn stats(&self) -> CacheStats {
            CacheStats::default()
        }
    }

    const CYCLE: u64 = 10;

    fn run(limit: usize, defect: Defect) -> Result<Residency, NotCached> {
        let mut cache = Fake {
            limit,
            defect,
            ..Fake::default()
        };
        let schedule = ReleaseSchedule::in_cycles(CYCLE, 20, 3);
        residency(&mut cache, CYCLE, schedule)
    }

    #[test]
    fn each_mapping_that_is_not_held_expires_once() {
        let found = run(23, Defect::None).unwrap();
        assert_eq!(found.stays.len(), 20);
        assert_eq!(found.stays.first(), Some(&(COUNT * CYCLE)));
        assert!(found.stays.last() < Some(&((COUNT + 1) * CYCLE)));
        // Mappings 0, 7 and 14 are used again.
        assert_eq!((found.hits, found.survivors, found.held_expired), (3, 3, 0));
    }

    #[test]
    fn the_expiry_of_a_held_mapping_is_not_a_stay() {
        let found = run(23, Defect::ExpiresHeld).unwrap();
        assert_eq!((found.survivors, found.held_expired), (0, 3));
        assert_eq!((found.stays.len(), found.hits), (20, 3));
    }

    #[test]
    fn a_cache_that_loses_mappings_ends_the_measurement() {
        let found = run(23, Defect::LosesFirst).unwrap();
        assert!(found.stays.len() < 20, "{found:?}");
    }

    #[test]
    fn a_cache_that_refuses_a_mapping_is_not_measured() {
        assert_eq!(run(22, Defect::None), Err(NotCached::Full));
    }

    #[test]
    fn cycles_of_no_length_have_one_unit() {
        let [zero, one] = [0, 1].map(|cycle| ReleaseSchedule::in_cycles(cycle, 9, 0));
        assert_eq!(zero, one);
        assert!(zero.last_release_after > zero.reuse_after);
    }
}
