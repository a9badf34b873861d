//! X25: effects of the host's page pool and pointer to the last table, overcommitted memory, and
//! migration (PVIOMMU sections 4.3, 4.4 and 4.6).

mod fixture;
mod modes;
mod reclaim_migration;

use ringfence_papers::LastTableAsPublished;
use ringfence_pviommu::backend::{
    FixedLastTable, LastTable, NoLastTable, POOL_PAGES, REFILL_BELOW,
};
use ringfence_pviommu::rtc::{Cycles, FlatCache, MappingKey, ResidencyPolicy, ReverseCache};
use ringfence_types::{Direction, PhysAddr, TABLE_WORDS};
use std::hint::black_box;

use self::fixture::{
    FixtureHost, GUEST_PAGES, PAGE, PAGES_MAX, Pattern, ask, giova, gpa, host, map, unmap,
};
use self::modes::in_modes;
use self::reclaim_migration::{migration, overcommit};
use super::experiment::Experiment;
use super::finding::{FindingRow, Findings, Measured, Published, median};
use super::published::Sheet;
use super::setting::Setting;
use ringfence_lab::LabError;
use ringfence_lab::meter::cycles;

pub(super) const EXPERIMENT: Experiment = Experiment {
    id: "X25",
    title: "Effect of the host page pool and the last-table pointer",
    source: "PVIOMMU sections 4.3, 4.4 and 4.6",
    measure,
};

/// Selects Table 5's row for TCP_STREAM.
const STREAM: (&str, &str) = ("test", "TCP_STREAM");
/// Requests per timed block.
const BLOCK: u64 = 512;

/// Second-stage walks per map request once all of the guest's memory has frames, and share of pages
/// that resolve to another page's frame.
struct TranslationCost {
    walks: f64,
    wrong: f64,
}

/// Measures a host whose guest uses all of its memory in the order of `pattern`, twice.
fn translation_cost<K: LastTable>(last: K, pattern: Pattern) -> Result<TranslationCost, LabError> {
    let (mut host, _) = host(last)?;
    let mut frames = std::collections::HashMap::new();
    let mut wrong = 0_u64;
    for page in (0..GUEST_PAGES).map(|number| pattern.page(number)) {
        ask(&mut host, &map(&[(0, page)])?)?;
        ask(&mut host, &unmap(&[0])?)?;
        let Ok(frame) = host.backing().resolve(gpa(page)) else {
            return Err(LabError::Internal("memory without a frame"));
        };
        wrong += u64::from(*frames.entry(frame).or_insert(page) != page);
    }
    let before = host.backing().stats().walks;
    for page in (0..GUEST_PAGES).map(|number| pattern.page(number)) {
        ask(&mut host, &map(&[(0, page)])?)?;
        ask(&mut host, &unmap(&[0])?)?;
    }
    let walks = host.backing().stats().walks - before;
    Ok(TranslationCost {
        walks: walks as f64 / GUEST_PAGES as f64,
        wrong: wrong as f64 / GUEST_PAGES as f64,
    })
}

fn count_row(what: impl Into<String>, unit: &'static str, value: f64) -> FindingRow {
    FindingRow::counted(what, unit, value)
}

fn stated_in_text(text: &str, value: f64, section: &str) -> Published {
    Published::new(text, value, format!("PVIOMMU section {section}, in words"))
}

fn add_pool_sizes(found: &mut Findings) -> Result<(), LabError> {
    let params = Sheet::named("pviommu_params")?;
    let cell = |name| params.printed(&[("parameter", name)], "value");
    let pool = POOL_PAGES as u64 * PAGE;
    for (what, unit, value, name) in [
        (
            "Pool: memory",
            "MiB",
            pool as f64 / (1 << 20) as f64,
            "page pool size",
        ),
        (
            "Pool: pointers",
            "",
            POOL_PAGES as f64,
            "pool ring pointers",
        ),
        (
            "Pool: refilled below",
            "pages",
            REFILL_BELOW as f64,
            "pool refill threshold",
        ),
        (
            "Pool: memory and pointers",
            "KiB",
            (pool + 8 * POOL_PAGES as u64) as f64 / 1024.0,
            "pool space",
        ),
    ] {
        found.push(count_row(what, unit, value).exact(cell(name)?));
    }
    let pointer = count_row(
        "Last-table pointer with its prefix",
        "bytes",
        size_of::<FixedLastTable>() as f64,
    );
    found.push(pointer.with_published(cell("last-table cache space")?));
    Ok(())
}

