//! X29: instructions, exits and invalidations of loads under each IOMMU of a guest, beside the
//! order of the rIOMMU paper's modes (Table 1, Fig. 7, Table 3).
//!
//! The caller boots the guests and passes the counts in.

mod order;
mod rows;
mod targets;

use super::finding::Findings;
use super::guest_loads::{LoadGuest, Loads};
use super::published::Sheet;
use ringfence_lab::LabError;

/// The bundled table of expectations.
const SHEET: &str = "guest_count_claims";

/// Expectations written before the run.
const EXPECTED: [&str; 12] = [
    "expected: modes",
    "expected: order by instructions",
    "expected: order by exits",
    "expected: map and unmap of intel-strict",
    "expected: map and unmap of intel-lazy",
    "expected: map and unmap of virtio-strict",
    "expected: map and unmap of riommu strict",
    "expected: unmaps of an NVMe read",
    "expected: invalidations of an NVMe read of 128 KiB",
    "expected: doorbells of an NVMe read",
    "expected: instructions added to an NVMe read of 4 KiB",
    "expected: verdict",
];

const METHOD: &str = "Stock guests with one CPU under QEMU's icount, where time is the number of \
    guest instructions and a doorbell completes before the guest continues. An idle thread keeps \
    the CPU busy, and its share is subtracted. A round has the median instructions of reads and \
    round trips that waited for the device, or the mean of a stream; of three rounds the median \
    counts. Instructions of a map and unmap are the smaller of two means of 256, with softirqs \
    disabled as in a NAPI poll.";

/// Judges the counts of the guests that the caller booted.
pub(super) fn measure(loads: &Loads) -> Result<Findings, LabError> {
    let mut found = Findings::with_method(METHOD);
    match loads {
        Loads::None(why) | Loads::Failed(why) => found.explain(format!("Not run: {why}.")),
        Loads::Counted(kernels) => {
            for (at, kernel) in kernels.iter().enumerate() {
                kernel
                    .guests
                    .iter()
                    .for_each(|guest| rows::guest(kernel, guest, &mut found));
                order::rows(at, kernel, &mut found)?;
                targets::rows(kernel, &mut found)?;
                failures(&kernel.kernel, &kernel.guests, &mut found);
            }
        }
    }
    origins(&mut found);
    let sheet = Sheet::named(SHEET)?;
    for claim in EXPECTED {
        let expected = sheet.text(&[("claim", claim)], "value")?;
        let why = sheet.text(&[("claim", claim)], "source")?;
        found.note(format!(
            "{claim}, before the run: {expected}. Source: {why}."
        ));
    }
    Ok(found)
}

/// Notes the reasons of guests without counts. They have no rows.
fn failures(kernel: &str, guests: &[LoadGuest], found: &mut Findings) {
    for guest in guests {
        if let Err(why) = &guest.counts {
            let name = guest.protection.name;
            found.note(format!("Linux {kernel}, {name}: failed, {why}."));
        }
    }
}

/// States the origin of each count, and what it leaves out.
fn origins(found: &mut Findings) {
    found.explain(
        "The paper measured cycles on hardware. Under icount an instruction takes a nanosecond, \
        and hardware takes none: an invalidation costs the instructions of its request, and its \
        wait is visible as exits only. Orders are therefore judged by instructions and by exits, \
        both without those of the same devices without an IOMMU. A string instruction counts once \
        per byte: a pool's copy of 4096 bytes counts about 4096 instructions.",
    );
    found.note(
        "Instructions: the guest's own clock (`guest bench-read`, `bench-net`, module \
        `dma_count`). Exits and invalidations of virtio-iommu, pviommu and riommu: the counters \
        `messages`, `unmaps` and `unit_invalidations` of this program. Those of QEMU's \
        intel-iommu: QEMU's trace events `vtd_inv_qi_tail` and `vtd_inv_desc_iotlb_*`. Unmaps: \
        the modules' debugfs.",
    );
    found.note(
        "Accesses after unmap: the disk writes once to the buffer of a read of 64 KiB while the \
        driver makes the next read of 4 KiB (`--inject-dma after-unmap`); this program decides \
        whether the write reached memory. Behind QEMU's intel-iommu the disk of this test is a \
        vhost-user back-end with a device IOTLB, and the counted disk is QEMU's own. The write \
        comes after the burst has ended, so it shows no exposure of bursts. The rows of lazy modes \
        required exactly one access before the first run, in which virtio-lazy stopped it; since \
        then one is a bound.",
    );
    found.note(
        "NVMe reads are made in a second guest with Linux's driver `nvme`. The controllers take \
        doorbells by register writes only (QEMU's with `dbcs=off`). If both guests boot, the map \
        and unmap and the access after an unmap are those of the first.",
    );
    found.note(
        "QEMU's network card has one queue pair, this program's has four; one CPU serves all. \
        Rows subtract the instructions of the same card without an IOMMU.",
    );
}

#[cfg(test)]
mod tests;
