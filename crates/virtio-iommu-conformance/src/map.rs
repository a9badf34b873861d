//! MAP (section 5.13.6.5).

use crate::Setup;
use crate::driver::{
    BOTH, Driver, Failure, READ, TestContext, USUAL, WRITE, ensure, not_applicable,
};
use crate::spec::*;

const OK: u8 = VIRTIO_IOMMU_S_OK;
const INVAL: u8 = VIRTIO_IOMMU_S_INVAL;

/// Section 5.13.6, "Any mapping request to virtual addresses outside of this range fails".
pub(crate) fn input_range(context: &TestContext<'_>) -> Result<(), Failure> {
    let setup = Setup {
        input: (16 << 16, (64 << 16) - 1),
        regions: &[],
        ..USUAL
    };
    let mut driver = Driver::attached(context, &setup)?;
    let (first, last) = driver.input_range();
    if (first, last) == (0, u64::MAX) {
        return not_applicable("input_range has all addresses");
    }
    let page = driver.page;
    let mut outside = alloc::vec![(0, u64::MAX)];
    if let Some(below) = first.checked_sub(page) {
        outside.extend([(below, first - 1), (below, first + page - 1)]);
    }
    if let Some(end) = last.checked_add(page) {
        outside.extend([(last + 1, end), (last + 1 - page, end)]);
    }
    for range in outside {
        ensure(
            driver.map(1, range, driver.at(0), READ)? != OK,
            "MAP outside the input range fails",
        )?;
    }
    let edges = [(first, first + page - 1), (last + 1 - page, last)];
    for (number, edge) in (5..).zip(edges) {
        let to = driver.at(number);
        ensure(
            driver.map(1, edge, to, BOTH)? == OK && driver.read(driver.one, edge.0)? == Some(to),
            "the ends of the input range can be mapped",
        )?;
    }
    Ok(())
}

pub(crate) fn translation(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let (start, last) = driver.pages(2, 3);
    let to = driver.at(7);
    let status = driver.map(1, (start, last), to, BOTH)?;
    ensure(status == OK, "MAP of three pages succeeds")?;
    for offset in [0, 1, 8, driver.page - 1, driver.page, last - start] {
        let iova = start + offset;
        ensure(
            driver.write(driver.one, iova)? == Some(to + offset),
            "a write is translated",
        )?;
        ensure(
            driver.read(driver.one, iova)? == Some(to + offset),
            "a read is translated",
        )?;
    }
    for iova in [start - 8, start - 1, last + 1, last + 8] {
        ensure(
            driver.write(driver.one, iova)?.is_none(),
            "a byte beside the mapping is not reached",
        )?;
    }
    Ok(())
}

pub(crate) fn top(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let (_, last) = driver.input_range();
    let range = (last - (driver.page - 1), last);
    let to = driver.at(3);
    ensure(
        driver.map(1, range, to, BOTH)? == OK,
        "MAP of the last page succeeds",
    )?;
    ensure(
        driver.write(driver.one, range.0)? == Some(to) && driver.write(driver.one, 0)?.is_none(),
        "the last page ends where it ends",
    )?;
    ensure(
        driver.unmap(1, range)? == OK && driver.write(driver.one, range.0)?.is_none(),
        "UNMAP of the last page succeeds",
    )
}

pub(crate) fn misaligned(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let mask = driver.config64(CONFIG_PAGE_SIZE_MASK);
    let granule = mask & mask.wrapping_neg();
    if granule <= 1 {
        return not_applicable("the page granularity is one byte");
    }
    let (start, last) = driver.pages(1, 2);
    let to = driver.at(7);
    for off in [1, granule / 2, granule - 1] {
        for (range, to) in [
            ((start + off, last), to),
            ((start, last - off), to),
            ((start, last + off), to),
            ((start, last), to + off),
        ] {
            ensure(
                driver.map(1, range, to, BOTH)? == VIRTIO_IOMMU_S_RANGE,
                "MAP misaligned: RANGE",
            )?;
        }
    }
    ensure(driver.reaches(driver.one, 2, None)?, "nothing was mapped")
}

