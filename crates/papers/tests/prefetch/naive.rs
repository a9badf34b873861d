//! Naive implementations that follow the published descriptions, with lists that are searched
//! linearly.

use proptest::prelude::*;
use ringfence_papers::prefetch::{
    Distance, LookupOutcome, Markov, PrefetchConfig, PrefetchStats, Prefetcher, PrefetchingIotlb,
    Recency, Variant,
};
use ringfence_types::Pfn;

/// Moves or inserts `item` at the front and drops the last item beyond `limit`.
fn latest_first<T: PartialEq>(list: &mut Vec<T>, item: T, limit: usize) -> Option<T> {
    list.retain(|other| *other != item);
    list.insert(0, item);
    (list.len() > limit).then(|| list.pop()).flatten()
}

/// Rows of a prediction table, the one looked up last first.
type Rows = Vec<(i64, Vec<i64>)>;

fn look_up(rows: &mut Rows, key: i64, history: usize) -> Vec<i64> {
    let found = rows.iter().position(|row| row.0 == key);
    let row = found.map_or((key, Vec::new()), |at| rows.remove(at));
    let next = row.1.clone();
    rows.insert(0, row);
    rows.truncate(history);
    next
}

fn learn(rows: &mut Rows, key: i64, next: i64, slots: usize) {
    if let Some(row) = rows.iter_mut().find(|row| row.0 == key) {
        latest_first(&mut row.1, next, slots);
    }
}

trait Naive: Default {
    fn missed(&mut self, page: i64, history: usize, slots: usize) -> Vec<i64>;
    fn evicted(&mut self, _page: i64, _history: usize) {}
    fn forget(&mut self, page: i64);
}

#[derive(Default)]
struct NaiveMarkov(Rows, Option<i64>);

impl Naive for NaiveMarkov {
    fn missed(&mut self, page: i64, history: usize, slots: usize) -> Vec<i64> {
        let proposals = look_up(&mut self.0, page, history);
        if let Some(last) = self.1 {
            learn(&mut self.0, last, page, slots);
        }
        self.1 = Some(page);
        proposals
    }

    fn forget(&mut self, page: i64) {
        self.0.retain(|row| row.0 != page);
        for row in &mut self.0 {
            row.1.retain(|next| *next != page);
        }
        self.1 = self.1.filter(|last| *last != page);
    }
}

#[derive(Default)]
struct NaiveRecency(Vec<i64>);

impl Naive for NaiveRecency {
    fn missed(&mut self, page: i64, _history: usize, _slots: usize) -> Vec<i64> {
        let Some(at) = self.0.iter().position(|other| *other == page) else {
            return Vec::new();
        };
        let above = at.checked_sub(1).map(|at| self.0[at]);
        let below = self.0.get(at + 1).copied();
        self.0.remove(at);
        above.into_iter().chain(below).collect()
    }

    fn evicted(&mut self, page: i64, history: usize) {
        latest_first(&mut self.0, page, history);
    }

    fn forget(&mut self, page: i64) {
        self.0.retain(|other| *other != page);
    }
}

#[derive(Default)]
struct NaiveDistance {
    rows: Rows,
    last: Option<i64>,
    last_distance: Option<i64>,
}

impl Naive for NaiveDistance {
    fn missed(&mut self, page: i64, history: usize, slots: usize) -> Vec<i64> {
        let Some(last) = self.last.replace(page) else {
            return Vec::new();
        };
        let distance = page - last;
        let next = look_up(&mut self.rows, distance, history);
        if let Some(before) = self.last_distance.replace(distance) {
            learn(&mut self.rows, before, distance, slots);
        }
        let proposals = next.into_iter().map(|next| page + next);
        proposals.filter(|page| *page >= 0).collect()
    }

    fn forget(&mut self, page: i64) {
        if self.last == Some(page) {
            (self.last, self.last_distance) = (None, None);
        }
    }
}

/// [`PrefetchingIotlb`] implemented with lists.
#[derive(Default)]
struct NaiveIotlb<N> {
    iotlb: Vec<i64>,
    buffer: Vec<i64>,
    prefetcher: N,
    stats: PrefetchStats,
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    config: PrefetchConfig,
    entries: u32,
    buffered: u32,
}

