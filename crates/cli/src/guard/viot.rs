//! The ACPI table that lists the PCI functions behind a guest's virtio-iommu.

use super::address::Address;

/// The table's header (ACPI's and the VIOT's own) in bytes. The node of the IOMMU comes next.
const HEADER: u16 = 48;
/// A range of PCI functions, in bytes.
const PCI_RANGE: u16 = 24;
/// A virtio-iommu that is a PCI function, in bytes.
const VIRTIO_PCI: u16 = 16;
/// The offset of the checksum.
const CHECKSUM: usize = 9;

/// The VIOT of a virtio-iommu at `iommu` with a PCI function as endpoint at each of `endpoints`, on
/// the first bus of the first segment; an endpoint's ID is its function's bus, device and function
/// number.
pub(super) fn table(iommu: Address, endpoints: &[Address]) -> Vec<u8> {
    let mut table = Vec::new();
    table.extend(b"VIOT");
    table.extend([0; 4]); // The length, filled in below.
    table.extend([1, 0]); // The revision; the checksum, filled in below.
    table.extend(b"RNGFNC");
    table.extend(b"GUARD   ");
    table.extend(1_u32.to_le_bytes());
    table.extend(b"RNGF");
    table.extend(1_u32.to_le_bytes());
    let nodes = 1 + endpoints.len() as u16;
    table.extend(nodes.to_le_bytes());
    table.extend(HEADER.to_le_bytes());
    table.extend([0; 8]);

    table.extend([3, 0]);
    table.extend(VIRTIO_PCI.to_le_bytes());
    table.extend([0; 2]);
    table.extend(iommu.number().to_le_bytes());
    table.extend([0; 8]);

    for endpoint in endpoints {
        let number = endpoint.number();
        table.extend([1, 0]);
        table.extend(PCI_RANGE.to_le_bytes());
        table.extend(u32::from(number).to_le_bytes());
        table.extend([0; 4]); // The first and the last segment.
        table.extend(number.to_le_bytes());
        table.extend(number.to_le_bytes());
        table.extend(HEADER.to_le_bytes());
        table.extend([0; 6]);
    }
    let len = (table.len() as u32).to_le_bytes();
    table[4..8].copy_from_slice(&len);
    let sum = table.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte));
    table[CHECKSUM] = sum.wrapping_neg();
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_table_is_as_the_specification_lays_it_out() {
        let at = |text: &str| text.parse::<Address>().unwrap();
        let table = table(at("05.0"), &[at("06.0")]);
        assert_eq!(table.len(), 88);
        assert_eq!(&table[..4], b"VIOT");
        assert_eq!(table[4..8], 88_u32.to_le_bytes());
        assert_eq!(table.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)), 0);
        assert_eq!(table[36..40], [2, 0, 48, 0]);
        assert_eq!(table[48..56], [3, 0, 16, 0, 0, 0, 0x28, 0]);
        assert_eq!(
            table[64..84],
            [1, 0, 24, 0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0x30, 0, 48, 0, 0, 0]
        );
    }
}
