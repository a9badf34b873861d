//! Pages that were granted with one call are revoked one by one.

use crate::bus_master::{MAPPED, goes_on, tally, writes};
use crate::guest::{AWAY, READ_WRITE};
use crate::pviommu_driver::Para;
use crate::*;

const START: u64 = 0x10_0000;
const PAGES: u64 = 16;

fn unmap(sandboxed: &mut SandboxedGuest<Para>, page: u64) {
    let start = START + AWAY + page * 0x1000;
    assert_eq!(sandboxed.guest.unmap(start, 0x1000), 0);
}

/// The process writes to every page that it can access: each second page is revoked, and the others
/// remain.
#[test]
fn partial_unmap_keeps_the_neighbours() {
    let image = tally();
    let mut sandboxed: SandboxedGuest<Para> = goes_on(&image);
    let bytes = PAGES * 0x1000;
    let mapped = sandboxed
        .guest
        .map(START + AWAY, bytes, START - bytes, READ_WRITE);
    assert_eq!(mapped, 0);
    assert_eq!(writes(&image), MAPPED + PAGES);
    for page in (0..PAGES).step_by(2) {
        unmap(&mut sandboxed, page);
    }
    assert_eq!(writes(&image), MAPPED + PAGES / 2);
    // Fill the holes again. Their windows are new, and the kernel may merge them differently.
    for page in (0..PAGES).step_by(2) {
        let (start, to) = (START + AWAY + page * 0x1000, START - bytes + page * 0x1000);
        let mapped = sandboxed.guest.map(start, 0x1000, to, READ_WRITE);
        assert_eq!(mapped, 0);
    }
    assert_eq!(writes(&image), MAPPED + PAGES);
    // Revoke the refilled holes before the pages between them, each in descending order.
    let mut left = MAPPED + PAGES;
    for odd in [0, 1] {
        for page in (0..PAGES).rev().filter(|page| page % 2 == odd) {
            unmap(&mut sandboxed, page);
            left -= 1;
            assert_eq!(writes(&image), left);
        }
    }
    assert!(sandboxed.breach().is_none());
}
