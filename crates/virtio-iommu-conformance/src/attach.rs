//! ATTACH and DETACH (sections 5.13.6.3 and 5.13.6.4).

use crate::Setup;
use crate::driver::{
    BOTH, Driver, Failure, NOBODY, TestContext, USUAL, attach, detach, ensure, not_applicable,
};
use crate::spec::*;

const OK: u8 = VIRTIO_IOMMU_S_OK;
const INVAL: u8 = VIRTIO_IOMMU_S_INVAL;
const NOENT: u8 = VIRTIO_IOMMU_S_NOENT;

pub(crate) fn domain_range(context: &TestContext<'_>) -> Result<(), Failure> {
    let setup = Setup {
        domains: (3, 9),
        ..USUAL
    };
    let mut driver = Driver::new(context, &setup)?;
    driver.needs(VIRTIO_IOMMU_F_DOMAIN_RANGE, "DOMAIN_RANGE")?;
    let first = driver.config32(CONFIG_DOMAIN_RANGE);
    let last = driver.config32(CONFIG_DOMAIN_RANGE + 4);
    if (first, last) == (0, u32::MAX) {
        return not_applicable("domain_range has all numbers");
    }
    for domain in [first.checked_sub(1), last.checked_add(1)] {
        let Some(domain) = domain else { continue };
        ensure(
            driver.attach(domain, driver.one)? != OK,
            "ATTACH outside the domain range fails",
        )?;
    }
    for domain in [first, last] {
        ensure(
            driver.attach(domain, driver.one)? == OK,
            "the ends of the domain range are valid",
        )?;
        driver.detach(domain, driver.one)?;
    }
    Ok(())
}

pub(crate) fn reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for reserved in [1, 1 << 8, 1 << 31, u32::MAX] {
        ensure(
            driver.status(&attach(1, driver.one, 0, reserved))? == INVAL,
            "a reserved field that is not zero: INVAL",
        )?;
    }
    ensure(
        driver.detach(1, driver.one)? != OK,
        "the endpoint was not attached",
    )
}

pub(crate) fn flags(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for bit in 1..32 {
        ensure(
            driver.status(&attach(1, driver.one, 1 << bit, 0))? == INVAL,
            "an unknown flag: INVAL",
        )?;
    }
    ensure(
        driver.detach(1, driver.one)? != OK,
        "the endpoint was not attached",
    )
}

/// The bypass flag exists only after its feature was accepted.
pub(crate) fn bypass_flag(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::reset(context, &USUAL)?;
    let without = driver.subject.offered() & !(1 << VIRTIO_IOMMU_F_BYPASS_CONFIG);
    driver.subject.accept(without);
    ensure(
        driver.attach_bypass(1, driver.one)? == INVAL,
        "a flag without its feature: INVAL",
    )
}

pub(crate) fn endpoint(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for endpoint in [NOBODY, NOBODY + 1, 0xff] {
        ensure(
            driver.attach(1, endpoint)? == NOENT,
            "an endpoint that does not exist: NOENT",
        )?;
    }
    Ok(())
}

pub(crate) fn alias(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for bit in [16, 24, 31] {
        let other = driver.one | 1 << bit;
        if driver.subject.endpoints().contains(&other) {
            continue;
        }
        ensure(
            driver.attach(1, other)? == NOENT,
            "an id that differs in a high bit: NOENT",
        )?;
    }
    Ok(())
}

pub(crate) fn effect(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for (domain, endpoint) in [(1, driver.one), (2, driver.two), (3, driver.three)] {
        if driver.attach(domain, endpoint)? != OK {
            continue;
        }
        let status = driver.map(domain, driver.pages(1, 1), driver.at(7), BOTH)?;
        ensure(status == OK, "the domain exists")?;
        ensure(
            driver.reaches(endpoint, 1, Some(7))?,
            "the endpoint reaches the mappings of its domain",
        )?;
    }
    Ok(())
}

pub(crate) fn contradiction(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.bypass_domain(2, driver.two)?;
    ensure(
        driver.attach_bypass(1, driver.three)? == INVAL,
        "the flag in a domain that maps: INVAL",
    )?;
    ensure(
        driver.attach(2, driver.three)? == INVAL,
        "no flag in a bypass domain: INVAL",
    )
}

