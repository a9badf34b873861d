//! An attacker whose access starts inside the buffer and ends after it.

use super::{Attacker, DmaPort, DriverEvent};

/// The device makes one two-byte access at the buffer's last byte, just before the driver unmaps
/// the buffer. If the buffer ends at a page boundary, only an IOMMU that checks just the first byte
/// allows the access. Otherwise every IOMMU whose granule is a page does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Straddler;

impl Attacker for Straddler {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        if let DriverEvent::Unmapping(mapping) = event {
            // The observer counts successful accesses.
            let _ = port.access(&mapping.request(mapping.range.last(), 2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Script, mapping};
    use super::*;

    #[test]
    fn begins_inside_and_ends_outside() {
        let mut port = Script::new(|_| false);
        for (iova, bytes, last) in [(0x1000, 0x10, 0x100f), (0x1fff, 1, 0x1fff)] {
            let buffer = mapping(iova, bytes);
            for event in [
                DriverEvent::Mapped(buffer),
                DriverEvent::Other,
                DriverEvent::Unmapped(buffer),
            ] {
                Straddler.on(&event, &mut port);
            }
            assert!(port.take().is_empty());
            Straddler.on(&DriverEvent::Unmapping(buffer), &mut port);
            assert_eq!(port.take(), [(last, 2)]);
        }
    }
}
