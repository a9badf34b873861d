//! Attacks on a cache: mappings of another direction or length, and mappings in use that expire.
//! Each returns true if the attack succeeds.
#![allow(dead_code)]

use ringfence_pviommu::rtc::{MappingKey, ReverseCache};
use ringfence_types::{Direction, Iova, PhysAddr};

pub(crate) fn key(page: u64, pages: u64, direction: Direction) -> MappingKey {
    MappingKey::new(PhysAddr::new(page << 12), pages, direction).unwrap()
}

pub(crate) const GIOVA: Iova = Iova::new(0x7000_0000);

/// A page mapped for device writes is released, and then mapped for device reads.
pub(crate) fn direction_is_confused(cache: &mut impl ReverseCache) -> bool {
    let written = key(9, 1, Direction::FromDevice);
    cache.insert(written, GIOVA).unwrap();
    cache.release(written).unwrap();
    cache.acquire(key(9, 1, Direction::ToDevice)) == Some(GIOVA)
}

/// A page is mapped alone and released. Then a buffer of four pages that starts there is
/// mapped.
pub(crate) fn range_is_confused(cache: &mut impl ReverseCache) -> bool {
    let alone = key(9, 1, Direction::ToDevice);
    cache.insert(alone, GIOVA).unwrap();
    cache.release(alone).unwrap();
    cache.acquire(key(9, 4, Direction::ToDevice)) == Some(GIOVA)
}

/// Two buffers share one page, one is released, and the timer expires.
pub(crate) fn mapping_in_use_expires(cache: &mut impl ReverseCache) -> bool {
    let shared = key(9, 1, Direction::FromDevice);
    cache.insert(shared, GIOVA).unwrap();
    assert_eq!(cache.acquire(shared), Some(GIOVA), "the second buffer");
    cache.release(shared).unwrap();
    let mut evicted = false;
    for _ in 0..4 {
        cache.tick(|_, _| evicted = true);
    }
    evicted
}
