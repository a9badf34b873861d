//! Statements 35 and 36: fault reports.

use super::driver::{BOTH, Driver, ONE, PAGE, READ, TWO, ensure, usual};
use super::{Failure, Make, Setup};
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{Options, VirtioIommuLimits};

fn le32(event: &[u8], at: usize) -> u32 {
    let bytes = event.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u32::from_le_bytes)
}

fn le64(event: &[u8], at: usize) -> u64 {
    let bytes = event.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u64::from_le_bytes)
}

/// Checks statement 35 (section 5.13.6.9.2).
pub(super) fn report(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let status = driver.map(1, PAGE, 2 * PAGE - 1, 0, READ);
    ensure(status == VIRTIO_IOMMU_S_OK, "a page can be mapped")?;
    // Faults: not mapped, not writable, not attached.
    let faults = [
        (ONE, 0xdead_0000, VIRTIO_IOMMU_FAULT_R_MAPPING),
        (ONE, PAGE + 8, VIRTIO_IOMMU_FAULT_R_MAPPING),
        (TWO, PAGE, VIRTIO_IOMMU_FAULT_R_DOMAIN),
    ];
    let all = VIRTIO_IOMMU_FAULT_F_READ | VIRTIO_IOMMU_FAULT_F_WRITE | VIRTIO_IOMMU_FAULT_F_ADDRESS;
    for (endpoint, iova, reason) in faults {
        // A device under test may block the access elsewhere. This statement checks only the
        // report.
        driver.write(endpoint, iova);
        let mut small = [0x77; FAULT_BYTES - 1];
        let split = driver.subject.next_event(&mut small);
        ensure(
            matches!(split, None | Some(0)) && small == [0x77; FAULT_BYTES - 1],
            "a report is not split",
        )?;
        let mut event = [0x77; FAULT_BYTES];
        let used = driver.subject.next_event(&mut event);
        ensure(used == Some(FAULT_BYTES), "a report fills a buffer")?;
        ensure(le32(&event, 8) == endpoint, "a report names the endpoint")?;
        ensure(
            event.get(1..4) == Some(&[0; 3]) && le32(&event, 12) == 0,
            "reserved fields of a report are zero",
        )?;
        let flags = le32(&event, 4);
        ensure(flags & !all == 0, "undefined flags are zero")?;
        ensure(
            flags & VIRTIO_IOMMU_FAULT_F_READ == 0,
            "a write is not reported as a read",
        )?;
        ensure(
            flags & VIRTIO_IOMMU_FAULT_F_ADDRESS == 0 || le64(&event, 16) == iova,
            "the address is the one that was accessed",
        )?;
        let reported = event.first().copied().unwrap_or_default();
        ensure(
            reported == VIRTIO_IOMMU_FAULT_R_UNKNOWN || reported == reason,
            "the reason is what happened",
        )?;
    }
    Ok(())
}

/// Section 5.13.6.9, "If no buffer is available".
pub(super) fn no_buffer(make: Make<'_>) -> Result<(), Failure> {
    const FAULTS: u64 = 1000;
    let usual = usual();
    let setup = Setup {
        options: Options {
            limits: VirtioIommuLimits {
                events: 8,
                ..VirtioIommuLimits::default()
            },
            ..usual.options
        },
        ..usual
    };
    let mut driver = Driver::attached(make, &setup)?;
    for number in 0..FAULTS {
        driver.write(ONE, (number + 100) * PAGE);
    }
    ensure(
        driver.map(1, PAGE, 2 * PAGE - 1, 7 * PAGE, BOTH) == VIRTIO_IOMMU_S_OK
            && driver.read(ONE, PAGE) == Some(7 * PAGE),
        "faults without buffers stall no request",
    )?;
    let mut delivered = 0;
    let mut event = [0; FAULT_BYTES];
    while delivered < FAULTS && driver.subject.next_event(&mut event) == Some(FAULT_BYTES) {
        delivered += 1;
    }
    ensure(
        delivered + driver.subject.dropped_events() == FAULTS,
        "every fault is delivered or counted as dropped",
    )
}
