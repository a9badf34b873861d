//! Statements 9 to 12, 37, 38 and 40: requirements on every request.

use alloc::vec;

use super::driver::{
    BOTH, Driver, NOBODY, ONE, PAGE, READ, TWO, UNTOUCHED, attach, detach, ensure, map, unmap,
    usual,
};
use super::{Failure, Make, Setup};
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{Options, VirtioIommuLimits};

/// Checks statement 9 (section 5.13.6.2).
pub(super) fn unknown_type(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    for kind in [0, 6, 7, 0x7f, 0x80, 0xff] {
        for length in [HEAD_BYTES, MAP_BYTES, PROBE_BYTES] {
            let mut request = vec![0; length];
            if let Some(first) = request.first_mut() {
                *first = kind;
            }
            let (used, reply) = driver.send(&request, 64);
            ensure(used == 0, "used length 0 for an unknown type")?;
            ensure(
                reply.iter().all(|byte| *byte == UNTOUCHED),
                "nothing is written for an unknown type",
            )?;
        }
    }
    Ok(())
}

/// Section 5.13.6, "When the device fails to parse a request".
pub(super) fn unparsable(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let valid = [
        attach(2, TWO, 0, 0),
        detach(1, ONE, 0),
        map(1, PAGE, 2 * PAGE - 1, 0, BOTH),
        unmap(1, 0, PAGE - 1),
    ];
    for request in &valid {
        for length in 0..request.len() {
            let short = request.get(..length).unwrap_or_default();
            let (used, reply) = driver.send(short, TAIL_BYTES);
            ensure(
                used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
                "nothing is written for a request that is cut off",
            )?;
        }
        for room in 0..TAIL_BYTES {
            let (used, reply) = driver.send(request, room);
            ensure(
                used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
                "nothing is written where a tail has no room",
            )?;
        }
    }
    // None of the requests had an effect.
    ensure(
        driver.detach(1, ONE) == VIRTIO_IOMMU_S_OK,
        "what cannot be parsed has no effect",
    )
}

/// Section 5.13.6.1: the driver treats a used length of 0 as a failure, and Linux then overwrites
/// the status.
pub(super) fn failures_are_written(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    driver.map_page(PAGE, 0)?;
    let failing = [
        attach(1, NOBODY, 0, 0),
        attach(2, TWO, 1 << 31, 0),
        attach(2, TWO, 0, 1),
        detach(1, NOBODY, 0),
        detach(2, ONE, 0),
        map(9, 0, PAGE - 1, 0, BOTH),
        map(1, 1, PAGE, 0, BOTH),
        map(1, PAGE, 2 * PAGE - 1, 0, BOTH),
        map(1, 0, PAGE - 1, 0, 1 << 31),
        map(1, PAGE, 0, 0, BOTH),
        unmap(9, 0, PAGE - 1),
        unmap(1, PAGE, PAGE + 1),
        unmap(1, PAGE, 0),
    ];
    for request in &failing {
        let (used, reply) = driver.send(request, TAIL_BYTES);
        let status = reply.first().copied().unwrap_or(UNTOUCHED);
        // Another statement checks that the requests fail.
        ensure(
            status != UNTOUCHED && (status == VIRTIO_IOMMU_S_OK || used != 0),
            "a failure's status is written, and its used length is not zero",
        )?;
    }
    Ok(())
}

/// Checks statement 12 (section 5.13.6.2).
pub(super) fn reserved_bytes(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    let requests = [
        attach(1, ONE, 0, 0),
        map(1, PAGE, 2 * PAGE - 1, 0, BOTH),
        unmap(1, PAGE, 2 * PAGE - 1),
        detach(1, ONE, 0),
    ];
    for mut request in requests {
        if let Some(reserved) = request.get_mut(1..HEAD_BYTES) {
            reserved.fill(0xa5);
        }
        let (_, reply) = driver.send(&request, TAIL_BYTES);
        let tail = reply.first_chunk::<TAIL_BYTES>();
        ensure(
            tail.is_some_and(|tail| tail[0] == VIRTIO_IOMMU_S_OK),
            "reserved bytes of the head are ignored",
        )?;
        ensure(
            tail.is_some_and(|tail| tail[1..] == [0; 3]),
            "reserved bytes of the tail are zero",
        )?;
    }
    let (_, reply) = driver.send(&detach(1, NOBODY, 0), TAIL_BYTES);
    ensure(
        reply.get(1..) == Some(&[0; 3]),
        "reserved bytes of a failure's tail are zero",
    )
}

