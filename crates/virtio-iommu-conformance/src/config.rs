//! Features, configuration and resets (sections 5.13.3 to 5.13.5).

use crate::Setup;
use crate::driver::{Driver, Failure, TestContext, USUAL, ensure, not_applicable};
use crate::spec::*;

/// The usual device, with each way to treat unattached endpoints.
const KINDS: [Setup; 3] = [kind(None), kind(Some(false)), kind(Some(true))];

const fn kind(bypass: Option<bool>) -> Setup {
    Setup { bypass, ..USUAL }
}

/// Runs `check` on each kind of device that can be created, at least one.
fn each(
    context: &TestContext<'_>,
    check: impl Fn(Driver<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut reason = None;
    let mut any = false;
    for setup in &KINDS {
        match Driver::reset(context, setup) {
            Ok(driver) => {
                any = true;
                check(driver)?;
            }
            Err(failure) => reason = Some(failure),
        }
    }
    match reason {
        Some(failure) if !any => Err(failure),
        _ => Ok(()),
    }
}

/// Creates a driver that has negotiated BYPASS_CONFIG.
fn with_bypass<'a>(context: &'a TestContext<'_>, at_first: bool) -> Result<Driver<'a>, Failure> {
    let mut driver = Driver::reset(context, &kind(Some(at_first)))?;
    driver.needs(VIRTIO_IOMMU_F_BYPASS_CONFIG, "BYPASS_CONFIG")?;
    driver.accept_all();
    Ok(driver)
}

fn note_features(driver: &Driver<'_>) {
    let offered = driver.subject.offered();
    driver.note(alloc::format!("features {offered:#x} are offered"));
}

pub(crate) fn map_unmap(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |driver| {
        note_features(&driver);
        ensure(
            driver.offers(VIRTIO_IOMMU_F_MAP_UNMAP),
            "MAP_UNMAP is offered",
        )
    })
}

pub(crate) fn bypass_superseded(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |driver| {
        note_features(&driver);
        ensure(
            !driver.offers(VIRTIO_IOMMU_F_BYPASS),
            "BYPASS is not offered",
        )
    })
}

pub(crate) fn page_size_mask(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |driver| {
        let _ = driver.config();
        let mask = driver.config64(CONFIG_PAGE_SIZE_MASK);
        ensure(mask != 0, "page_size_mask is not zero")
    })
}

pub(crate) fn ranges(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |driver| {
        let _ = driver.config();
        let first = driver.config64(CONFIG_INPUT_RANGE);
        let last = driver.config64(CONFIG_INPUT_RANGE + 8);
        ensure(
            first <= last || !driver.offers(VIRTIO_IOMMU_F_INPUT_RANGE),
            "input_range does not end before it begins",
        )?;
        let first = driver.config32(CONFIG_DOMAIN_RANGE);
        let last = driver.config32(CONFIG_DOMAIN_RANGE + 4);
        ensure(
            first <= last || !driver.offers(VIRTIO_IOMMU_F_DOMAIN_RANGE),
            "domain_range does not end before it begins",
        )?;
        ensure(
            driver.probe_size() != 0 || !driver.offers(VIRTIO_IOMMU_F_PROBE),
            "probe_size is not zero",
        )
    })
}

pub(crate) fn bypass_value(context: &TestContext<'_>) -> Result<(), Failure> {
    each(context, |mut driver| {
        driver.accept_all();
        for value in [2, 1, 0x80, 0xff, 0, 3] {
            driver.set_bypass(value);
            ensure(driver.bypass() <= 1, "bypass reads 0 or 1")?;
        }
        Ok(())
    })
}

pub(crate) fn bypass_reset(context: &TestContext<'_>) -> Result<(), Failure> {
    for at_first in [false, true] {
        let mut driver = with_bypass(context, at_first)?;
        let first = driver.bypass();
        for value in [1 - first.min(1), first, 1 - first.min(1)] {
            driver.accept_all();
            driver.set_bypass(value);
            ensure(driver.bypass() == value, "bypass can be written")?;
            driver.subject.reset();
            ensure(driver.bypass() == value, "bypass survives a device reset")?;
            if value == 1 {
                ensure(
                    driver.reaches_itself(driver.one, 1)?,
                    "endpoints stay in bypass mode after a device reset",
                )?;
            }
        }
    }
    Ok(())
}

pub(crate) fn bypass_system_reset(context: &TestContext<'_>) -> Result<(), Failure> {
    for at_first in [false, true] {
        let mut driver = with_bypass(context, at_first)?;
        let first = driver.bypass();
        driver.set_bypass(1 - first.min(1));
        if !driver.subject.reset_system() {
            return not_applicable("the adapter cannot reset the machine");
        }
        ensure(
            driver.bypass() == first,
            "bypass has its initial value after a system reset",
        )?;
    }
    Ok(())
}

/// Section 5.13.4.1: the driver must not write other fields.
pub(crate) fn other_fields(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    let before = driver.config();
    for offset in (0..CONFIG_BYTES + 8).filter(|offset| *offset != CONFIG_BYPASS) {
        let value = before.get(offset).map_or(1, |byte| byte ^ 1);
        driver.subject.write_config(offset, &[value]);
        ensure(driver.config() == before, "only bypass can be written")?;
    }
    let subject = &mut driver.subject;
    subject.write_config(CONFIG_PAGE_SIZE_MASK, &[0xff; 8]);
    subject.write_config(CONFIG_INPUT_RANGE, &[0x5a; 16]);
    subject.write_config(usize::MAX, &[0xff; 8]);
    ensure(driver.config() == before, "only bypass can be written")
}

pub(crate) fn reset_detaches(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    ensure(
        driver.reaches(driver.one, 1, Some(7))?,
        "a mapping is reached",
    )?;
    driver.subject.reset();
    if driver.offers(VIRTIO_IOMMU_F_BYPASS_CONFIG) && driver.bypass() == 0 {
        let iova = driver.pages(1, 1).0;
        ensure(
            driver.write(driver.one, iova)?.is_none(),
            "an endpoint reaches no memory after a reset",
        )?;
    }
    driver.accept_all();
    ensure(
        driver.detach(1, driver.one)? != VIRTIO_IOMMU_S_OK,
        "no endpoint is attached after a reset",
    )?;
    let status = driver.map(1, driver.pages(1, 1), driver.at(7), 3)?;
    ensure(
        status != VIRTIO_IOMMU_S_OK,
        "no domain exists after a reset",
    )?;
    ensure(
        driver.attach(1, driver.one)? == VIRTIO_IOMMU_S_OK,
        "an endpoint can be attached after a reset",
    )?;
    ensure(
        driver.reaches(driver.one, 1, None)?,
        "a mapping from before the reset is gone",
    )
}
