//! An attacker that keeps translations in the IOTLB.

use std::collections::VecDeque;

use super::{Attacker, DeviceMapping, DmaPort, DriverEvent};

/// Number of live mappings that a [`Racer`] keeps warm.
pub const WARM_MAPPINGS: usize = 64;

/// Accesses the youngest live mappings in turn, one at each event. Just before an unmap it accesses
/// every page of the mapping, so that the IOTLB holds the translation at the invalidation. It
/// violates nothing by itself: it prepares a [`Replayer`](super::Replayer).
#[derive(Debug, Clone, Default)]
pub struct Racer {
    /// Live mappings; the next one to access is at the front.
    warm: VecDeque<DeviceMapping>,
}

impl Racer {
    /// Creates a racer without mappings.
    pub fn new() -> Self {
        Self::default()
    }

    fn keep_warm<P: DmaPort>(&mut self, port: &mut P) {
        if let Some(mapping) = self.warm.pop_front() {
            let _ = port.access(&mapping.request(mapping.range.start(), 1));
            self.warm.push_back(mapping);
        }
    }
}

impl Attacker for Racer {
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match event {
            DriverEvent::Unmapping(mapping) => {
                for page in mapping.pages() {
                    let _ = port.access(&mapping.request(page.start(), 1));
                }
                // The mapping is about to be unmapped: a later access would no longer be legal.
                if let Some(at) = self.warm.iter().position(|warm| warm == mapping) {
                    self.warm.remove(at);
                }
            }
            DriverEvent::Mapped(mapping) => {
                self.keep_warm(port);
                if self.warm.len() >= WARM_MAPPINGS {
                    self.warm.pop_front();
                }
                self.warm.push_back(*mapping);
            }
            DriverEvent::Unmapped(_) | DriverEvent::Other => self.keep_warm(port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Script, mapping};
    use super::*;

    #[test]
    fn warms_in_turn_and_before_unmap() {
        let mut port = Script::new(|_| false);
        let mut racer = Racer::new();
        let (a, b) = (mapping(0x1000, 0x10), mapping(0x5f00, 0x200));
        racer.on(&DriverEvent::Mapped(a), &mut port);
        assert!(port.take().is_empty());
        racer.on(&DriverEvent::Mapped(b), &mut port);
        racer.on(&DriverEvent::Other, &mut port);
        racer.on(&DriverEvent::Other, &mut port);
        assert_eq!(port.take(), [(0x1000, 1), (0x1000, 1), (0x5f00, 1)]);
        racer.on(&DriverEvent::Unmapping(b), &mut port);
        assert_eq!(port.take(), [(0x5f00, 1), (0x6000, 1)]);
        racer.on(&DriverEvent::Unmapped(b), &mut port);
        racer.on(&DriverEvent::Other, &mut port);
        assert_eq!(port.take(), [(0x1000, 1), (0x1000, 1)]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut port = Script::new(|_| true);
        let mut racer = Racer::new();
        for page in 0..1000 {
            racer.on(&DriverEvent::Mapped(mapping(page << 12, 1)), &mut port);
        }
        assert_eq!(racer.warm.len(), WARM_MAPPINGS);
    }
}
