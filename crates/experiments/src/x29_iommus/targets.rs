//! Targets of this project, and what each protection promises.

use super::SHEET;
use super::rows::name;
use crate::finding::{FindingRow, Findings};
use crate::guest_loads::{KernelLoads, Load, POOL, Promise};
use crate::published::Sheet;
use ringfence_lab::LabError;

/// Adds the judged rows of a kernel.
pub(super) fn rows(kernel: &KernelLoads, found: &mut Findings) -> Result<(), LabError> {
    let sheet = Sheet::named(SHEET)?;
    let row = |protection: &str, what: &str, value| {
        let name = name(&kernel.kernel, protection);
        FindingRow::counted(format!("{name}: {what}"), "", value)
    };
    let target = |claim: &str| sheet.printed(&[("claim", &format!("target: {claim}"))], "value");
    if let Some(counts) = kernel.of("riommu-strict") {
        let what = "instructions per map and unmap, against the target";
        let printed = target("map and unmap with riommu in mode strict")?;
        found.push(row("riommu-strict", what, counts.map_unmap).at_most(printed));
    }
    if let Some(uncopied) = kernel.of(POOL).and_then(|counts| counts.uncopied) {
        let what = "instructions per map and unmap without the copy, against the target";
        found.push(row(POOL, what, uncopied).at_most(target("map and unmap with pool")?));
    }
    let burst = kernel.of("riommu-burst");
    if let Some(share) = burst.and_then(|counts| {
        let stream = counts.load(Load::Stream)?;
        Some(stream.invalidations / stream.unmaps?)
    }) {
        let claim = "invalidations per unmap of a stream with riommu in mode burst";
        let what = "stream, invalidations per unmap";
        found.push(row("riommu-burst", what, share).at_most(target(claim)?));
    }
    let instructions = |name| {
        let counts = kernel
            .of(name)
            .and_then(|counts| counts.load(Load::Read128K));
        counts.map(|counts| counts.instructions)
    };
    if let Some((burst, none)) = instructions("riommu-burst").zip(instructions("none")) {
        let claim = "reads of 128 KiB with riommu in mode burst";
        let what = "read-128k, instructions over those of none";
        found.push(row("riommu-burst", what, burst / none).at_most(target(claim)?));
    }
    nvme_reads(kernel, &sheet, found)?;
    exposures(kernel, &sheet, found)
}

/// Adds the invalidations of NVMe reads under each IOMMU that invalidates before its unmap returns.
fn nvme_reads(kernel: &KernelLoads, sheet: &Sheet, found: &mut Findings) -> Result<(), LabError> {
    let claim = "nvme: invalidations per read of 4 KiB with a strict IOMMU";
    for guest in &kernel.guests {
        let Ok(counts) = &guest.counts else { continue };
        let Some(read) = counts.load(Load::NvmeRead4K) else {
            continue;
        };
        if guest.protection.promise != Promise::Strict {
            continue;
        }
        let name = name(&kernel.kernel, guest.protection.name);
        let what = format!("{name}: nvme-read-4k, invalidations per read, as expected");
        let row = FindingRow::counted(what, "", read.invalidations);
        // The admin queue maps pages of its own: a few for all reads.
        found.push(row.near(sheet.printed(&[("claim", claim)], "value")?));
    }
    Ok(())
}

/// Adds the accesses after an unmap of each guest.
fn exposures(kernel: &KernelLoads, sheet: &Sheet, found: &mut Findings) -> Result<(), LabError> {
    for guest in &kernel.guests {
        let Ok(counts) = &guest.counts else { continue };
        let Some(exposure) = counts.exposure else {
            continue;
        };
        let claim = format!("exposure: {}", guest.protection.promise.name());
        let name = name(&kernel.kernel, guest.protection.name);
        let memory = match guest.protection.promise {
            Promise::Pool => "memory of the pool",
            _ => "memory",
        };
        let what = format!(
            "{name}: accesses of the disk after unmap that reached {memory}, of {}",
            exposure.tried
        );
        let row = FindingRow::counted(what, "", f64::from(exposure.reached));
        let printed = sheet.printed(&[("claim", &claim)], "value")?;
        found.push(match guest.protection.promise {
            // A flush may come before the access: the promise is a bound.
            Promise::Lazy => row.at_most(printed),
            _ => row.exact(printed),
        });
    }
    Ok(())
}