fn add_last_table_walks(found: &mut Findings, pages: u64) -> Result<(), LabError> {
    for (name, pattern) in [
        (
            format!("{pages} consecutive pages, repeatedly"),
            Pattern::Few(pages),
        ),
        ("all pages in order".into(), Pattern::InOrder),
        ("scattered pages".into(), Pattern::Scattered),
    ] {
        let without = translation_cost(NoLastTable, pattern)?;
        let with = translation_cost(FixedLastTable::default(), pattern)?;
        let as_published = translation_cost(LastTableAsPublished::default(), pattern)?;
        found.push(count_row(
            format!("{name}: walks per map, no pointer"),
            "",
            without.walks,
        ));
        found.push(count_row(
            format!("{name}: walks per map, pointer"),
            "",
            with.walks,
        ));
        found.push(count_row(
            format!("{name}: walks per map, pointer as published"),
            "",
            as_published.walks,
        ));
        let none = || stated_in_text("its own", 0.0, "4.6");
        let wrong = |what: &str, value| {
            count_row(
                format!("{name}: share of pages with another page's frame, {what}"),
                "",
                value,
            )
        };
        found.push(wrong("pointer", with.wrong).exact(none()));
        found.push(wrong("pointer as published", as_published.wrong).with_published(none()));
    }
    Ok(())
}

fn add_pool_use(found: &mut Findings) -> Result<(), LabError> {
    for (name, together) in [
        ("one page per request", 1),
        ("1024 pages per request", u64::from(PAGES_MAX)),
    ] {
        let (mut host, _) = host(FixedLastTable::default())?;
        let mut first = 0;
        while first < GUEST_PAGES {
            let pairs: Vec<(u64, u64)> =
                (first..first + together).map(|page| (page, page)).collect();
            ask(&mut host, &map(&pairs)?)?;
            first += together;
        }
        let stats = *host.backing().pool().stats();
        let each = |what: &str, value: u64| {
            count_row(
                format!("Frames on demand, {name}: {what}"),
                "",
                value as f64,
            )
        };
        let share = stats.from_ring as f64 / (stats.from_ring + stats.from_host).max(1) as f64;
        found.push(count_row(
            format!("Frames on demand, {name}: share from the pool"),
            "",
            share,
        ));
        found.push(each(
            "frames requested while the guest waits",
            stats.from_host,
        ));
        found.push(each("refills between requests", stats.refills));
    }
    Ok(())
}

/// Cycles of one round.
#[derive(Debug, Clone, Copy)]
struct RoundCost {
    /// A map request without the pointer.
    walk: f64,
    /// A map request with the pointer.
    last_table: f64,
    /// A cache hit with its release.
    cache_hit: f64,
}

/// Returns the cost of a measured and a modelled part, with the spread over the rounds.
fn cost_over(
    rounds: &[RoundCost],
    measured: impl Fn(&RoundCost) -> f64,
    modelled: f64,
) -> Measured {
    let values: Vec<f64> = rounds.iter().map(measured).collect();
    let found = median(&values);
    Measured::cost(found.middle, modelled, 0.0).with_spread(found.spread)
}

/// Returns the median and the spread over the rounds of a number that is no cost.
fn timed_over(rounds: &[RoundCost], value: impl Fn(&RoundCost) -> f64) -> Measured {
    let values: Vec<f64> = rounds.iter().map(value).collect();
    let found = median(&values);
    Measured::counted(found.middle).with_spread(found.spread)
}