/// Linux spins on the used ring under a lock, and then relies on the request's effect.
pub(super) fn complete_when_published(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let (start, last) = (PAGE, 2 * PAGE - 1);
    driver.send_at_once(&map(1, start, last, 7 * PAGE, BOTH), TAIL_BYTES);
    ensure(
        driver.read(ONE, start) == Some(7 * PAGE),
        "a MAP has taken effect when it is returned",
    )?;
    driver.send_at_once(&unmap(1, start, last), TAIL_BYTES);
    ensure(
        driver.read(ONE, start).is_none(),
        "an UNMAP has taken effect when it is returned",
    )?;
    driver.send_at_once(&map(1, start, last, 7 * PAGE, BOTH), TAIL_BYTES);
    driver.send_at_once(&detach(1, ONE, 0), TAIL_BYTES);
    ensure(
        driver.read(ONE, start).is_none(),
        "a DETACH has taken effect when it is returned",
    )
}

/// Overflow of `virt_end + 1`, of lengths, and of the physical end.
pub(super) fn extremes(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::attached(make, &usual())?;
    let top = u64::MAX - (PAGE - 1);
    ensure(
        driver.map(1, top, u64::MAX, 3 * PAGE, BOTH) == VIRTIO_IOMMU_S_OK,
        "the last page can be mapped",
    )?;
    ensure(
        driver.read(ONE, u64::MAX) == Some(4 * PAGE - 1) && driver.read(ONE, 0).is_none(),
        "a mapping of the last page ends where it ends",
    )?;
    for (start, end) in [(PAGE, 0), (PAGE, PAGE - 1), (u64::MAX, 0), (top, PAGE - 1)] {
        ensure(
            driver.map(1, start, end, 0, BOTH) != VIRTIO_IOMMU_S_OK,
            "a MAP that ends before it begins fails",
        )?;
        ensure(
            driver.unmap(1, start, end) != VIRTIO_IOMMU_S_OK,
            "an UNMAP that ends before it begins fails",
        )?;
    }
    // The physical range would end past 2^64 - 1.
    ensure(
        driver.map(1, PAGE, 3 * PAGE - 1, top, READ) != VIRTIO_IOMMU_S_OK
            && driver.read(ONE, 2 * PAGE).is_none(),
        "physical addresses do not wrap",
    )?;
    ensure(
        driver.unmap(1, 0, u64::MAX) == VIRTIO_IOMMU_S_OK && driver.read(ONE, top).is_none(),
        "everything can be unmapped at once",
    )?;
    // The largest mapping: all addresses, mapped to themselves.
    let status = driver.map(1, 0, u64::MAX, 0, READ);
    let reached = driver.read(ONE, u64::MAX);
    ensure(
        (status == VIRTIO_IOMMU_S_OK) == (reached == Some(u64::MAX)),
        "2^64 bytes are mapped, or refused",
    )
}

/// Memory use is bounded, whatever the guest sends.
pub(super) fn caps(make: Make<'_>) -> Result<(), Failure> {
    let usual = usual();
    let setup = Setup {
        options: Options {
            limits: VirtioIommuLimits {
                mappings: 4,
                domains: 2,
                ..VirtioIommuLimits::default()
            },
            ..usual.options
        },
        endpoints: &[(0, &[]), (1, &[]), (2, &[])],
    };
    let mut driver = Driver::new(make, &setup)?;
    for domain in [0, 1] {
        ensure(
            driver.attach(domain, domain) == VIRTIO_IOMMU_S_OK,
            "as many domains as the cap says",
        )?;
    }
    ensure(
        driver.attach(2, 2) == VIRTIO_IOMMU_S_NOMEM,
        "a domain beyond the cap: NOMEM",
    )?;
    ensure(
        driver.attach(1, 2) == VIRTIO_IOMMU_S_OK,
        "a domain that exists can be joined at the cap",
    )?;
    for page in 0..4 {
        let start = page * PAGE;
        ensure(
            driver.map((page & 1) as u32, start, start + PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK,
            "as many mappings as the cap says",
        )?;
    }
    for domain in [0, 1] {
        ensure(
            driver.map(domain, 9 * PAGE, 10 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_NOMEM,
            "a mapping beyond the cap: NOMEM",
        )?;
    }
    driver.unmap(0, 0, PAGE - 1);
    ensure(
        driver.map(1, 9 * PAGE, 10 * PAGE - 1, 0, BOTH) == VIRTIO_IOMMU_S_OK,
        "what was unmapped makes room",
    )
}
