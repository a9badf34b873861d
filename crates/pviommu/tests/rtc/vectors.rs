//! Runs `vectors/cache.txt` on the cache with the same order as the kernel module's.

use ringfence_papers::rtc::Rtc;
use ringfence_pviommu::rtc::{Cycles, MappingKey, NotCached, ReverseCache};
use ringfence_types::{Direction, Iova, PhysAddr};

fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| panic!("{text} is no number"))
}

fn key(page: &str, pages: &str, direction: &str) -> MappingKey {
    let direction = match direction {
        "0" => Direction::Bidirectional,
        "1" => Direction::ToDevice,
        "2" => Direction::FromDevice,
        _ => panic!("{direction} is no direction"),
    };
    MappingKey::new(PhysAddr::new(number(page) << 12), number(pages), direction).expect("a key")
}

fn pages_of(list: &str) -> Vec<(u64, u64)> {
    let listed = list.split(',').filter(|one| *one != "-");
    let pair = |one: &str| {
        one.split_once(':')
            .map(|(page, pages)| (number(page), number(pages)))
    };
    let mut all: Vec<_> = listed.map(|one| pair(one).expect(":")).collect();
    all.sort_unstable();
    all
}

/// Runs one line. `uncached` holds the uncached keys, which their users unmap.
fn step(cache: &mut Rtc, uncached: &mut Vec<MappingKey>, next: &mut u64, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut evicted: Vec<(u64, u64)> = Vec::new();
    let mut leaves =
        |key: MappingKey, _: Iova| evicted.push((key.first().get() >> 12, key.pages()));
    match words[..] {
        ["map", page, pages, direction, outcome] => {
            let key = key(page, pages, direction);
            let found = if cache.acquire(key).is_some() {
                "hit"
            } else {
                *next += 1 << 20;
                match cache.insert(key, Iova::new(*next << 12)) {
                    Ok(()) => "miss",
                    Err(NotCached::Full) => {
                        uncached.push(key);
                        "full"
                    }
                    Err(error) => panic!("{line}: {error}"),
                }
            };
            assert_eq!(found, outcome, "{line}");
        }
        ["unmap", page, pages, direction] => {
            let key = key(page, pages, direction);
            match uncached.iter().position(|one| *one == key) {
                Some(at) => _ = uncached.remove(at),
                None => _ = cache.release(key).expect(line),
            }
        }
        ["tick", list] => {
            cache.tick(&mut leaves);
            evicted.sort_unstable();
            assert_eq!(evicted, pages_of(list), "{line}");
        }
        ["evict", list] => {
            cache.evict(&mut leaves);
            evicted.sort_unstable();
            assert_eq!(evicted, pages_of(list), "{line}");
        }
        ["holds", released, pages] => {
            let stats = cache.stats();
            assert_eq!(stats.released as u64, number(released), "{line}");
            assert_eq!(stats.pages, number(pages), "{line}");
        }
        _ => panic!("{line}"),
    }
}

#[test]
fn cache_agrees_with_the_vectors() {
    let text = include_str!("../../vectors/cache.txt");
    let (mut cache, mut uncached, mut next) = (None, Vec::new(), 0);
    let lines = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut cases = 0;
    for line in lines {
        if let Some(case) = line.strip_prefix("case ") {
            let value = |name: &str| {
                let found = case.split(' ').find_map(|word| word.strip_prefix(name));
                number(found.expect(name))
            };
            let cycles = Cycles::new(value("cycles=") as u8).expect("cycles");
            cache = Some(Rtc::new(cycles, value("limit=") as usize));
            uncached.clear();
            cases += 1;
        } else {
            let cache = cache.as_mut().expect("a case comes first");
            step(cache, &mut uncached, &mut next, line);
        }
    }
    assert_eq!(cases, 8);
}
