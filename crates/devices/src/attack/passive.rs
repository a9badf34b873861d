//! The well-behaved device: the accesses that an oracle replay makes at each unmap.

use super::{Attacker, DmaPort, DriverEvent};

/// Accesses the buffer once on each page, in the mapping's direction, just before the unmap. This
/// is the access pattern to assume for a trace without device accesses.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passive;

impl Attacker for Passive {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        if let DriverEvent::Unmapping(mapping) = event {
            for page in mapping.pages() {
                let request = mapping.request(page.start(), page.bytes());
                // The observer judges a blocked access: here it would be a false fault.
                let _ = port.access(&request);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Script, mapping};
    use super::*;

    #[test]
    fn touches_each_page_once_before_unmap() {
        let mut port = Script::new(|_| false);
        let buffer = mapping(0x1f00, 0x1200);
        for event in [
            DriverEvent::Mapped(buffer),
            DriverEvent::Other,
            DriverEvent::Unmapped(buffer),
        ] {
            Passive.on(&event, &mut port);
        }
        assert!(port.take().is_empty());
        Passive.on(&DriverEvent::Unmapping(buffer), &mut port);
        assert_eq!(
            port.take(),
            [(0x1f00, 0x100), (0x2000, 0x1000), (0x3000, 0x100)]
        );
    }
}