/// Sends the map requests `maps`, one at a time. Returns the ticks of `clock` and the second-stage
/// walks that they take.
fn map_block<K: LastTable>(
    host: &mut FixtureHost<K>,
    maps: &[Vec<u8>],
    clock: &mut impl FnMut() -> u64,
) -> Result<(u64, u64), LabError> {
    let before = host.backing().stats().walks;
    let begin = clock();
    for request in maps {
        ask(host, black_box(request))?;
    }
    let spent = clock().saturating_sub(begin);
    Ok((spent, host.backing().stats().walks - before))
}

/// Times map requests without and with the pointer, and cache hits, with `clock`.
///
/// # Errors
/// A host refuses a request, or makes other walks than its pointer allows.
fn time_map_requests(
    setting: &Setting,
    mut clock: impl FnMut() -> u64,
) -> Result<Vec<RoundCost>, LabError> {
    let (mut without, _) = host(NoLastTable)?;
    let (mut with, _) = host(FixedLastTable::default())?;
    let mut cache = FlatCache::new(Cycles::PAPER, 1 << 12, ResidencyPolicy::Fixed);
    let keys: Vec<MappingKey> = (0..BLOCK)
        .filter_map(|slot| MappingKey::new(PhysAddr::new(slot * PAGE), 1, Direction::Bidirectional))
        .collect();
    for (key, slot) in keys.iter().zip(0..) {
        let inserted = cache.insert(*key, giova(slot));
        inserted.map_err(|_| LabError::Internal("a cache"))?;
        let _ = cache.release(*key);
    }
    let maps = (0..BLOCK).map(|slot| map(&[(slot, slot)]));
    let maps = maps.collect::<Result<Vec<_>, _>>()?;
    let unmaps = unmap(&(0..BLOCK).collect::<Vec<_>>())?;
    let mut rounds = Vec::new();
    // Interleave the three, so that disturbances on the CPU affect all. The first round warms up.
    for round in 0..=4 * setting.repetitions.max(1) {
        let (walk, walks) = map_block(&mut without, &maps, &mut clock)?;
        let (last_table, few) = map_block(&mut with, &maps, &mut clock)?;
        let begin = clock();
        for key in &keys {
            black_box(cache.acquire(black_box(*key)));
            let _ = black_box(cache.release(black_box(*key)));
        }
        let cache_hit = clock().saturating_sub(begin);
        ask(&mut without, &unmaps)?;
        ask(&mut with, &unmaps)?;
        if round > 0 {
            // A table has `TABLE_WORDS` pages.
            if walks != BLOCK || few > BLOCK / TABLE_WORDS as u64 + 1 {
                return Err(LabError::Internal("walks of a timed block"));
            }
            let each = |cycles: u64| cycles as f64 / BLOCK as f64;
            rounds.push(RoundCost {
                walk: each(walk),
                last_table: each(last_table),
                cache_hit: each(cache_hit),
            });
        }
    }
    Ok(rounds)
}

