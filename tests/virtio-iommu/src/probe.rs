//! Statements 32 to 34: PROBE.

use alloc::vec::Vec;

use super::driver::{Driver, NOBODY, ONE, TWO, UNTOUCHED, ensure, probe, usual};
use super::{Failure, Make, Setup};
use ringfence_virtio_iommu::Options;
use ringfence_virtio_iommu::spec::*;

/// Returns the buffer size for properties from the configuration.
fn probe_size(driver: &Driver) -> usize {
    let mut bytes = [0; 4];
    driver.subject.read_config(CONFIG_PROBE_SIZE, &mut bytes);
    u32::from_le_bytes(bytes) as usize
}

/// Returns the status at the end of a reply.
fn status_of(reply: &[u8]) -> u8 {
    let tail = reply.last_chunk::<TAIL_BYTES>();
    tail.map_or(UNTOUCHED, |tail| tail[0])
}

/// Checks statement 32 (section 5.13.6.7.2).
pub(super) fn unknown_endpoint(make: Make<'_>) -> Result<(), Failure> {
    let usual = usual();
    let mut driver = Driver::new(make, &usual)?;
    let room = probe_size(&driver) + TAIL_BYTES;
    let (_, reply) = driver.send(&probe(NOBODY), room);
    ensure(
        status_of(&reply) == VIRTIO_IOMMU_S_NOENT,
        "PROBE of an endpoint that does not exist: NOENT",
    )?;
    let without = Setup {
        options: Options {
            probe_bytes: 0,
            ..usual.options
        },
        endpoints: &[(ONE, &[])],
    };
    let mut driver = match Driver::new(make, &without) {
        Err(Failure::NotApplicable) => return Ok(()),
        made => made?,
    };
    for room in [TAIL_BYTES, 64, 516] {
        let (used, reply) = driver.send(&probe(ONE), room);
        ensure(
            used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
            "PROBE that is not offered: nothing written, used length 0",
        )?;
    }
    Ok(())
}

/// A property: its type including reserved bits, and its value.
type Property<'a> = (u16, &'a [u8]);

/// Parses the properties in `list` and returns their total length; `None` if one exceeds the list.
fn parse(list: &[u8]) -> Option<(Vec<Property<'_>>, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&[t0, t1, l0, l1]) = list.get(at..)?.first_chunk() {
        let kind = u16::from_le_bytes([t0, t1]);
        if kind & 0xfff == 0 {
            break;
        }
        let from = at + PROPERTY_HEAD_BYTES;
        let to = from + usize::from(u16::from_le_bytes([l0, l1]));
        found.push((kind, list.get(from..to)?));
        at = to;
    }
    Some((found, at))
}

/// Checks statement 33 (section 5.13.6.7.2).
pub(super) fn lengths(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    let probe_size = probe_size(&driver);
    for (endpoint, regions) in [(ONE, 0), (TWO, 2)] {
        let (used, reply) = driver.send(&probe(endpoint), probe_size + TAIL_BYTES);
        ensure(
            used == probe_size + TAIL_BYTES && status_of(&reply) == VIRTIO_IOMMU_S_OK,
            "a PROBE fills its room",
        )?;
        let list = reply.get(..probe_size).unwrap_or_default();
        let Some((found, end)) = parse(list) else {
            return Err(Failure::Broken("the lengths of properties are exact"));
        };
        ensure(found.len() == regions, "every region is a property")?;
        for (kind, value) in found {
            ensure(
                kind == VIRTIO_IOMMU_PROBE_T_RESV_MEM
                    && value.len() == RESV_MEM_BYTES - PROPERTY_HEAD_BYTES,
                "a region is 20 bytes behind the head of its property",
            )?;
            ensure(
                value.get(1..4) == Some(&[0; 3]),
                "reserved bytes of a region are zero",
            )?;
        }
        ensure(
            list.get(end..)
                .is_some_and(|rest| rest.iter().all(|byte| *byte == 0)),
            "what no property fills is zero",
        )?;
    }
    for missing in [1, 3, probe_size / 2, probe_size] {
        let room = probe_size.saturating_sub(missing) + TAIL_BYTES;
        let (used, reply) = driver.send(&probe(TWO), room);
        ensure(
            used == room && status_of(&reply) == VIRTIO_IOMMU_S_INVAL,
            "PROBE with a short buffer: INVAL",
        )?;
        ensure(
            reply
                .get(..room - TAIL_BYTES)
                .is_some_and(|list| list.iter().all(|byte| *byte == 0)),
            "PROBE with a short buffer: no property",
        )?;
    }
    Ok(())
}

/// Checks statement 34 (section 5.13.6.8.1.2).
pub(super) fn regions(make: Make<'_>) -> Result<(), Failure> {
    let mut driver = Driver::new(make, &usual())?;
    let probe_size = probe_size(&driver);
    let (_, reply) = driver.send(&probe(TWO), probe_size + TAIL_BYTES);
    let list = reply.get(..probe_size).unwrap_or_default();
    // Statement 33 covers lists that cannot be parsed.
    let found = parse(list).map(|(found, _)| found).unwrap_or_default();
    let mut doorbells = 0;
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (_, value) in found {
        let subtype = value.first().copied();
        doorbells += usize::from(subtype == Some(VIRTIO_IOMMU_RESV_MEM_T_MSI));
        let number = |at: usize| {
            let bytes = value.get(at..).and_then(|rest| rest.first_chunk());
            bytes.copied().map(u64::from_le_bytes)
        };
        if let (Some(start), Some(last)) = (number(4), number(12)) {
            ensure(start <= last, "a region ends behind its beginning")?;
            ensure(
                ranges.iter().all(|other| last < other.0 || other.1 < start),
                "reserved regions do not overlap",
            )?;
            ranges.push((start, last));
        }
    }
    ensure(doorbells <= 1, "at most one region is for MSIs")
}
