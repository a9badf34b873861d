//! The ACPI table that lists the devices behind the virtio-iommu (VIOT, ACPI 6.5, section 5.2.34).

const HEADER_BYTES: u16 = 48;
const NODE_PCI_RANGE: u8 = 1;
const NODE_VIRTIO_IOMMU_PCI: u8 = 3;

/// Builds the table: one virtio-iommu at `iommu`, with each of `endpoints` behind it. All addresses
/// are bus, device and function on segment 0. The endpoint ID of a device equals its address.
pub(super) fn table(iommu: u16, endpoints: &[u16]) -> Vec<u8> {
    let nodes = u16::try_from(endpoints.len().saturating_add(1)).unwrap_or(u16::MAX);
    let length = u32::from(HEADER_BYTES)
        .saturating_add(16)
        .saturating_add(24 * u32::from(nodes.saturating_sub(1)));
    let mut table = Vec::new();
    table.extend(b"VIOT");
    table.extend(length.to_le_bytes());
    // Revision, and the checksum, which is computed below.
    table.extend([0, 0]);
    table.extend(b"RINGFN");
    table.extend(b"RINGFNCE");
    table.extend(1u32.to_le_bytes());
    table.extend(b"RGFN");
    table.extend(1u32.to_le_bytes());
    table.extend(nodes.to_le_bytes());
    table.extend(HEADER_BYTES.to_le_bytes());
    table.extend([0; 8]);

    table.extend([NODE_VIRTIO_IOMMU_PCI, 0]);
    table.extend(16u16.to_le_bytes());
    table.extend(0u16.to_le_bytes());
    table.extend(iommu.to_le_bytes());
    table.extend([0; 8]);

    for endpoint in endpoints {
        table.extend([NODE_PCI_RANGE, 0]);
        table.extend(24u16.to_le_bytes());
        table.extend(u32::from(*endpoint).to_le_bytes());
        // First and last segment, first and last address, offset of the IOMMU's node.
        for field in [0, 0, *endpoint, *endpoint, HEADER_BYTES] {
            table.extend(field.to_le_bytes());
        }
        table.extend([0; 6]);
    }
    let sum = table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = table.get_mut(9) {
        *checksum = sum.wrapping_neg();
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_endpoint_takes_88_bytes_that_add_up_to_zero() {
        let table = table(0x18, &[0x20]);
        assert_eq!(table.len(), 88);
        assert_eq!(table[4..8], 88u32.to_le_bytes());
        assert_eq!(table.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
        assert_eq!(table[36..40], [2, 0, 48, 0]);
        assert_eq!(table[48..56], [3, 0, 16, 0, 0, 0, 0x18, 0]);
        assert_eq!(
            table[64..82],
            [
                1, 0, 24, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0x20, 0, 48, 0
            ]
        );
    }
}
