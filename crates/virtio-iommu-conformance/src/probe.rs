//! PROBE (section 5.13.6.7).

use alloc::vec::Vec;

use crate::Setup;
use crate::driver::{
    Driver, Failure, NOBODY, TestContext, UNTOUCHED, USUAL, ensure, not_applicable, probe,
};
use crate::spec::*;

/// Returns the status at the end of a reply.
fn status_of(reply: &[u8]) -> u8 {
    let tail = reply.last_chunk::<TAIL_BYTES>();
    tail.map_or(UNTOUCHED, |tail| tail[0])
}

/// Creates a driver of a device with PROBE.
pub(crate) fn driver<'a>(context: &'a TestContext<'_>) -> Result<Driver<'a>, Failure> {
    let driver = Driver::new(context, &USUAL)?;
    driver.needs(VIRTIO_IOMMU_F_PROBE, "PROBE")?;
    Ok(driver)
}

/// Returns the list of properties of an endpoint.
pub(crate) fn list(driver: &mut Driver<'_>, endpoint: u32) -> Result<Vec<u8>, Failure> {
    let size = driver.probe_size();
    let (_, mut reply) = driver.send(&probe(endpoint, 0), size + TAIL_BYTES)?;
    ensure(status_of(&reply) == VIRTIO_IOMMU_S_OK, "PROBE succeeds")?;
    reply.truncate(size);
    Ok(reply)
}

/// A property: its type including reserved bits, and its value.
pub(crate) type Property<'a> = (u16, &'a [u8]);

/// Properties of a list, and their total length.
pub(crate) type Properties<'a> = (Vec<Property<'a>>, usize);

/// Parses the properties in `list` up to the first one that exceeds the list. Returns false if
/// there is such a property.
fn scan(list: &[u8]) -> (Properties<'_>, bool) {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&[t0, t1, l0, l1]) = list.get(at..).and_then(<[u8]>::first_chunk) {
        let kind = u16::from_le_bytes([t0, t1]);
        if kind & 0xfff == 0 {
            break;
        }
        let from = at + PROPERTY_HEAD_BYTES;
        let to = from + usize::from(u16::from_le_bytes([l0, l1]));
        let Some(value) = list.get(from..to) else {
            return ((found, at), false);
        };
        found.push((kind, value));
        at = to;
    }
    ((found, at), true)
}

/// Parses the properties in `list`; `None` if one exceeds it.
pub(crate) fn parse(list: &[u8]) -> Option<Properties<'_>> {
    let (properties, complete) = scan(list);
    complete.then_some(properties)
}

pub(crate) fn reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let room = driver.probe_size() + TAIL_BYTES;
    let (_, reply) = driver.send(&probe(driver.two, 0xff), room)?;
    ensure(
        status_of(&reply) == VIRTIO_IOMMU_S_OK,
        "reserved bytes of PROBE are ignored",
    )
}

pub(crate) fn endpoint(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let room = driver.probe_size() + TAIL_BYTES;
    let (_, reply) = driver.send(&probe(NOBODY, 0), room)?;
    ensure(
        status_of(&reply) == VIRTIO_IOMMU_S_NOENT,
        "PROBE of an endpoint that does not exist: NOENT",
    )
}

pub(crate) fn not_offered(context: &TestContext<'_>) -> Result<(), Failure> {
    let without = Setup {
        probe: false,
        regions: &[],
        ..USUAL
    };
    let mut driver = Driver::new(context, &without)?;
    if driver.offers(VIRTIO_IOMMU_F_PROBE) {
        return not_applicable("the device offers PROBE");
    }
    for room in [TAIL_BYTES, 64, 516] {
        let (used, reply) = driver.send(&probe(driver.one, 0), room)?;
        ensure(
            used == 0 && reply.iter().all(|byte| *byte == UNTOUCHED),
            "PROBE that is not offered: nothing written, used length 0",
        )?;
    }
    Ok(())
}

pub(crate) fn property_reserved(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    for endpoint in driver.subject.endpoints() {
        let list = list(&mut driver, endpoint)?;
        let found = parse(&list).map(|(found, _)| found).unwrap_or_default();
        ensure(
            found.iter().all(|(kind, _)| kind >> 12 == 0),
            "reserved bits of a property are zero",
        )?;
    }
    Ok(())
}

pub(crate) fn lengths(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let mut regions = 0;
    for endpoint in driver.subject.endpoints() {
        let list = list(&mut driver, endpoint)?;
        let shown = list.get(..64).unwrap_or(&list);
        driver.note(alloc::format!("the list begins with {shown:02x?}"));
        let Some((found, _)) = parse(&list) else {
            return ensure(false, "properties do not exceed their list");
        };
        for (kind, value) in found {
            ensure(
                kind & 0xfff != VIRTIO_IOMMU_PROBE_T_RESV_MEM
                    || value.len() == RESV_MEM_BYTES - PROPERTY_HEAD_BYTES,
                "the length of RESV_MEM is 20",
            )?;
            ensure(
                kind & 0xfff == VIRTIO_IOMMU_PROBE_T_RESV_MEM,
                "each property follows the one before",
            )?;
            regions += 1;
        }
    }
    match regions {
        0 => not_applicable("no endpoint has a property"),
        _ => Ok(()),
    }
}

pub(crate) fn short(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let size = driver.probe_size();
    for missing in [1, 3, size / 2, size] {
        let room = size.saturating_sub(missing) + TAIL_BYTES;
        let (used, reply) = driver.send(&probe(driver.two, 0), room)?;
        ensure(
            used == room && status_of(&reply) == VIRTIO_IOMMU_S_INVAL,
            "PROBE with a short buffer: INVAL",
        )?;
        let list = reply.get(..room - TAIL_BYTES).unwrap_or_default();
        ensure(
            list.iter().all(|byte| [0, UNTOUCHED].contains(byte)),
            "PROBE with a short buffer: no property",
        )?;
    }
    Ok(())
}

pub(crate) fn rest(context: &TestContext<'_>) -> Result<(), Failure> {
    let mut driver = driver(context)?;
    let size = driver.probe_size();
    for endpoint in driver.subject.endpoints() {
        let (used, reply) = driver.send(&probe(endpoint, 0), size + TAIL_BYTES)?;
        ensure(
            used == size + TAIL_BYTES,
            "the device writes all properties",
        )?;
        let list = reply.get(..size).unwrap_or_default();
        let ((_, end), _) = scan(list);
        let rest = list.get(end..).unwrap_or_default();
        ensure(
            rest.iter().all(|byte| *byte == 0),
            "bytes without properties are zero",
        )?;
    }
    Ok(())
}
