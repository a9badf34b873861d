//! Statements 22 to 28: MAP.

use ringfence_types::{Iova, IovaRange};

use super::driver::{
    BOTH, DOORBELLS, Driver, ONE, PAGE, READ, RESERVED, TWO, WRITE, ensure, usual,
};
use super::{Failure, Make, Setup};
use ringfence_virtio_iommu::Options;
use ringfence_virtio_iommu::spec::*;

/// Checks statement 22 (section 5.13.6.5.2).
pub(super) fn misaligned(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let valid = (PAGE, 3 * PAGE - 1, 7 * PAGE);
    for off in [1, 8, PAGE / 2, PAGE - 1] {
        for (start, last, to) in [
            (valid.0 + off, valid.1, valid.2),
            (valid.0, valid.1 - off, valid.2),
            (valid.0, valid.1 + off, valid.2),
            (valid.0, valid.1, valid.2 + off),
        ] {
            ensure(
                driver.map(1, start, last, to, BOTH) == VIRTIO_IOMMU_S_RANGE,
                "what is not aligned: RANGE",
            )?;
        }
    }
    ensure(driver.read(ONE, 2 * PAGE).is_none(), "nothing was mapped")
}

/// Checks statement 23 (section 5.13.6.5.2).
pub(super) fn overlapping(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let mapped = driver.map(1, 2 * PAGE, 4 * PAGE - 1, 7 * PAGE, BOTH);
    ensure(mapped == VIRTIO_IOMMU_S_OK, "two pages can be mapped")?;
    for (start, end) in [(2, 4), (2, 3), (3, 4), (1, 3), (3, 5), (1, 5), (0, 9)] {
        ensure(
            driver.map(1, start * PAGE, end * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_INVAL,
            "a mapping over another: INVAL",
        )?;
    }
    for page in 0..9 {
        let expected = (2..4).contains(&page).then_some((page + 5) * PAGE);
        ensure(
            driver.read(ONE, page * PAGE) == expected && driver.write(ONE, page * PAGE) == expected,
            "a mapping that is refused changes nothing",
        )?;
    }
    ensure(
        driver.map(1, PAGE, 2 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK
            && driver.map(1, 4 * PAGE, 5 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK,
        "neighbours do not overlap",
    )
}

/// Checks statement 24 (section 5.13.6.5.2).
pub(super) fn unknown_flag(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for bit in 2..32 {
        ensure(
            driver.map(1, PAGE, 2 * PAGE - 1, 0, READ | 1 << bit) == VIRTIO_IOMMU_S_INVAL,
            "an unknown flag, or MMIO not offered: INVAL",
        )?;
    }
    let usual = usual();
    let setup = Setup {
        options: Options {
            mmio: true,
            ..usual.options
        },
        ..usual
    };
    // First the driver accepts MMIO, then it does not.
    let mut driver = match Driver::attached(make, &setup) {
        Err(Failure::NotApplicable) => return Ok(()),
        made => made?,
    };
    let flags = BOTH | VIRTIO_IOMMU_MAP_F_MMIO;
    ensure(
        driver.map(1, PAGE, 2 * PAGE - 1, 0, flags) == VIRTIO_IOMMU_S_OK,
        "MMIO is a flag once it was accepted",
    )?;
    driver.subject.reset();
    let offered = driver.subject.offered();
    driver.subject.accept(offered & !(1 << VIRTIO_IOMMU_F_MMIO));
    driver.attach(1, ONE);
    ensure(
        driver.map(1, PAGE, 2 * PAGE - 1, 0, flags) == VIRTIO_IOMMU_S_INVAL,
        "MMIO not accepted: INVAL",
    )
}

/// Checks statement 25 (section 5.13.6.5.2).
pub(super) fn wrong_domain(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for domain in [0, 9, u32::MAX] {
        ensure(
            driver.map(domain, PAGE, 2 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_NOENT,
            "MAP in a domain that does not exist: NOENT",
        )?;
    }
    driver.attach_bypass(2, TWO);
    ensure(
        driver.map(2, PAGE, 2 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_INVAL,
        "MAP in a bypass domain: INVAL",
    )
}

/// Section 5.13.6, "Any mapping request to virtual addresses outside of this range fails".
pub(super) fn outside_input(make: Make<'_>) -> Result<(), Failure> {
    let usual = usual();
    let (first, last) = (16 * PAGE, 64 * PAGE - 1);
    let Some(input) = IovaRange::inclusive(Iova::new(first), Iova::new(last)) else {
        return Err(Failure::NotApplicable);
    };
    let setup = Setup {
        options: Options {
            input,
            ..usual.options
        },
        endpoints: &[(ONE, &[])],
    };
    let mut driver = Driver::attached(make, &setup)?;
    for (start, last) in [
        (0, PAGE - 1),
        (first - PAGE, first - 1),
        (first - PAGE, first + PAGE - 1),
        (last + 1, last + PAGE),
        (last + 1 - PAGE, last + PAGE),
        (0, u64::MAX),
    ] {
        ensure(
            driver.map(1, start, last, 0, BOTH) != VIRTIO_IOMMU_S_OK,
            "a mapping outside the input range fails",
        )?;
    }
    ensure(
        driver.map(1, first, last, 0, BOTH) == VIRTIO_IOMMU_S_OK
            && driver.read(ONE, last) == Some(last - first),
        "the input range itself can be mapped",
    )
}

/// Checks statement 27 (section 5.13.6.8.1.2).
pub(super) fn reserved_region(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    driver.attach(1, TWO);
    for (first, last) in [RESERVED, DOORBELLS] {
        for (start, last) in [
            (first, first + PAGE - 1),
            (first - PAGE, first + PAGE - 1),
            (last + 1 - PAGE, last + PAGE),
            (first - PAGE, last + PAGE),
        ] {
            ensure(
                driver.map(1, start, last, 0, BOTH) != VIRTIO_IOMMU_S_OK,
                "a mapping over a reserved region is rejected",
            )?;
        }
        ensure(
            driver.map(1, first - PAGE, first - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK,
            "what lies beside a reserved region can be mapped",
        )?;
    }
    ensure(
        driver.read(TWO, RESERVED.0).is_none() && driver.write(TWO, RESERVED.1).is_none(),
        "a reserved region reaches no memory",
    )
}

/// Section 5.13.6.5.2. (The specification lets a device allow reads through a write-only mapping if
/// it cannot distinguish them. This suite does not.)
pub(super) fn permissions(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for (page, flags) in [(1, 0), (2, READ), (3, WRITE), (4, BOTH)] {
        let start = page * PAGE;
        let status = driver.map(1, start, start + PAGE - 1, start, flags);
        // A device may refuse a mapping without permissions.
        ensure(
            flags == 0 || status == VIRTIO_IOMMU_S_OK,
            "mappings of all permissions can be made",
        )?;
        let reads = driver.read(ONE, start).is_some();
        let writes = driver.write(ONE, start).is_some();
        ensure(writes == (flags & WRITE != 0), "writes need WRITE")?;
        ensure(reads == (flags & READ != 0), "reads need READ")?;
    }
    Ok(())
}
