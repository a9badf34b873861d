//! UNMAP (section 5.13.6.6).

use crate::driver::{BOTH, Driver, Failure, TestContext, USUAL, ensure, unmap};
use crate::spec::*;

const OK: u8 = VIRTIO_IOMMU_S_OK;
const INVAL: u8 = VIRTIO_IOMMU_S_INVAL;

pub(crate) fn reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    let (start, last) = driver.pages(1, 1);
    match driver.status(&unmap(1, start, last, u32::MAX))? {
        OK => ensure(
            driver.reaches(driver.one, 1, None)?,
            "OK: the page is unmapped",
        ),
        status => ensure(status == INVAL, "otherwise the status is INVAL"),
    }
}

/// Creates a driver whose domain has three mappings: page 1, pages 4 to 7, and page 8.
fn three_mappings<'a>(context: &'a TestContext<'_>) -> Result<Driver<'a>, Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 6)?;
    let status = driver.map(1, driver.pages(4, 4), driver.at(9), BOTH)?;
    ensure(status == OK, "MAP of four pages succeeds")?;
    driver.map_page(8, 13)?;
    Ok(driver)
}

/// Ranges of pages that split the four pages.
const SPLITTING: [(u64, u64); 6] = [(0, 5), (1, 6), (5, 4), (5, 1), (4, 3), (7, 13)];

pub(crate) fn split(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = three_mappings(context)?;
    for (first, count) in SPLITTING {
        ensure(
            driver.unmap(1, driver.pages(first, count))? == VIRTIO_IOMMU_S_RANGE,
            "UNMAP that would split a mapping: RANGE",
        )?;
    }
    Ok(())
}

pub(crate) fn split_keeps(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = three_mappings(context)?;
    for (first, count) in SPLITTING {
        // Another statement checks the status.
        driver.unmap(1, driver.pages(first, count))?;
        for page in [1, 4, 5, 6, 7, 8] {
            ensure(
                driver.reaches(driver.one, page, Some(page + 5))?,
                "UNMAP that would split a mapping removes nothing",
            )?;
        }
    }
    row_keeps(context)
}

/// Seven mappings of two pages. Half of the first or of the last one is outside the range. A search
/// tree finds one in the middle first.
fn row_keeps(context: &TestContext<'_>) -> Result<(), Failure> {
    const ROW: u64 = 7;
    for first in [2, 1] {
        let mut driver = Driver::attached(context, &USUAL)?;
        for number in 0..ROW {
            let range = driver.pages(1 + 2 * number, 2);
            let status = driver.map(1, range, driver.at(1 + 2 * number), BOTH)?;
            ensure(status == OK, "MAP of two pages succeeds")?;
        }
        driver.unmap(1, driver.pages(first, 2 * ROW - 1))?;
        for page in 1..=2 * ROW {
            ensure(
                driver.reaches(driver.one, page, Some(page))?,
                "UNMAP that would split one of seven mappings removes nothing",
            )?;
        }
    }
    Ok(())
}

/// Mappings and a range of UNMAP in pages, both ends included.
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
];

const GAPS: &[Example] = &[
    example(&[(2, 4), (10, 14), (15, 15)], (1, 14), &[2], true),
    example(&[(10, 14)], (0, 9), &[0], true),
    example(&[(10, 14)], (15, 30), &[0], true),
    example(&[(1, 1), (3, 3), (5, 5), (7, 7)], (2, 6), &[0, 3], true),
];

fn run(context: &TestContext<'_>, examples: &[Example]) -> Result<(), Failure> {
    for example in examples {
        let mut driver = Driver::attached(context, &USUAL)?;
        for &(first, last) in example.maps {
            let range = driver.pages(first, last + 1 - first);
            let status = driver.map(1, range, driver.at(first), BOTH)?;
            ensure(status == OK, "MAP of pages succeeds")?;
        }
        let (first, last) = example.unmap;
        let status = driver.unmap(1, driver.pages(first, last + 1 - first))?;
        ensure(
            (status == OK) == example.ok,
            "UNMAP over gaps succeeds, UNMAP of a part does not",
        )?;
        for (number, &(first, last)) in example.maps.iter().enumerate() {
            for page in first..=last {
                let to = example.left.contains(&number).then_some(page);
                ensure(
                    driver.reaches(driver.one, page, to)?,
                    "UNMAP removes the covered mappings and no other",
                )?;
            }
        }
    }
    Ok(())
}

pub(crate) fn examples(context: &TestContext<'_>) -> Result<(), Failure> {
    run(context, EXAMPLES)
}

pub(crate) fn gaps(context: &TestContext<'_>) -> Result<(), Failure> {
    run(context, GAPS)
}

pub(crate) fn everything(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = three_mappings(context)?;
    let range = driver.input_range();
    ensure(
        driver.unmap(1, range)? == OK,
        "UNMAP of the input range succeeds",
    )?;
    for page in [1, 4, 5, 6, 7, 8] {
        ensure(
            driver.reaches(driver.one, page, None)?,
            "every mapping is removed",
        )?;
    }
    Ok(())
}

pub(crate) fn absent_domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for domain in driver.absent_domains() {
        ensure(
            driver.unmap(domain, driver.pages(1, 1))? == VIRTIO_IOMMU_S_NOENT,
            "UNMAP in a domain that does not exist: NOENT",
        )?;
    }
    Ok(())
}

pub(crate) fn bypass_domain(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    driver.bypass_domain(2, driver.one)?;
    ensure(
        driver.unmap(2, driver.pages(1, 1))? == INVAL,
        "UNMAP in a bypass domain: INVAL",
    )
}
