//! One conformance suite over all implementations of [`ReverseCache`].

use proptest::prelude::*;
use ringfence_papers::rtc::Rtc;
use ringfence_pviommu::rtc::{
    Cycles, FlatCache, MappingKey, NotCached, NotInUse, ResidencyPolicy, Retained, Retention,
    ReverseCache,
};
use ringfence_types::{Direction, Iova, PhysAddr};

use crate::model::Model;

/// Limit of pages.
pub(crate) const LIMIT: usize = 60;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Acquires a mapping, or inserts one on a miss.
    Map(MappingKey),
    Release(MappingKey),
    Tick,
    Drain,
}

fn key() -> impl Strategy<Value = MappingKey> {
    // Few pages, so that keys collide; some of them far apart, so that trees grow high and wide.
    let page = prop_oneof![
        0..24_u64,
        (0..6_u64).prop_map(|at| at << 31 | 0x155),
        (0..80_u64).prop_map(|at| at << 8)
    ];
    let pages = prop_oneof![3 => Just(1_u64), 1 => 2..4_u64, 1 => Just(9), 1 => Just(1024)];
    (page, pages, 0..3_usize).prop_filter_map("past the end", |(page, pages, direction)| {
        MappingKey::new(PhysAddr::new(page << 12), pages, Direction::ALL[direction])
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => key().prop_map(Step::Map),
        8 => key().prop_map(Step::Release),
        3 => Just(Step::Tick),
        1 => Just(Step::Drain),
    ];
    prop::collection::vec(step, 1..200)
}

fn cycles(count: u8) -> Cycles {
    Cycles::new(count).unwrap()
}

/// Runs `steps` on the cache and the model. If `exact`, the cache has the PVIOMMU paper's residency
/// and always holds the same mappings as the model. Otherwise mappings may only leave earlier.
fn walk(cache: impl ReverseCache, c: u8, exact: bool, steps: &[Step]) {
    walk_with(cache, Model::new(cycles(c)), exact, steps);
}

fn walk_with(mut cache: impl ReverseCache, mut model: Model, exact: bool, steps: &[Step]) {
    let mut next = 0;
    for step in steps {
        match *step {
            Step::Map(key) => map(&mut cache, &mut model, key, &mut next),
            Step::Release(key) => {
                let released = cache.release(key);
                assert_eq!(released.ok(), model.release(key), "{key}");
                if let Err(NotInUse(named)) = released {
                    assert_eq!(named, key);
                }
            }
            Step::Tick => {
                let mut evicted = Vec::new();
                cache.tick(|key, giova| evicted.push((key, giova)));
                evicted.sort();
                if exact {
                    assert_eq!(evicted, model.tick());
                } else {
                    leave(&mut model, &evicted);
                    assert_eq!(model.tick(), [], "longer than C cycles");
                }
            }
            Step::Drain => {
                let mut evicted = Vec::new();
                cache.drain(|key, giova| evicted.push((key, giova)));
                leave(&mut model, &evicted);
                assert_eq!(model.released(), 0);
            }
        }
        let stats = cache.stats();
        assert_eq!(stats.mappings, model.mappings.len());
        assert_eq!(stats.released, model.released());
        assert_eq!(stats.pages, model.pages());
        assert!(stats.pages <= LIMIT as u64);
        let left = stats.inserted - stats.expired - stats.forced;
        assert_eq!(left, stats.mappings as u64);
    }
}

/// Checks that each expired mapping was released and has the model's address.
fn leave(model: &mut Model, evicted: &[(MappingKey, Iova)]) {
    for (key, giova) in evicted {
        let left = model.mappings.remove(key).expect("it was in the cache");
        assert_eq!((left.giova, left.users), (*giova, 0), "{key}");
    }
}

fn map(cache: &mut impl ReverseCache, model: &mut Model, key: MappingKey, next: &mut u64) {
    let found = cache.acquire(key);
    assert_eq!(found, model.take(key), "{key}");
    if found.is_some() {
        return;
    }
    *next += 1;
    let giova = Iova::new(*next << 12);
    let mut inserted = cache.insert(key, giova);
    if inserted == Err(NotCached::Full) {
        assert!(model.pages() + key.pages() > LIMIT as u64);
        let released = model.released();
        let mut evicted = Vec::new();
        cache.evict(|key, giova| evicted.push((key, giova)));
        let share = LIMIT.div_ceil(16) as u64;
        let pages: u64 = evicted.iter().map(|(key, _)| key.pages()).sum();
        assert!(pages <= share || evicted.len() == 1, "{pages} pages");
        assert_eq!(evicted.is_empty(), released == 0);
        // No remaining mapping was released in an earlier cycle than an evicted one.
        let age = |key: &MappingKey| model.mappings[key].released;
        let youngest = evicted.iter().map(|(key, _)| age(key)).max();
        let stays = |key: &&MappingKey| !evicted.iter().any(|(left, _)| left == *key);
        let unused = model
            .mappings
            .iter()
            .filter(|(_, mapping)| mapping.users == 0);
        let oldest = unused.map(|(key, _)| key).filter(stays).map(age).min();
        assert!(
            youngest <= oldest || oldest.is_none(),
            "{youngest:?} {oldest:?}"
        );
        leave(model, &evicted);
        inserted = cache.insert(key, giova);
    }
    match inserted {
        Ok(()) => assert!(model.insert(key, giova)),
        Err(NotCached::Full) => assert!(model.pages() + key.pages() > LIMIT as u64),
        Err(error) => panic!("{error}"),
    }
    assert!(cache.insert(key, giova).is_err(), "twice");
}

/// Generates the tests of each implementation.
macro_rules! promised {
    ($($name:ident: $make:expr, exact: $exact:expr;)*) => {$(
        mod $name {
            use super::*;

            proptest! {
                #[test]
                fn agrees_with_the_model(steps in steps(), c in 1..5_u8) {
                    walk($make(cycles(c), LIMIT), c, $exact, &steps);
                }
            }

            #[test]
            fn users_of_one_page_share_and_count() {
                super::users_of_one_page_share_and_count(&mut $make(cycles(3), LIMIT));
            }

            #[test]
            fn nothing_serves_another_direction_or_length() {
                super::nothing_serves_another_direction_or_length(&mut $make(cycles(3), LIMIT));
            }

            #[test]
            fn lengths_of_a_page_leave_one_by_one() {
                for evicted in 0..16 {
                    super::lengths_of_a_page_leave_one_by_one($make(cycles(2), LIMIT), evicted);
                }
            }
        }
    )*};
}

promised! {
    tree: Rtc::new, exact: true;
    flat: |cycles, limit| FlatCache::new(cycles, limit, ResidencyPolicy::Fixed), exact: true;
    adaptive: |cycles, limit| FlatCache::new(cycles, limit, ResidencyPolicy::Adaptive { late: 10 }),
        exact: false;
}

proptest! {
    /// Every retention, with few and with many released mappings.
    #[test]
    fn retention_agrees_with_the_model(
        steps in steps(),
        c in 1..5_u8,
        released_max in prop_oneof![Just(0_usize), 1..9_usize],
        timed in any::<bool>(),
    ) {
        let residency = if timed { ResidencyPolicy::Fixed } else { ResidencyPolicy::UntilFull };
        for retention in [Retention { residency, released_max }, Retention::from(residency)] {
            let cache = FlatCache::new(cycles(c), LIMIT, retention);
            walk_with(cache, Model::that_keeps(cycles(c), retention), true, &steps);
        }
    }
}

/// A cache without a residency evicts the oldest mappings, even if more cycles have ended than it
/// counts.
#[test]
fn the_oldest_leave_a_full_cache_after_any_number_of_cycles() {
    let mut cache = FlatCache::new(cycles(3), 16, ResidencyPolicy::UntilFull);
    let at = |page: u64| MappingKey::new(PhysAddr::new(page << 12), 1, Direction::ToDevice);
    for page in 0..16 {
        let key = at(page).unwrap();
        cache.insert(key, Iova::new((page + 1) << 12)).unwrap();
        cache.release(key).unwrap();
        for _ in 0..30 {
            cache.tick(|key, _| panic!("{key} expired"));
        }
    }
    let mut left = Vec::new();
    for _ in 0..16 {
        cache.evict(|key, _| left.push(key.first().get() >> 12));
    }
    // Mappings that are older than 128 cycles may share their age.
    let (oldest, others) = left.split_at(12);
    assert!(oldest.iter().all(|page| *page < 12), "{left:?}");
    assert_eq!(others, [12, 13, 14, 15]);
}

fn page(pages: u64, direction: Direction) -> MappingKey {
    MappingKey::new(PhysAddr::new(0x7000), pages, direction).unwrap()
}

/// Two buffers share one page, one is released, and the timer expires.
fn users_of_one_page_share_and_count(cache: &mut impl ReverseCache) {
    let key = page(1, Direction::FromDevice);
    let giova = Iova::new(0x5000);
    assert_eq!(cache.acquire(key), None);
    cache.insert(key, giova).unwrap();
    assert_eq!(cache.acquire(key), Some(giova));
    cache.release(key).unwrap();
    for _ in 0..9 {
        cache.tick(|key, _| panic!("{key} is in use"));
    }
    cache.release(key).unwrap();
    assert_eq!(cache.release(key), Err(NotInUse(key)));
    let mut left = Vec::new();
    for cycle in 1..9 {
        cache.tick(|key, giova| left.push((cycle, key, giova)));
    }
    assert_eq!(left, [(4, key, giova)]);
    assert_eq!(cache.acquire(key), None);
}

/// A mapping of one direction and length does not serve another.
fn nothing_serves_another_direction_or_length(cache: &mut impl ReverseCache) {
    let made = page(2, Direction::Bidirectional);
    cache.insert(made, Iova::new(0x5000)).unwrap();
    cache.release(made).unwrap();
    for direction in Direction::ALL {
        for pages in 1..4 {
            let asked = page(pages, direction);
            assert_eq!(cache.acquire(asked).is_some(), asked == made, "{asked}");
        }
    }
}

/// Several mappings of one page and direction with different lengths. Those in the bit mask
/// `evicted` expire; the cache still finds the others.
fn lengths_of_a_page_leave_one_by_one(mut cache: impl ReverseCache, evicted: u64) {
    let lengths = 1..=4_u64;
    let key = |pages| page(pages, Direction::ToDevice);
    let leaves = |pages: &u64| evicted >> (pages - 1) & 1 == 1;
    for pages in lengths.clone() {
        assert_eq!(cache.insert(key(pages), Iova::new(pages << 12)), Ok(()));
    }
    for pages in lengths.clone().filter(leaves) {
        assert_eq!(cache.release(key(pages)), Ok(Retained::Cached));
    }
    let mut left = Vec::new();
    cache.drain(|key, _| left.push(key.pages()));
    left.sort_unstable();
    assert_eq!(left, lengths.clone().filter(leaves).collect::<Vec<_>>());
    for pages in lengths {
        let stays = (!leaves(&pages)).then_some(Iova::new(pages << 12));
        assert_eq!(
            cache.acquire(key(pages)),
            stays,
            "{pages} pages of {evicted:04b}"
        );
    }
}
