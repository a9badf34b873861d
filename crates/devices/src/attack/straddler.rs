//! An attacker whose access starts inside the buffer and ends after it (A19).

use super::{Attacker, DmaPort, DriverEvent};

/// Just before an unmap, makes one access of two bytes that starts at the buffer's last byte. A
/// unit that checks only the first byte of an access allows it.
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
