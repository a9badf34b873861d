//! Reclaim of guest memory by the host, and migration of a guest to another host.

use ringfence_hw::{UnitConfig, VtdUnit};
use ringfence_pviommu::backend::{DeviceState, FixedLastTable, ReclaimError};
use ringfence_types::FrameSource;

use super::fixture::{
    DEVICE, FixtureHost, GUEST_PAGES, Pattern, ask, giova, gpa, host, map, unmap,
};
use super::{count_row, stated_in_text};
use crate::finding::Findings;
use ringfence_lab::LabError;

/// The host reclaims every frame that it may: first while `mapped` pages are mapped, then after
/// they are unmapped (PV10; attack A32).
pub(super) fn overcommit(found: &mut Findings, mapped: u64) -> Result<(), LabError> {
    let (mut host, frames) = host(FixedLastTable::default())?;
    let mut processors = VtdUnit::vtd(&UnitConfig::UNCACHED);
    for page in 0..GUEST_PAGES {
        let resolved = host.backing().resolve(gpa(page));
        resolved.map_err(|_| LabError::Internal("memory without a frame"))?;
        host.maintain();
    }
    for slot in 0..mapped {
        ask(&mut host, &map(&[(slot, slot)])?)?;
    }
    let mut round = |host: &mut FixtureHost<FixedLastTable>| {
        let (mut taken, mut refused) = (0_u64, 0_u64);
        for page in 0..GUEST_PAGES {
            match host.backing().reclaim(gpa(page), &mut processors) {
                Ok(frame) => {
                    frames.free(frame);
                    taken += 1;
                }
                Err(ReclaimError::Mapped { .. }) => refused += 1,
                Err(_) => {}
            }
        }
        (taken, refused)
    };
    let (taken, refused) = round(&mut host);
    for slot in 0..mapped {
        ask(&mut host, &unmap(&[slot])?)?;
    }
    let (later, still) = round(&mut host);
    let row =
        |what: &str, value: u64| count_row(format!("Overcommit: {what}"), "frames", value as f64);
    let all = |value: u64| stated_in_text("all", value as f64, "4.1");
    for (what, value, printed) in [
        (
            "reclaimed of the frames that no device can access",
            taken,
            all(GUEST_PAGES - mapped),
        ),
        (
            "refused of the frames that a device can access",
            refused,
            all(mapped),
        ),
        ("reclaimed of these after their unmap", later, all(mapped)),
        (
            "refused after their unmap",
            still,
            stated_in_text("none", 0.0, "4.1"),
        ),
    ] {
        found.push(row(what, value).exact(printed));
    }
    Ok(())
}

/// Exports the guest's `mapped` mappings, restores them on another host whose frames are allocated
/// in another order, and exports them again (PV11).
pub(super) fn migration(found: &mut Findings, mapped: u64) -> Result<(), LabError> {
    let failed = |what: &'static str| move |_| LabError::Internal(what);
    let (mut here, _) = host(FixedLastTable::default())?;
    let (mut there, _) = host(FixedLastTable::default())?;
    for slot in 0..mapped {
        ask(&mut here, &map(&[(slot, Pattern::Scattered.page(slot))])?)?;
    }
    // Allocate frames there in another order.
    for page in (0..GUEST_PAGES).rev().step_by(3) {
        let resolved = there.backing().resolve(gpa(page));
        resolved.map_err(|_| LabError::Internal("memory without a frame"))?;
        there.maintain();
    }
    let stream = here
        .export(|_| DeviceState::Transferred)
        .map_err(|_| LabError::Internal("records"))?;
    there
        .restore(&stream)
        .map_err(|_| ())
        .map_err(failed("records that were refused"))?;
    let again = there
        .export(|_| DeviceState::Transferred)
        .map_err(|_| LabError::Internal("records"))?;
    let (mut same, mut moved) = (0_u64, 0_u64);
    for slot in 0..mapped {
        let (old, new) = (
            here.mapping(DEVICE, giova(slot)),
            there.mapping(DEVICE, giova(slot)),
        );
        same += u64::from(old.is_some() && old == new);
        let page = gpa(Pattern::Scattered.page(slot));
        let frames = [
            here.backing().resolve(page).ok(),
            there.backing().resolve(page).ok(),
        ];
        moved += u64::from(frames[0] != frames[1]);
    }
    let row = |what: &str, value: f64| count_row(format!("Migration: {what}"), "", value);
    let all = |value: u64| stated_in_text("all", value as f64, "4.4");
    found.push(row("mappings restored unchanged", same as f64).exact(all(mapped)));
    let bytes = again.iter().zip(&stream).filter(|(a, b)| a != b).count()
        + again.len().abs_diff(stream.len());
    let none = stated_in_text("none", 0.0, "4.4");
    found.push(
        row(
            "bytes of the exported state that differ after the round trip",
            bytes as f64,
        )
        .exact(none),
    );
    found.push(row("mappings at another host address", moved as f64));
    found.push(row("bytes of the exported state", stream.len() as f64));
    Ok(())
}
