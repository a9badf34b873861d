//! Stores to an rPTE as in Fig. 11 of the rIOMMU paper, defects included (errata 7 and 9).

use core::sync::atomic::Ordering;

use ringfence_pgtable::{MAX_RING_BUFFER, RingPte, RingWords};

/// Second word, bits 0..=29: `size`.
const SIZE: u64 = MAX_RING_BUFFER;
/// Second word, bits 30..=31: `dir`.
const DIR: u64 = 0b11 << 30;
/// Second word, bit 32: `valid`.
const VALID: u64 = 1 << 32;

/// Fills an entry as Fig. 11 does: field by field, over any old contents, without ordering that the
/// hardware could rely on. A live entry stays valid while it changes.
#[inline]
pub fn store_as_published(entry: RingPte, [first, second]: &RingWords) {
    let [address, _] = entry.words();
    first.store(address, Ordering::Relaxed);
    for control in field_by_field(entry, second.load(Ordering::Relaxed)) {
        second.store(control, Ordering::Relaxed);
    }
}

/// Clears an entry as Fig. 11 does: clears only `valid`, without ordering. Returns true if it was
/// set.
#[inline]
pub fn clear_as_published([_, control]: &RingWords) -> bool {
    let was = control.load(Ordering::Relaxed);
    control.store(was & !VALID, Ordering::Relaxed);
    was & VALID != 0
}

/// Returns the values of the second word after each store of Fig. 11, which sets one field after
/// the other. Other bits keep their value in `control`.
#[inline]
const fn field_by_field(entry: RingPte, control: u64) -> [u64; 3] {
    let [_, new] = entry.words();
    let sized = control & !SIZE | new & SIZE;
    let directed = sized & !DIR | new & DIR;
    [sized, directed, directed | VALID]
}
