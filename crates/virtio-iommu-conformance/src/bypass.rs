//! Bypass mode and unattached endpoints (section 5.13.6).

use crate::Setup;
use crate::driver::{Driver, Failure, TestContext, USUAL, ensure, not_applicable};
use crate::spec::*;

pub(crate) fn unattached(context: &TestContext<'_>) -> Result<(), Failure> {
    for bypass in [None, Some(false)] {
        let mut driver = Driver::new(context, &Setup { bypass, ..USUAL })?;
        let offered = driver.offers(VIRTIO_IOMMU_F_BYPASS_CONFIG);
        if offered && driver.bypass() != 0 {
            driver.set_bypass(0);
        }
        if driver.offers(VIRTIO_IOMMU_F_BYPASS) && !offered {
            return not_applicable("BYPASS lets unattached endpoints access memory");
        }
        let at = driver.at(1);
        ensure(
            driver.write(driver.one, at)?.is_none(),
            "no write before attachment",
        )?;
        // An attachment of another endpoint gives no access.
        driver.attach(1, driver.one)?;
        driver.map_page(1, 7)?;
        let mapped = driver.pages(1, 1).0;
        for iova in [mapped, at, driver.at(7)] {
            ensure(
                driver.write(driver.two, iova)?.is_none(),
                "no access by attachment of another endpoint",
            )?;
        }
        driver.detach(1, driver.one)?;
        ensure(
            driver.is_blocked(driver.one, at)? && driver.is_blocked(driver.one, mapped)?,
            "no access after DETACH",
        )?;
    }
    Ok(())
}

/// Section 5.13.6, "An endpoint is in bypass mode if".
pub(crate) fn without_acceptance(context: &TestContext<'_>) -> Result<(), Failure> {
    let setup = Setup {
        bypass: Some(true),
        ..USUAL
    };
    let mut driver = Driver::reset(context, &setup)?;
    driver.needs(VIRTIO_IOMMU_F_BYPASS_CONFIG, "BYPASS_CONFIG")?;
    if driver.bypass() != 1 {
        return not_applicable("bypass is not 1 at first");
    }
    for accepted in [0, 1 << VIRTIO_IOMMU_F_MAP_UNMAP] {
        driver.subject.accept(accepted);
        for endpoint in [driver.one, driver.two] {
            ensure(
                driver.reaches_itself(endpoint, 5)?,
                "unattached endpoints have the identity",
            )?;
        }
        driver.subject.reset();
    }
    Ok(())
}

pub(crate) fn domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.bypass_domain(2, driver.two)?;
    ensure(
        driver.reaches_itself(driver.two, 3)?,
        "an endpoint in a bypass domain has the identity",
    )?;
    driver.detach(2, driver.two)?;
    let at = driver.at(3);
    ensure(
        driver.write(driver.two, at)?.is_none(),
        "bypass mode ends with DETACH",
    )
}