pub(crate) fn rejection(context: &TestContext<'_>) -> Result<(), Failure> {
    for number in 0..4 {
        let mut driver = Driver::attached(context, &USUAL)?;
        driver.map_page(1, 7)?;
        driver.bypass_domain(2, driver.two)?;
        let (one, two) = (driver.one, driver.two);
        let request = match number {
            0 => attach(2, one, 0, 0),
            1 => attach(1, two, VIRTIO_IOMMU_ATTACH_F_BYPASS, 0),
            2 => attach(3, one, 1 << 31, 0),
            _ => attach(3, one, 0, 1),
        };
        // Other statements check that the requests fail.
        if driver.status(&request)? == OK {
            continue;
        }
        ensure(
            driver.reaches(one, 1, Some(7))?,
            "the endpoint that maps stays in its domain",
        )?;
        ensure(
            driver.reaches_itself(two, 1)?,
            "the endpoint that bypasses stays in its domain",
        )?;
    }
    Ok(())
}

pub(crate) fn again(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    match driver.attach(2, driver.one)? {
        VIRTIO_IOMMU_S_UNSUPP => {
            return ensure(
                driver.reaches(driver.one, 1, Some(7))?,
                "an endpoint that cannot be moved stays",
            );
        }
        status => ensure(status == OK, "an attached endpoint can be moved")?,
    }
    ensure(
        driver.reaches(driver.one, 1, None)?,
        "the old domain is not reached",
    )?;
    let status = driver.map(2, driver.pages(1, 1), driver.at(8), BOTH)?;
    ensure(
        status == OK && driver.reaches(driver.one, 1, Some(8))?,
        "the new domain is reached",
    )?;
    let status = driver.map(1, driver.pages(1, 1), driver.at(0), BOTH)?;
    ensure(
        status != OK,
        "the domain that the last endpoint left does not exist",
    )
}

/// Section 5.13.6.3, "Multiple endpoints can be attached to the same domain".
pub(crate) fn join(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    match driver.attach(1, driver.three)? {
        VIRTIO_IOMMU_S_UNSUPP => return not_applicable("the device attaches one endpoint only"),
        status => ensure(status == OK, "a domain can be joined")?,
    }
    ensure(
        driver.reaches(driver.three, 1, Some(7))?,
        "earlier mappings are reached",
    )?;
    driver.map_page(3, 9)?;
    for endpoint in [driver.one, driver.three] {
        ensure(
            driver.reaches(endpoint, 3, Some(9))?,
            "later mappings are reached by all",
        )?;
    }
    ensure(
        driver.detach(1, driver.one)? == OK && driver.reaches(driver.three, 1, Some(7))?,
        "an endpoint that stays still reaches them",
    )
}

pub(crate) fn isolation(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    ensure(driver.attach(2, driver.three)? == OK, "ATTACH succeeds")?;
    driver.map_page(1, 7)?;
    let status = driver.map(2, driver.pages(2, 1), driver.at(8), BOTH)?;
    ensure(status == OK, "MAP of a page succeeds")?;
    ensure(
        driver.reaches(driver.three, 1, None)? && driver.reaches(driver.one, 2, None)?,
        "a mapping of another domain is not reached",
    )
}

pub(crate) fn detach_reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    ensure(
        driver.status(&detach(1, driver.one, u64::MAX))? == OK,
        "reserved bytes of DETACH are ignored",
    )
}

pub(crate) fn detach_endpoint(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for endpoint in [NOBODY, 0xff] {
        ensure(
            driver.detach(1, endpoint)? == NOENT,
            "DETACH of an endpoint that does not exist: NOENT",
        )?;
    }
    Ok(())
}

pub(crate) fn detach_domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    ensure(driver.attach(3, driver.three)? == OK, "ATTACH succeeds")?;
    for (domain, endpoint) in [(2, driver.one), (3, driver.one), (1, driver.three)] {
        ensure(
            driver.detach(domain, endpoint)? == INVAL,
            "DETACH from a domain that the endpoint is not in: INVAL",
        )?;
    }
    ensure(
        driver.reaches(driver.one, 1, Some(7))?,
        "a rejected DETACH changes nothing",
    )
}

pub(crate) fn detached(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    ensure(
        driver.reaches(driver.one, 1, Some(7))?,
        "a mapping is reached",
    )?;
    ensure(driver.detach(1, driver.one)? == OK, "DETACH succeeds")?;
    let (start, _) = driver.pages(1, 1);
    ensure(
        driver.is_blocked(driver.one, start)?,
        "no mapping is reached after DETACH",
    )
}

/// Section 5.13.6.4, "it ceases to exist and its ID can be reused".
pub(crate) fn last_detach(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    driver.detach(1, driver.one)?;
    ensure(
        driver.attach(1, driver.one)? == OK,
        "the number of a domain can be used again",
    )?;
    ensure(
        driver.reaches(driver.one, 1, None)?,
        "the new domain is empty",
    )?;
    let status = driver.map(1, driver.pages(0, 4), driver.at(0), BOTH)?;
    ensure(status == OK, "no old mapping obstructs a new one")
}
