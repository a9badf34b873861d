//! Fault reports (section 5.13.6.9).

use crate::driver::{
    BOTH, Driver, Failure, READ, TestContext, USUAL, ensure, le32, le64, not_applicable,
};
use crate::spec::*;

const ALL_FLAGS: u32 =
    VIRTIO_IOMMU_FAULT_F_READ | VIRTIO_IOMMU_FAULT_F_WRITE | VIRTIO_IOMMU_FAULT_F_ADDRESS;

/// A report, and the access that it is about.
struct Report {
    event: [u8; FAULT_BYTES],
    endpoint: u32,
    iova: u64,
    reason: u8,
}

/// Checks the reports of three writes: not mapped, not writable, not attached. Not applicable if
/// the device reports nothing.
fn each(
    context: &TestContext<'_>,
    check: impl Fn(&Report) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let status = driver.map(1, driver.pages(1, 1), driver.at(0), READ)?;
    ensure(status == VIRTIO_IOMMU_S_OK, "MAP of a page succeeds")?;
    let page = driver.page;
    let faults = [
        (driver.one, 0xdead_0000, VIRTIO_IOMMU_FAULT_R_MAPPING),
        (driver.one, page + 8, VIRTIO_IOMMU_FAULT_R_MAPPING),
        (driver.two, page, VIRTIO_IOMMU_FAULT_R_DOMAIN),
    ];
    for (endpoint, iova, reason) in faults {
        driver.subject.add_event_buffer(FAULT_BYTES);
        // Other statements check that the access is blocked.
        driver.write(endpoint, iova)?;
        let mut event = [0x77; FAULT_BYTES];
        match driver.subject.next_event(&mut event) {
            None => return not_applicable("the device reports no faults"),
            Some(used) => ensure(used == FAULT_BYTES, "a report has 24 bytes")?,
        }
        driver.note(alloc::format!(
            "a write of {endpoint:#x} at {iova:#x} is reported as {event:02x?}"
        ));
        check(&Report {
            event,
            endpoint,
            iova,
            reason,
        })?;
    }
    Ok(())
}

pub(crate) fn reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |Report { event, .. }| {
        ensure(
            event.get(1..4) == Some(&[0; 3]) && le32(event, 12) == 0,
            "reserved fields of a report are zero",
        )
    })
}

pub(crate) fn flags(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |Report { event, .. }| {
        ensure(le32(event, 4) & !ALL_FLAGS == 0, "undefined flags are zero")
    })
}

pub(crate) fn endpoint(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |report| {
        ensure(
            le32(&report.event, 8) == report.endpoint,
            "a report names the endpoint",
        )
    })
}

pub(crate) fn reason(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |report| {
        let reported = report.event.first().copied().unwrap_or_default();
        ensure(
            reported == VIRTIO_IOMMU_FAULT_R_UNKNOWN || reported == report.reason,
            "the reason is what happened, or UNKNOWN",
        )
    })
}

pub(crate) fn address(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |Report { event, iova, .. }| {
        let flags = le32(event, 4);
        ensure(
            flags & VIRTIO_IOMMU_FAULT_F_READ == 0,
            "a write is not reported as a read",
        )?;
        ensure(
            flags & VIRTIO_IOMMU_FAULT_F_ADDRESS == 0 || le64(event, 16) == *iova,
            "the address is the one of the access",
        )
    })
}

pub(crate) fn split(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.subject.add_event_buffer(FAULT_BYTES);
    driver.write(driver.one, 0xdead_0000)?;
    let mut event = [0x77; FAULT_BYTES];
    if driver.subject.next_event(&mut event).is_none() {
        return not_applicable("the device reports no faults");
    }
    driver.subject.add_event_buffer(FAULT_BYTES - 1);
    driver.write(driver.one, 0xdead_0000)?;
    let mut small = [0x77; FAULT_BYTES - 1];
    let used = driver.subject.next_event(&mut small);
    driver.note(alloc::format!(
        "a buffer of 23 bytes has {small:02x?}, used {used:?}"
    ));
    ensure(
        matches!(used, None | Some(0)) && small == [0x77; FAULT_BYTES - 1],
        "a report that does not fit is not written",
    )?;
    // The device may drop the report, but not the queue.
    let status = driver.map(1, driver.pages(1, 1), driver.at(7), BOTH)?;
    ensure(
        status == VIRTIO_IOMMU_S_OK,
        "requests succeed after a report that does not fit",
    )
}

/// Faults without event buffers.
const FAULTS: u64 = 300;

fn many<'a>(context: &'a TestContext<'_>) -> Result<Driver<'a>, Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for number in 0..FAULTS {
        let iova = (number + 100) * driver.page;
        driver.write(driver.one, iova)?;
    }
    Ok(driver)
}

/// Section 5.13.6.9, "If no buffer is available".
pub(crate) fn no_buffer(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = many(context)?;
    driver.map_page(1, 7)?;
    ensure(
        driver.reaches(driver.one, 1, Some(7))?,
        "faults without buffers stall no request",
    )
}

pub(crate) fn counted(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = many(context)?;
    if driver.subject.dropped_events().is_none() {
        return not_applicable("the adapter has no count of dropped reports");
    }
    let mut delivered = 0;
    let mut event = [0; FAULT_BYTES];
    while delivered < FAULTS && driver.subject.next_event(&mut event) == Some(FAULT_BYTES) {
        delivered += 1;
    }
    let dropped = driver.subject.dropped_events().unwrap_or_default();
    driver.note(alloc::format!(
        "of {FAULTS} faults, {delivered} are delivered and {dropped} counted as dropped"
    ));
    ensure(
        delivered + dropped == FAULTS,
        "every fault is delivered or counted as dropped",
    )
}
