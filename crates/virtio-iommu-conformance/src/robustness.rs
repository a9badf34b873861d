//! Behaviour that the specification does not require, against a hostile driver.

use crate::driver::{BOTH, Driver, Failure, READ, TestContext, USUAL, ensure, not_applicable};
use crate::spec::*;
use crate::{Access, GuestLimits, Setup};

const OK: u8 = VIRTIO_IOMMU_S_OK;

/// Ranges that end before they begin.
fn reversed(driver: &Driver<'_>) -> [(u64, u64); 4] {
    let page = driver.page;
    let top = u64::MAX - (page - 1);
    [(page, 0), (page, page - 1), (u64::MAX, 0), (top, page - 1)]
}

pub(crate) fn map_reversed(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for range in reversed(&driver) {
        ensure(
            driver.map(1, range, driver.at(0), BOTH)? != OK,
            "MAP that ends before it begins fails",
        )?;
    }
    driver.map_page(1, 7)
}

pub(crate) fn unmap_reversed(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    for range in reversed(&driver) {
        ensure(
            driver.unmap(1, range)? != OK,
            "UNMAP that ends before it begins fails",
        )?;
        ensure(
            driver.reaches(driver.one, 1, Some(7))?,
            "UNMAP that ends before it begins removes nothing",
        )?;
    }
    Ok(())
}

pub(crate) fn physical_wrap(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let top = u64::MAX - (driver.page - 1);
    ensure(
        driver.map(1, driver.pages(1, 2), top, READ)? != OK,
        "physical addresses do not wrap",
    )
}

/// The driver reuses the page as soon as it sees the reply.
pub(crate) fn outstanding(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for access in [Access::Read, Access::Write] {
        driver.map_page(1, 7)?;
        let range = driver.pages(1, 1);
        match driver.subject.begin_access(driver.one, range.0, access) {
            None => return not_applicable("the adapter has no long accesses"),
            Some(allowed) => ensure(
                allowed && driver.subject.access_is_outstanding(),
                "an access can begin",
            )?,
        }
        ensure(driver.unmap(1, range)? == OK, "UNMAP succeeds")?;
        ensure(
            !driver.subject.access_is_outstanding(),
            "an access that began before the UNMAP is over when it is answered",
        )?;
        ensure(
            driver.subject.begin_access(driver.one, range.0, access) == Some(false),
            "no access begins after the UNMAP",
        )?;
    }
    Ok(())
}

/// Creates a driver of a device with limits that statements reach.
fn limited<'a>(context: &'a TestContext<'_>) -> Result<Driver<'a>, Failure> {
    let setup = Setup {
        limits: Some(LIMITS),
        regions: &[],
        ..USUAL
    };
    Driver::new(context, &setup)
}

const LIMITS: GuestLimits = GuestLimits {
    mappings: 4,
    domains: 2,
};

pub(crate) fn domain_limit(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = limited(context)?;
    for (domain, endpoint) in [(0, driver.one), (1, driver.two)] {
        ensure(
            driver.attach(domain, endpoint)? == OK,
            "domains up to the cap can be created",
        )?;
    }
    ensure(
        driver.attach(2, driver.three)? == VIRTIO_IOMMU_S_NOMEM,
        "a domain beyond the cap: NOMEM",
    )?;
    ensure(
        driver.attach(1, driver.three)? == OK,
        "a domain that exists can be joined at the cap",
    )
}

pub(crate) fn mapping_limit(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = limited(context)?;
    for (domain, endpoint) in [(0, driver.one), (1, driver.two)] {
        ensure(driver.attach(domain, endpoint)? == OK, "ATTACH succeeds")?;
    }
    for page in 0..4 {
        let domain = (page & 1) as u32;
        ensure(
            driver.map(domain, driver.pages(page, 1), driver.at(0), BOTH)? == OK,
            "mappings up to the cap can be created",
        )?;
    }
    for domain in [0, 1] {
        let status = driver.map(domain, driver.pages(9, 1), driver.at(0), BOTH)?;
        ensure(
            status == VIRTIO_IOMMU_S_NOMEM,
            "a mapping beyond the cap: NOMEM",
        )?;
    }
    driver.unmap(0, driver.pages(0, 1))?;
    ensure(
        driver.map(1, driver.pages(9, 1), driver.at(0), BOTH)? == OK,
        "UNMAP makes room",
    )
}
