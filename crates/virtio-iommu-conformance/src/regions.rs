//! Reserved regions of endpoints (section 5.13.6.8.1).

use alloc::vec::Vec;

use crate::driver::{BOTH, Driver, Failure, TestContext, ensure, le64, not_applicable};
use crate::probe::{driver, list, parse};
use crate::spec::*;

/// A region that PROBE returned.
struct Found {
    msi: bool,
    reserved: [u8; 3],
    first: u64,
    last: u64,
}

/// Returns the regions of the second endpoint, at least one.
fn regions(driver: &mut Driver<'_>) -> Result<Vec<Found>, Failure> {
    let list = list(driver, driver.two)?;
    // Another statement covers lists that cannot be parsed.
    let found = parse(&list).map(|(found, _)| found).unwrap_or_default();
    let regions: Vec<Found> = found
        .iter()
        .filter(|(kind, _)| kind & 0xfff == VIRTIO_IOMMU_PROBE_T_RESV_MEM)
        .map(|(_, value)| Found {
            msi: value.first() == Some(&VIRTIO_IOMMU_RESV_MEM_T_MSI),
            reserved: value
                .get(1..)
                .and_then(|rest| rest.first_chunk())
                .copied()
                .unwrap_or([0; 3]),
            first: le64(value, 4),
            last: le64(value, 12),
        })
        .collect();
    if regions.is_empty() {
        return not_applicable("the endpoint has no reserved region");
    }
    Ok(regions)
}

pub(crate) fn reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let regions = regions(&mut driver)?;
    ensure(
        regions.iter().all(|region| region.reserved == [0; 3]),
        "reserved bytes of a region are zero",
    )
}

pub(crate) fn one_msi(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let regions = regions(&mut driver)?;
    let doorbells = regions.iter().filter(|region| region.msi).count();
    driver.note(alloc::format!("{doorbells} regions are doorbells"));
    ensure(doorbells <= 1, "at most one region is for MSIs")
}

pub(crate) fn overlap(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let regions = regions(&mut driver)?;
    for (number, one) in regions.iter().enumerate() {
        ensure(
            one.first <= one.last,
            "a region does not end before it begins",
        )?;
        let mut others = regions.iter().take(number);
        ensure(
            others.all(|other| one.last < other.first || other.last < one.first),
            "regions do not overlap",
        )?;
    }
    Ok(())
}

pub(crate) fn map(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let regions = regions(&mut driver)?;
    ensure(
        driver.attach(1, driver.two)? == VIRTIO_IOMMU_S_OK,
        "ATTACH succeeds",
    )?;
    let page = driver.page;
    for &Found { first, last, .. } in &regions {
        // Another statement checks that a region does not end before it begins.
        let first_page = first.wrapping_add(page - 1);
        let mut ranges = alloc::vec![(first, first_page)];
        if let (Some(before), Some(after)) = (first.checked_sub(page), last.checked_add(page)) {
            let last_page = last.wrapping_sub(page - 1);
            ranges.extend([(before, first_page), (last_page, after), (before, after)]);
        }
        for range in ranges {
            ensure(
                driver.map(1, range, driver.at(0), BOTH)? != VIRTIO_IOMMU_S_OK,
                "MAP over a region is rejected",
            )?;
        }
        let Some(before) = first.checked_sub(page) else {
            continue;
        };
        ensure(
            driver.map(1, (before, first - 1), driver.at(0), BOTH)? == VIRTIO_IOMMU_S_OK,
            "MAP beside a region succeeds",
        )?;
    }
    Ok(())
}

pub(crate) fn access(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let regions = regions(&mut driver)?;
    let Some(region) = regions.iter().find(|region| !region.msi) else {
        return not_applicable("all regions are for MSIs");
    };
    driver.attach(1, driver.two)?;
    for iova in [region.first, region.last] {
        // A device that rejects the MAP has nothing to translate.
        let start = iova & !(driver.page - 1);
        let last = start.wrapping_add(driver.page - 1);
        driver.map(1, (start, last), driver.at(7), BOTH)?;
        ensure(
            driver.read(driver.two, iova)?.is_none() && driver.write(driver.two, iova)?.is_none(),
            "a reserved region reaches no memory",
        )?;
    }
    Ok(())
}