impl<N: Naive> NaiveIotlb<N> {
    fn access(&mut self, sizes: Sizes, page: i64, mapped: &[i64]) -> LookupOutcome {
        let (entries, buffered) = (sizes.entries as usize, sizes.buffered as usize);
        let (history, slots) = (sizes.config.history as usize, sizes.config.slots as usize);
        if self.iotlb.contains(&page) {
            latest_first(&mut self.iotlb, page, entries);
            self.stats.hits += 1;
            return LookupOutcome::Cached;
        }
        let served = match self.buffer.contains(&page) {
            true => LookupOutcome::Predicted,
            false if mapped.contains(&page) => LookupOutcome::Walked,
            false => {
                self.stats.faults += 1;
                return LookupOutcome::Faulted;
            }
        };
        self.stats.misses += 1;
        self.stats.predicted += u64::from(served == LookupOutcome::Predicted);
        self.buffer.retain(|other| *other != page);
        let old = latest_first(&mut self.iotlb, page, entries);
        let proposals = self.prefetcher.missed(page, history, slots);
        if let Some(old) = old {
            self.prefetcher.evicted(old, history);
        }
        for proposal in proposals {
            let cached = self.iotlb.contains(&proposal) || self.buffer.contains(&proposal);
            if proposal == page || cached {
                continue;
            }
            let there = mapped.contains(&proposal);
            match sizes.config.variant {
                Variant::Modified => {
                    self.stats.verification_walks += 1;
                    self.stats.rejected += u64::from(!there);
                }
                Variant::Baseline => self.stats.mispredicted += u64::from(!there),
            }
            if there && latest_first(&mut self.buffer, proposal, buffered).is_some() {
                self.stats.mispredicted += 1;
            }
        }
        served
    }

    fn unmap(&mut self, sizes: Sizes, page: i64) {
        let cached = self.iotlb.contains(&page);
        self.iotlb.retain(|other| *other != page);
        self.stats.discarded += u64::from(self.buffer.contains(&page));
        self.buffer.retain(|other| *other != page);
        match sizes.config.variant {
            Variant::Baseline => self.prefetcher.forget(page),
            Variant::Modified if cached => {
                self.prefetcher.evicted(page, sizes.config.history as usize);
            }
            Variant::Modified => {}
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Map(i64),
    Access(i64),
    Unmap(i64),
    /// Map, access and unmap each of these pages, as in one lap of a ring.
    Lap(Vec<i64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let page = || 0..10_i64;
    let step = prop_oneof![
        2 => page().prop_map(Step::Map),
        3 => page().prop_map(Step::Access),
        2 => page().prop_map(Step::Unmap),
        1 => prop::collection::vec(page(), 1..8).prop_map(Step::Lap),
    ];
    prop::collection::vec(step, 0..120)
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (
        prop::sample::select(&Variant::ALL[..]),
        0..8_u32,
        1..4_u8,
        0..5_u32,
        0..4_u32,
    )
        .prop_map(|(variant, history, slots, entries, buffered)| Sizes {
            config: PrefetchConfig {
                variant,
                history,
                slots,
            },
            entries,
            buffered,
        })
}

fn same<P: Prefetcher, N: Naive>(sizes: Sizes, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut ours = PrefetchingIotlb::<P>::new(sizes.config, sizes.entries, sizes.buffered);
    let mut naive = NaiveIotlb::<N>::default();
    let mut mapped: Vec<i64> = Vec::new();
    for step in steps {
        let laps = match step {
            Step::Lap(pages) => pages.clone(),
            _ => Vec::new(),
        };
        let lap = laps
            .iter()
            .flat_map(|&page| [Step::Map(page), Step::Access(page), Step::Unmap(page)]);
        for step in lap.chain([step.clone()]) {
            match step {
                Step::Map(page) if !mapped.contains(&page) => mapped.push(page),
                Step::Map(_) | Step::Lap(_) => {}
                Step::Access(page) => {
                    let served = ours.access(Pfn::new(page as u64), |page| {
                        mapped.contains(&(page.get() as i64))
                    });
                    prop_assert_eq!(served, naive.access(sizes, page, &mapped));
                }
                Step::Unmap(page) => {
                    mapped.retain(|other| *other != page);
                    ours.unmap(Pfn::new(page as u64));
                    naive.unmap(sizes, page);
                }
            }
            prop_assert_eq!(ours.stats(), &naive.stats);
            let [entries, buffered, history] = ours.held();
            prop_assert!(entries <= sizes.entries as usize);
            prop_assert!(buffered <= sizes.buffered as usize);
            prop_assert!(history <= sizes.config.history as usize);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::cases(1024, 0x5044_0001))]

    #[test]
    fn markov_equals_its_description(sizes in sizes(), steps in steps()) {
        same::<Markov, NaiveMarkov>(sizes, &steps)?;
    }

    #[test]
    fn recency_equals_its_description(sizes in sizes(), steps in steps()) {
        same::<Recency, NaiveRecency>(sizes, &steps)?;
    }

    #[test]
    fn distance_equals_its_description(sizes in sizes(), steps in steps()) {
        same::<Distance, NaiveDistance>(sizes, &steps)?;
    }
}
