//! Requirements on every request (section 5.13.6).

use alloc::vec;

use crate::driver::{
    BOTH, Driver, Failure, NOBODY, TestContext, UNTOUCHED, USUAL, attach, detach, ensure, map,
    unmap,
};
use crate::spec::*;

const OK: u8 = VIRTIO_IOMMU_S_OK;

pub(crate) fn status_ok(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 7)?;
    ensure(driver.reaches(driver.one, 1, Some(7))?, "MAP has an effect")?;
    let page = driver.pages(1, 1);
    ensure(driver.unmap(1, page)? == OK, "UNMAP succeeds")?;
    ensure(driver.reaches(driver.one, 1, None)?, "UNMAP has an effect")?;
    ensure(driver.detach(1, driver.one)? == OK, "DETACH succeeds")
}

pub(crate) fn unknown_type(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    for kind in [0, 6, 7, 0x7f, 0x80, 0xff] {
        for length in [HEAD_BYTES, MAP_BYTES, PROBE_BYTES] {
            let mut request = vec![0; length];
            if let Some(first) = request.first_mut() {
                *first = kind;
            }
            let (used, reply) = driver.send(&request, 64)?;
            ensure(
                used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
                "an unknown type: nothing written, used length 0",
            )?;
        }
    }
    Ok(())
}

/// Returns a driver and the four requests that every device knows.
fn four<'a>(context: &'a TestContext<'_>) -> Result<(Driver<'a>, [vec::Vec<u8>; 4]), Failure> {
    let driver = Driver::attached(context, &USUAL)?;
    let (start, last) = driver.pages(1, 1);
    let requests = [
        attach(2, driver.two, 0, 0),
        detach(1, driver.one, 0),
        map(1, start, last, driver.at(0), BOTH),
        unmap(1, start, last, 0),
    ];
    Ok((driver, requests))
}

/// Section 5.13.6, "When the device fails to parse a request".
pub(crate) fn short(context: &TestContext<'_>) -> Result<(), Failure> {
    let (mut driver, valid) = four(context)?;
    for request in &valid {
        for length in 0..request.len() {
            let short = request.get(..length).unwrap_or_default();
            let (used, reply) = driver.send(short, TAIL_BYTES)?;
            ensure(
                used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
                "nothing is written for a request that is too short",
            )?;
        }
    }
    ensure(
        driver.detach(1, driver.one)? == OK,
        "requests that are too short have no effect",
    )
}

pub(crate) fn no_tail(context: &TestContext<'_>) -> Result<(), Failure> {
    let (mut driver, valid) = four(context)?;
    for request in &valid {
        for room in 0..TAIL_BYTES {
            let (used, reply) = driver.send(request, room)?;
            ensure(
                used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
                "nothing is written without room for the tail",
            )?;
        }
    }
    ensure(
        driver.detach(1, driver.one)? == OK,
        "requests without a tail have no effect",
    )
}

/// Section 5.13.6.1: the driver treats a used length of 0 as a failure, and Linux then overwrites
/// the status.
pub(crate) fn failures_are_written(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    driver.map_page(1, 0)?;
    let (one, two) = (driver.one, driver.two);
    let (start, last) = driver.pages(1, 1);
    let failing = [
        attach(1, NOBODY, 0, 0),
        attach(2, two, 1 << 31, 0),
        attach(2, two, 0, 1),
        detach(1, NOBODY, 0),
        detach(2, one, 0),
        map(9, start, last, 0, BOTH),
        map(1, start + 1, last, 0, BOTH),
        map(1, start, last, 0, BOTH),
        map(1, 0, start - 1, 0, 1 << 31),
        map(1, start, 0, 0, BOTH),
        unmap(9, start, last, 0),
        unmap(1, start, start + 1, 0),
        unmap(1, start, 0, 0),
    ];
    for request in &failing {
        let (used, reply) = driver.send(request, TAIL_BYTES)?;
        let status = reply.first().copied().unwrap_or(UNTOUCHED);
        // Other statements check that the requests fail.
        ensure(
            status != UNTOUCHED && (status == OK || used != 0),
            "the status of a failure is written, and its used length is not zero",
        )?;
    }
    Ok(())
}

/// Returns requests that succeed one after another.
fn life(driver: &Driver<'_>) -> [vec::Vec<u8>; 4] {
    let (start, last) = driver.pages(1, 1);
    [
        attach(1, driver.one, 0, 0),
        map(1, start, last, driver.at(0), BOTH),
        unmap(1, start, last, 0),
        detach(1, driver.one, 0),
    ]
}

pub(crate) fn head_reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    for mut request in life(&driver) {
        if let Some(reserved) = request.get_mut(1..HEAD_BYTES) {
            reserved.fill(0xa5);
        }
        ensure(
            driver.status(&request)? == OK,
            "reserved bytes of the head are ignored",
        )?;
    }
    Ok(())
}

pub(crate) fn tail_reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(context, &USUAL)?;
    let failure = detach(1, NOBODY, 0);
    for request in life(&driver).iter().chain([&failure]) {
        let (_, reply) = driver.send(request, TAIL_BYTES)?;
        driver.note(alloc::format!("a tail is {reply:02x?}"));
        ensure(
            reply.get(1..) == Some(&[0; 3]),
            "reserved bytes of the tail are zero",
        )?;
    }
    Ok(())
}

/// Linux spins on the used ring under a lock, and then relies on the request's effect.
pub(crate) fn complete_when_published(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(context, &USUAL)?;
    let (start, last) = driver.pages(1, 1);
    let to = driver.at(7);
    driver.send_at_once(&map(1, start, last, to, BOTH), TAIL_BYTES)?;
    ensure(
        driver.read(driver.one, start)? == Some(to),
        "a MAP has taken effect when it is returned",
    )?;
    driver.send_at_once(&unmap(1, start, last, 0), TAIL_BYTES)?;
    ensure(
        driver.read(driver.one, start)?.is_none(),
        "an UNMAP has taken effect when it is returned",
    )?;
    driver.send_at_once(&map(1, start, last, to, BOTH), TAIL_BYTES)?;
    driver.send_at_once(&detach(1, driver.one, 0), TAIL_BYTES)?;
    ensure(
        driver.write(driver.one, start)?.is_none(),
        "a DETACH has taken effect when it is returned",
    )
}
