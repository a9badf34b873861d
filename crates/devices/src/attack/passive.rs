//! The device that does as it is told.

use super::{Attacker, DmaPort, DriverEvent};

/// One access to each page of a mapping, in its direction and to all of the buffer on that page,
/// just before it is unmapped: what a trace without device accesses lets one assume.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passive;

impl Attacker for Passive {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        if let DriverEvent::Unmapping(mapping) = event {
            for page in mapping.pages() {
                let request = mapping.request(page.start(), page.bytes());
                // Whether it was stopped is the observer's to judge: here it would be a false
                // fault.
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
