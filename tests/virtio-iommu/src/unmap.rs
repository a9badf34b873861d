//! Statements 29 to 31 and 39: UNMAP.

use ringfence_types::Access;

use super::driver::{BOTH, Driver, ONE, PAGE, TWO, ensure, usual};
use super::{Failure, Make};
use ringfence_virtio_iommu::spec::*;

/// Checks statement 29 (section 5.13.6.6.2).
pub(super) fn splitting(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    // One page, a gap, four pages, one page.
    driver.map_page(PAGE, 11 * PAGE)?;
    let status = driver.map(1, 4 * PAGE, 8 * PAGE - 1, 14 * PAGE, BOTH);
    ensure(status == VIRTIO_IOMMU_S_OK, "four pages can be mapped")?;
    driver.map_page(8 * PAGE, 18 * PAGE)?;
    for (start, end) in [(0, 5), (1, 7), (5, 9), (5, 6), (4, 7), (7, 20)] {
        ensure(
            driver.unmap(1, start * PAGE, end * PAGE - 1) == VIRTIO_IOMMU_S_RANGE,
            "an UNMAP that would split a mapping: RANGE",
        )?;
        for page in [1, 4, 5, 6, 7, 8] {
            ensure(
                driver.read(ONE, page * PAGE) == Some((page + 10) * PAGE),
                "an UNMAP that fails removes nothing",
            )?;
        }
    }
    Ok(())
}

/// Section 5.13.6.6: its examples, in pages, and ranges that exceed the mappings.
pub(super) fn gaps(make: Make<'_>) -> Result<(), Failure> {
    struct Example {
        maps: &'static [(u64, u64)],
        unmap: (u64, u64),
        /// Indices of the remaining mappings.
        left: &'static [usize],
        ok: bool,
    }
    const fn example(
        maps: &'static [(u64, u64)],
        unmap: (u64, u64),
        left: &'static [usize],
        ok: bool,
    ) -> Example {
        Example {
            maps,
            unmap,
            left,
            ok,
        }
    }
    const EXAMPLES: &[Example] = &[
        example(&[], (0, 4), &[], true),
        example(&[(0, 9)], (0, 9), &[], true),
        example(&[(0, 4), (5, 9)], (0, 9), &[], true),
        example(&[(0, 9)], (0, 4), &[0], false),
        example(&[(0, 4), (5, 9)], (0, 4), &[1], true),
        example(&[(0, 4)], (0, 9), &[], true),
        example(&[(0, 4), (10, 14)], (0, 14), &[], true),
        // In addition to the specification's seven.
        example(&[(2, 4), (10, 14), (20, 20)], (1, 17), &[2], true),
        example(&[(10, 14)], (0, 9), &[0], true),
        example(&[(10, 14)], (15, 30), &[0], true),
    ];
    for example in EXAMPLES {
        let mut driver = Driver::attached(make, &usual())?;
        for &(first, last) in example.maps {
            let (start, end) = (first * PAGE, (last + 1) * PAGE);
            let status = driver.map(1, start, end - 1, start, BOTH);
            ensure(status == VIRTIO_IOMMU_S_OK, "pages can be mapped")?;
        }
        let (first, last) = example.unmap;
        let status = driver.unmap(1, first * PAGE, (last + 1) * PAGE - 1);
        ensure(
            (status == VIRTIO_IOMMU_S_OK) == example.ok,
            "an UNMAP over gaps succeeds, one of a part does not",
        )?;
        for (number, &(first, last)) in example.maps.iter().enumerate() {
            for page in first..=last {
                ensure(
                    driver.read(ONE, page * PAGE).is_some() == example.left.contains(&number),
                    "an UNMAP removes what it covers and nothing else",
                )?;
            }
        }
    }
    Ok(())
}

/// Checks statement 31 (section 5.13.6.6.2).
pub(super) fn wrong_domain(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for domain in [0, 9, u32::MAX] {
        ensure(
            driver.unmap(domain, PAGE, 2 * PAGE - 1) == VIRTIO_IOMMU_S_NOENT,
            "UNMAP in a domain that does not exist: NOENT",
        )?;
    }
    driver.attach_bypass(2, TWO);
    ensure(
        driver.unmap(2, PAGE, 2 * PAGE - 1) == VIRTIO_IOMMU_S_INVAL,
        "UNMAP in a bypass domain: INVAL",
    )
}

/// The driver reuses the page as soon as it sees the reply.
pub(super) fn outstanding(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for access in [Access::Read, Access::Write] {
        driver.map_page(PAGE, 7 * PAGE)?;
        ensure(
            driver.subject.hold(ONE, PAGE, access) && driver.subject.holds(),
            "an access can begin",
        )?;
        ensure(
            driver.unmap(1, PAGE, 2 * PAGE - 1) == VIRTIO_IOMMU_S_OK,
            "what is being accessed can be unmapped",
        )?;
        ensure(
            !driver.subject.holds(),
            "an access that began before the UNMAP is over when it is answered",
        )?;
        ensure(
            !driver.subject.hold(ONE, PAGE, access),
            "no access begins after the UNMAP",
        )?;
    }
    Ok(())
}
