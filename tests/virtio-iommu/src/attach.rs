//! Statements 13 to 21: ATTACH and DETACH.

use super::driver::{BOTH, Driver, NOBODY, ONE, PAGE, TWO, attach, detach, ensure, usual};
use super::{Failure, Make};
use ringfence_virtio_iommu::spec::*;

/// Checks statement 13 (section 5.13.6.3.2).
pub(super) fn reserved_field(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    for reserved in [1, 1 << 8, 1 << 31, u32::MAX] {
        ensure(
            driver.status(&attach(1, ONE, 0, reserved)) == VIRTIO_IOMMU_S_INVAL,
            "a reserved field that is not zero: INVAL",
        )?;
    }
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_INVAL,
        "nothing was attached",
    )
}

/// Checks statement 14 (section 5.13.6.3.2).
pub(super) fn unknown_flag(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    for bit in 1..32 {
        ensure(
            driver.status(&attach(1, ONE, 1 << bit, 0)) == VIRTIO_IOMMU_S_INVAL,
            "an unknown flag: INVAL",
        )?;
    }
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_INVAL,
        "nothing was attached",
    )?;
    // The bypass flag exists only after its feature was accepted.
    let mut driver = Driver::reset(make, &usual())?;
    let offered = driver.subject.offered();
    let without = offered & !(1 << VIRTIO_IOMMU_F_BYPASS_CONFIG);
    driver.subject.accept(without);
    ensure(
        driver.attach_bypass(1, ONE) == VIRTIO_IOMMU_S_INVAL,
        "a flag whose feature was not accepted: INVAL",
    )
}

/// Checks statement 15 (section 5.13.6.3.2).
pub(super) fn unknown_endpoint(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    for endpoint in [NOBODY, ONE | 1 << 16, u32::MAX] {
        ensure(
            driver.attach(1, endpoint) == VIRTIO_IOMMU_S_NOENT,
            "an endpoint that does not exist: NOENT",
        )?;
    }
    Ok(())
}

/// Checks statement 16 (section 5.13.6.3.2).
pub(super) fn contradiction(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    ensure(
        driver.attach_bypass(2, TWO) == VIRTIO_IOMMU_S_OK,
        "a bypass domain can be made",
    )?;
    ensure(
        driver.attach_bypass(1, TWO) == VIRTIO_IOMMU_S_INVAL,
        "the flag in a domain that maps: INVAL",
    )?;
    ensure(
        driver.attach(2, ONE) == VIRTIO_IOMMU_S_INVAL,
        "no flag in a bypass domain: INVAL",
    )?;
    ensure(
        driver.read(ONE, PAGE) == Some(7 * PAGE) && driver.read(ONE, 3 * PAGE).is_none(),
        "the endpoint that maps is where it was",
    )?;
    ensure(
        driver.read(TWO, PAGE) == Some(PAGE),
        "the endpoint that bypasses is where it was",
    )
}

/// Checks statement 17 (section 5.13.6.3.2).
pub(super) fn again(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    match driver.attach(2, ONE) {
        VIRTIO_IOMMU_S_UNSUPP => {
            return ensure(
                driver.read(ONE, PAGE) == Some(7 * PAGE),
                "an endpoint that cannot be moved stays",
            );
        }
        status => ensure(
            status == VIRTIO_IOMMU_S_OK,
            "an attached endpoint can be attached elsewhere",
        )?,
    }
    ensure(
        driver.read(ONE, PAGE).is_none(),
        "the domain that was left is not reached",
    )?;
    ensure(
        driver.map(2, PAGE, 2 * PAGE - 1, 8 * PAGE, BOTH) == VIRTIO_IOMMU_S_OK
            && driver.read(ONE, PAGE) == Some(8 * PAGE),
        "the domain that was entered is reached",
    )?;
    ensure(
        driver.map(1, PAGE, 2 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_NOENT,
        "the domain that the last endpoint left is gone",
    )
}

/// Section 5.13.6.3, "Multiple endpoints can be attached to the same domain".
pub(super) fn joining(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    match driver.attach(1, TWO) {
        // The specification allows a device to refuse this.
        VIRTIO_IOMMU_S_UNSUPP => return Err(Failure::NotApplicable),
        status => ensure(status == VIRTIO_IOMMU_S_OK, "a domain can be joined")?,
    }
    ensure(
        driver.read(TWO, PAGE) == Some(7 * PAGE) && driver.write(TWO, PAGE) == Some(7 * PAGE),
        "who joins reaches what was mapped before",
    )?;
    driver.map_page(3 * PAGE, 9 * PAGE)?;
    ensure(
        driver.read(ONE, 3 * PAGE) == Some(9 * PAGE)
            && driver.read(TWO, 3 * PAGE) == Some(9 * PAGE),
        "all reach what is mapped later",
    )?;
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_OK && driver.read(TWO, PAGE) == Some(7 * PAGE),
        "who stays still reaches it",
    )
}

/// Checks statement 19 (section 5.13.6.4.2).
pub(super) fn detach_errors(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    ensure(
        driver.detach(1, NOBODY) == VIRTIO_IOMMU_S_NOENT,
        "DETACH of an endpoint that does not exist: NOENT",
    )?;
    for (domain, endpoint) in [(2, ONE), (1, TWO), (9, TWO)] {
        ensure(
            driver.detach(domain, endpoint) == VIRTIO_IOMMU_S_INVAL,
            "DETACH from a domain that the endpoint is not in: INVAL",
        )?;
    }
    ensure(
        driver.read(ONE, PAGE) == Some(7 * PAGE),
        "a DETACH that fails changes nothing",
    )?;
    ensure(
        driver.status(&detach(1, ONE, u64::MAX)) == VIRTIO_IOMMU_S_OK,
        "reserved bytes of DETACH are ignored",
    )
}

/// Checks statement 20 (section 5.13.6.4.2).
pub(super) fn detached(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    ensure(
        driver.write(ONE, PAGE) == Some(7 * PAGE),
        "a mapping is reached",
    )?;
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_OK,
        "an endpoint can be detached",
    )?;
    ensure(
        driver.write(ONE, PAGE).is_none() && driver.read(ONE, PAGE).is_none(),
        "nothing is reached after DETACH",
    )
}

/// Section 5.13.6.4, "it ceases to exist and its ID can be reused".
pub(super) fn last_detach(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    driver.detach(1, ONE);
    ensure(
        driver.attach(1, ONE) == VIRTIO_IOMMU_S_OK,
        "the number of a domain can be used again",
    )?;
    ensure(
        driver.read(ONE, PAGE).is_none(),
        "a domain that was made again is empty",
    )?;
    ensure(
        driver.map(1, 0, 4 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK,
        "nothing is in the way of new mappings",
    )
}
