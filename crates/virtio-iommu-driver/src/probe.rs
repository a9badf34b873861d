//! Properties in the reply to PROBE (virtio 1.3, sections 5.13.6.7 and 5.13.6.8).

use alloc::vec::Vec;

use ringfence_types::{Iova, IovaRange};
use ringfence_virtio_iommu::spec::{
    PROPERTY_HEAD_BYTES, RESV_MEM_BYTES, VIRTIO_IOMMU_PROBE_T_MASK, VIRTIO_IOMMU_PROBE_T_NONE,
    VIRTIO_IOMMU_PROBE_T_RESV_MEM, VIRTIO_IOMMU_RESV_MEM_T_MSI,
};
use ringfence_virtio_iommu::{ReservedRegion, ReservedRegionKind};

use crate::error::UnitError;

/// Decodes the reserved regions. Ignores properties of other types.
///
/// # Errors
///
/// [`UnitError::MalformedProperty`].
pub(crate) fn reserved_regions(mut bytes: &[u8]) -> Result<Vec<ReservedRegion>, UnitError> {
    let mut found = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<PROPERTY_HEAD_BYTES>() {
        let [t0, t1, l0, l1] = *head;
        let kind = u16::from_le_bytes([t0, t1]) & VIRTIO_IOMMU_PROBE_T_MASK;
        let length = usize::from(u16::from_le_bytes([l0, l1]));
        if kind == VIRTIO_IOMMU_PROBE_T_NONE {
            break;
        }
        let value = rest.split_at_checked(length);
        let (value, rest) = value.ok_or(UnitError::MalformedProperty)?;
        if kind == VIRTIO_IOMMU_PROBE_T_RESV_MEM {
            found.push(region(value).ok_or(UnitError::MalformedProperty)?);
        }
        bytes = rest;
    }
    Ok(found)
}

/// Decodes `struct virtio_iommu_probe_resv_mem` after its head.
fn region(value: &[u8]) -> Option<ReservedRegion> {
    const BYTES: usize = RESV_MEM_BYTES - PROPERTY_HEAD_BYTES;
    let ([subtype, _, _, _], rest) = value.first_chunk::<BYTES>()?.split_first_chunk()?;
    let (start, rest) = rest.split_first_chunk()?;
    let end = rest.first_chunk()?;
    let start = Iova::new(u64::from_le_bytes(*start));
    let last = Iova::new(u64::from_le_bytes(*end));
    Some(ReservedRegion {
        range: IovaRange::inclusive(start, last)?,
        // The driver treats unknown subtypes as reserved (section 5.13.6.8.1).
        kind: match *subtype {
            VIRTIO_IOMMU_RESV_MEM_T_MSI => ReservedRegionKind::Msi,
            _ => ReservedRegionKind::Reserved,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    const MSI: [u8; 24] = [
        1, 0, 20, 0, 1, 0, 0, 0, 0, 0, 0xe0, 0xfe, 0, 0, 0, 0, 0xff, 0xff, 0xef, 0xfe, 0, 0, 0, 0,
    ];

    fn region(start: u64, last: u64, kind: ReservedRegionKind) -> ReservedRegion {
        let range = IovaRange::inclusive(Iova::new(start), Iova::new(last)).unwrap();
        ReservedRegion { range, kind }
    }

    #[test]
    fn golden_properties() {
        let msi = region(0xfee0_0000, 0xfeef_ffff, ReservedRegionKind::Msi);
        let mut other = MSI;
        // Reserved bits of the type; an unknown subtype; another start.
        (other[1], other[4], other[9]) = (0xf0, 7, 0x10);
        let reserved = region(0xfee0_1000, 0xfeef_ffff, ReservedRegionKind::Reserved);
        let unknown = [2, 0, 3, 0, 9, 9, 9];
        for (bytes, expected) in [
            (vec![], vec![]),
            (vec![0; 64], vec![]),
            ([&MSI[..], &[0; 16]].concat(), vec![msi]),
            // Until the last byte of the buffer.
            (MSI.to_vec(), vec![msi]),
            ([&MSI[..], &unknown, &other].concat(), vec![msi, reserved]),
            // Nothing counts after the end of the list.
            ([&[0; 4][..], &MSI].concat(), vec![]),
            ([&MSI[..], &[1, 0]].concat(), vec![msi]),
        ] {
            assert_eq!(reserved_regions(&bytes), Ok(expected), "{bytes:x?}");
        }
    }

    #[test]
    fn malformed_properties() {
        let mut backwards = MSI;
        backwards[19] = 0;
        let mut short = MSI;
        short[2] = 19;
        for bytes in [
            backwards.to_vec(),
            short.to_vec(),
            MSI[..23].to_vec(),
            vec![1, 0, 0, 0],
            vec![2, 0, 0xff, 0xff],
        ] {
            let found = reserved_regions(&bytes);
            assert_eq!(found, Err(UnitError::MalformedProperty), "{bytes:x?}");
        }
    }
}
