//! Statements 1 to 8: features, the configuration, resets and unattached endpoints.

use super::driver::{Driver, ONE, PAGE, TWO, ensure, usual};
use super::{Failure, Make, Setup};
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{BypassPolicy, Options};

const FIELD_BYPASS: [BypassPolicy; 3] = [
    BypassPolicy::Deny,
    BypassPolicy::DriverDecides {
        bypass_at_first: false,
    },
    BypassPolicy::DriverDecides {
        bypass_at_first: true,
    },
];

fn with(unattached: BypassPolicy) -> Setup {
    let usual = usual();
    Setup {
        options: Options {
            unattached,
            ..usual.options
        },
        ..usual
    }
}

/// Runs `check` on each supported kind of device, at least one.
fn each(
    make: Make<'_>,
    kinds: &[BypassPolicy],
    mut check: impl FnMut(Driver, BypassPolicy) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut any = false;
    for &kind in kinds {
        match Driver::reset(make, &with(kind)) {
            Ok(driver) => {
                any = true;
                check(driver, kind)?;
            }
            Err(Failure::NotApplicable) => {}
            Err(failure) => return Err(failure),
        }
    }
    if any {
        Ok(())
    } else {
        Err(Failure::NotApplicable)
    }
}

/// Checks statement 1 (section 5.13.3.2).
pub(super) fn features(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS, |driver, _| {
        let offered = driver.subject.offered();
        let has = |bit: u32| offered >> bit & 1 != 0;
        ensure(has(VIRTIO_IOMMU_F_MAP_UNMAP), "MAP_UNMAP is offered")?;
        ensure(
            !(has(VIRTIO_IOMMU_F_BYPASS) && has(VIRTIO_IOMMU_F_BYPASS_CONFIG)),
            "BYPASS and BYPASS_CONFIG are not both offered",
        )
    })
}

/// Checks statement 2 (section 5.13.4.2).
pub(super) fn page_size_mask(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS, |driver, _| {
        let config = driver.config();
        let mask = config.first_chunk::<8>().copied().unwrap_or_default();
        ensure(mask != [0; 8], "page_size_mask is not zero")
    })
}

/// Checks statement 3 (section 5.13.4.2).
pub(super) fn bypass_is_a_flag(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS, |mut driver, _| {
        driver.accept_all();
        for value in [2, 1, 0x80, 0xff, 0, 3] {
            driver.subject.write_config(CONFIG_BYPASS, &[value]);
            ensure(driver.bypass() <= 1, "bypass reads 0 or 1")?;
        }
        Ok(())
    })
}

/// Checks statement 4 (section 5.13.4.2).
pub(super) fn bypass_over_resets(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS[1..], |mut driver, _| {
        let first = driver.bypass();
        for value in [1 - first.min(1), first, 1 - first.min(1)] {
            driver.accept_all();
            driver.subject.write_config(CONFIG_BYPASS, &[value]);
            ensure(driver.bypass() == value, "bypass can be written")?;
            driver.subject.reset();
            ensure(driver.bypass() == value, "bypass survives a reset")?;
            let reached = driver.read(ONE, PAGE);
            ensure(
                value == 0 || reached.is_some(),
                "what bypass allows is allowed after a reset",
            )?;
        }
        driver.subject.reset_system();
        ensure(
            driver.bypass() == first,
            "bypass is what it was at first after a system reset",
        )
    })
}

/// Section 5.13.4.1: the driver must not write other fields; the device ignores such writes.
pub(super) fn other_fields(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS, |mut driver, _| {
        driver.accept_all();
        let before = driver.config();
        for offset in (0..CONFIG_BYTES + 8).filter(|offset| *offset != CONFIG_BYPASS) {
            for value in [0, 1, 0x5a, 0xff] {
                driver.subject.write_config(offset, &[value]);
                ensure(driver.config() == before, "only bypass can be written")?;
            }
        }
        driver
            .subject
            .write_config(CONFIG_PAGE_SIZE_MASK, &[0xff; 8]);
        driver.subject.write_config(CONFIG_INPUT_RANGE, &[0x5a; 16]);
        driver.subject.write_config(usize::MAX, &[0xff; 8]);
        ensure(driver.config() == before, "only bypass can be written")
    })
}

/// Checks statement 6 (section 5.13.5).
pub(super) fn reset_detaches(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 7 * PAGE)?;
    ensure(
        driver.read(ONE, PAGE) == Some(7 * PAGE),
        "a mapping is reached",
    )?;
    driver.subject.reset();
    ensure(
        driver.read(ONE, PAGE).is_none(),
        "nothing is reached after a reset",
    )?;
    driver.accept_all();
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_INVAL,
        "no endpoint is attached after a reset",
    )?;
    ensure(
        driver.attach(1, ONE) == VIRTIO_IOMMU_S_OK,
        "an endpoint can be attached after a reset",
    )?;
    ensure(
        driver.read(ONE, PAGE).is_none(),
        "a domain of before the reset maps nothing",
    )
}

/// Checks statement 7 (section 5.13.6.2).
pub(super) fn unattached(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS[..2], |mut driver, _| {
        ensure(
            driver.read(ONE, PAGE).is_none(),
            "no read before attachment",
        )?;
        driver.accept_all();
        ensure(
            driver.write(ONE, PAGE).is_none(),
            "no write before attachment",
        )?;
        // An attachment of another endpoint gives no access.
        driver.attach(1, ONE);
        driver.map_page(PAGE, 7 * PAGE)?;
        ensure(
            driver.read(TWO, PAGE).is_none() && driver.write(TWO, 7 * PAGE).is_none(),
            "another endpoint's mapping is not reached",
        )
    })
}

/// Section 5.13.6, "An endpoint is in bypass mode if".
pub(super) fn bypass_without_acceptance(make: Make<'_>) -> Result<(), Failure> {
    each(make, &FIELD_BYPASS[2..], |mut driver, _| {
        ensure(driver.bypass() == 1, "bypass is 1 at first")?;
        for accepted in [0, 1 << VIRTIO_IOMMU_F_MAP_UNMAP] {
            driver.subject.accept(accepted);
            ensure(
                driver.read(ONE, 5 * PAGE + 3) == Some(5 * PAGE + 3)
                    && driver.write(TWO, PAGE) == Some(PAGE),
                "endpoints bypass the IOMMU without the feature being accepted",
            )?;
        }
        Ok(())
    })
}