/// Adds the cost of a map with the page reuse of the paper's TCP_STREAM in its four configurations
/// (P03 and P12), with `kick` modelled cycles per notification.
fn add_map_cost(
    found: &mut Findings,
    rounds: &[RoundCost],
    kick: f64,
    miss_rate: f64,
) -> Result<(), LabError> {
    let mut part = |what, measured: fn(&RoundCost) -> f64| {
        found.push(FindingRow::new(
            what,
            "cycles",
            timed_over(rounds, measured),
        ));
    };
    part("A map request at the host: no pointer", |round| round.walk);
    part("A map request at the host: pointer", |round| {
        round.last_table
    });
    part("A cache hit with its release", |round| round.cache_hit);
    let claims = Sheet::named("claims")?;
    let added = claims.printed(&[("id", "P03")], "value")?;
    let zero = stated_in_text("BASELINE", 0.0, "5.2.1");
    let cost = |what: &str, measured: &dyn Fn(&RoundCost) -> f64, modelled| {
        let what = format!("A map with the reuse of TCP_STREAM: {what}");
        FindingRow::new(what, "cycles", cost_over(rounds, measured, modelled))
    };
    let order = "added latency";
    let cached_walk = |round: &RoundCost| round.cache_hit + miss_rate * round.walk;
    let cached_pointer = |round: &RoundCost| round.cache_hit + miss_rate * round.last_table;
    let cached_kick = miss_rate * kick;
    let baseline = cost("kvm-baseline", &|_| 0.0, 0.0).with_published(zero);
    found.push(baseline.ordered_within(order));
    let plain = cost("pviommu", &|round| round.walk, kick);
    let plain = plain.with_published(added.clone().read_as(21.0));
    found.push(plain.ordered_within(order));
    found.push(cost("pviommu+rtc", &cached_walk, cached_kick));
    let both = cost("pviommu+rtc+hopt", &cached_pointer, cached_kick);
    found.push(
        both.with_published(added.read_as(13.0))
            .ordered_within(order),
    );
    let share = timed_over(rounds, |round| {
        let saved_by_cache = round.walk + kick - cached_walk(round) - cached_kick;
        (cached_walk(round) - cached_pointer(round)) / saved_by_cache
    });
    let what = "Share of the pointer in the savings of the cache";
    let little = Published::new("little", 0.5, "claims.csv P12");
    found.push(FindingRow::new(what, "", share).at_most(little));
    Ok(())
}

/// The page reuse of Table 5's TCP_STREAM.
struct PageReuse {
    creates: f64,
    pages: f64,
}

impl PageReuse {
    fn stream() -> Result<Self, LabError> {
        let table = Sheet::named("pviommu_table5")?;
        let cell = |column| table.printed(&[STREAM], column);
        Ok(Self {
            creates: cell("map_create_ops")?.value,
            pages: cell("pages_4KB")?.value,
        })
    }

    /// Share of the maps that a cache which holds every page misses.
    fn miss_rate(&self) -> f64 {
        self.pages / self.creates
    }
}

fn measure(setting: &Setting) -> Result<Findings, LabError> {
    let reuse = PageReuse::stream()?;
    let mapped = reuse.pages as u64;
    let mut found = Findings::with_method(format!(
        "A guest of {} MiB with one assigned device, whose memory gets frames on demand, and a \
        second stage of four levels in memory. Walks and frames are counted. Time is that of map \
        requests to pages that have frames, in blocks of {BLOCK} interleaved with cache hits. A \
        kick is modelled with {} cycles.",
        (GUEST_PAGES * PAGE) >> 20,
        setting.profile.kick_cycles
    ));
    add_pool_sizes(&mut found)?;
    add_last_table_walks(&mut found, mapped)?;
    add_pool_use(&mut found)?;
    let rounds = time_map_requests(setting, cycles)?;
    let kick = setting.profile.kick_cycles as f64;
    add_map_cost(&mut found, &rounds, kick, reuse.miss_rate())?;
    in_modes(&mut found, reuse.creates as u64, mapped)?;
    overcommit(&mut found, mapped)?;
    migration(&mut found, mapped)?;
    found.explain(
        "The paper prints no numbers for the pool and the pointer alone; it states that RTC \
        improves latency dramatically and HOPT little. The pointer saves one walk per request; the \
        cache saves nearly all requests and their kicks. \"Little\" is interpreted as less than \
        half, fixed before the runs.",
    );
    found.note(
        "As published, the pointer uses bits 12 to 19 of an address as the index into a table of \
        512 entries. For pages in the upper half of a table it finds the frame of the page 1 MiB \
        below (errata 13). Its 8 bytes are those of the pointer, without the prefix that it is \
        compared with.",
    );
    found.note(
        "rtc-paper is unsafe, but this device does not show it: it maps whole pages in one \
        direction for one user (X24 and the modes of compare show other devices). It requests two \
        mappings more than it has pages, because the published tree stores two keys of a node \
        outside its array and maps their pages again.",
    );
    found.note(
        "A walk here reads tables that are in the processor's caches; the paper's \"hundreds to \
        thousands\" of cycles are those of a kernel that takes locks.",
    );
    Ok(found)
}

#[cfg(test)]
mod tests;