pub(crate) fn overlapping(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let status = driver.map(1, driver.pages(2, 2), driver.at(7), BOTH)?;
    ensure(status == OK, "MAP of two pages succeeds")?;
    for (first, count) in [(2, 2), (2, 1), (3, 1), (1, 2), (3, 2), (1, 4), (0, 9)] {
        ensure(
            driver.map(1, driver.pages(first, count), driver.at(0), BOTH)? == INVAL,
            "MAP over a mapping: INVAL",
        )?;
    }
    for page in 0..9 {
        let to = (2..4).contains(&page).then_some(page + 5);
        ensure(
            driver.reaches(driver.one, page, to)?,
            "a rejected MAP changes nothing",
        )?;
    }
    for page in [1, 4] {
        ensure(
            driver.map(1, driver.pages(page, 1), driver.at(0), BOTH)? == OK,
            "neighbours do not overlap",
        )?;
    }
    Ok(())
}

pub(crate) fn flags(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for bit in 3..32 {
        ensure(
            driver.map(1, driver.pages(1, 1), driver.at(0), READ | 1 << bit)? == INVAL,
            "an unknown flag: INVAL",
        )?;
    }
    Ok(())
}

const WITH_MMIO: Setup = Setup {
    mmio: true,
    ..USUAL
};

/// Both a device without MMIO and one whose driver does not accept it.
pub(crate) fn mmio_not_negotiated(context: &TestContext<'_>) -> Result<(), Failure> {
    for setup in [&USUAL, &WITH_MMIO] {
        let mut driver = Driver::reset(context, setup)?;
        let offered = driver.subject.offered();
        driver.subject.accept(offered & !(1 << VIRTIO_IOMMU_F_MMIO));
        driver.attach(1, driver.one)?;
        let flags = BOTH | VIRTIO_IOMMU_MAP_F_MMIO;
        ensure(
            driver.map(1, driver.pages(1, 1), driver.at(0), flags)? == INVAL,
            "the MMIO flag without its feature: INVAL",
        )?;
    }
    Ok(())
}

pub(crate) fn mmio(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &WITH_MMIO)?;
    driver.needs(VIRTIO_IOMMU_F_MMIO, "MMIO")?;
    let flags = BOTH | VIRTIO_IOMMU_MAP_F_MMIO;
    ensure(
        driver.map(1, driver.pages(1, 1), driver.at(0), flags)? == OK,
        "the MMIO flag with its feature is accepted",
    )
}

pub(crate) fn absent_domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for domain in driver.absent_domains() {
        ensure(
            driver.map(domain, driver.pages(1, 1), driver.at(0), BOTH)? == VIRTIO_IOMMU_S_NOENT,
            "MAP in a domain that does not exist: NOENT",
        )?;
    }
    Ok(())
}

pub(crate) fn bypass_domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    driver.bypass_domain(2, driver.one)?;
    ensure(
        driver.map(2, driver.pages(1, 1), driver.at(0), BOTH)? == INVAL,
        "MAP in a bypass domain: INVAL",
    )
}

/// Maps one page for each combination of permissions and accesses it. Fails if an access succeeds
/// without the permission `needed`.
fn excess(
    context: &TestContext<'_>,
    needed: u32,
    access: impl Fn(&mut Driver<'_>, u64) -> Result<Option<u64>, Failure>,
) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for (page, flags) in [(1, 0), (2, READ), (3, WRITE), (4, BOTH)] {
        let status = driver.map(1, driver.pages(page, 1), driver.at(page), flags)?;
        // A device may not support a mapping without READ.
        ensure(
            flags & READ == 0 || status == OK,
            "MAP with these permissions succeeds",
        )?;
        let start = page * driver.page;
        let reached = access(&mut driver, start)?.is_some();
        ensure(
            !reached || flags & needed != 0,
            "an access without its permission is blocked",
        )?;
        ensure(
            reached || flags & needed == 0 || status != OK,
            "an access with its permission succeeds",
        )?;
    }
    Ok(())
}

pub(crate) fn write_permission(context: &TestContext<'_>) -> Result<(), Failure> {
    excess(context, WRITE, |driver, iova| {
        driver.write(driver.one, iova)
    })
}

pub(crate) fn read_permission(context: &TestContext<'_>) -> Result<(), Failure> {
    excess(context, READ, |driver, iova| driver.read(driver.one, iova))
}
