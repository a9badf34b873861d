//! An attacker that accesses buffers against their direction.

use ringfence_types::{Access, Direction};

use super::{Attacker, DmaPort, DriverEvent};
use crate::DmaRequest;

/// Once per mapping, just before its unmap: reads the first byte of a buffer that it may only
/// write, and writes that of a buffer that it may only read. Tables without write-only pages cannot
/// block the read.
#[derive(Debug, Clone, Copy, Default)]
pub struct WrongDirection;

impl Attacker for WrongDirection {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        let DriverEvent::Unmapping(mapping) = event else {
            return;
        };
        let access = match mapping.direction {
            Direction::ToDevice => Access::Write,
            Direction::FromDevice => Access::Read,
            Direction::Bidirectional => return,
        };
        // The observer counts successful accesses.
        let _ = port.access(&DmaRequest {
            access,
            ..mapping.request(mapping.range.start(), 1)
        });
    }
}

#[cfg(test)]
mod tests {
    use ringfence_types::Fault;

    use super::super::DeviceMapping;
    use super::super::tests::mapping;
    use super::*;

    #[test]
    fn each_direction_is_reversed_once() {
        for (direction, wanted) in [
            (Direction::ToDevice, Some(Access::Write)),
            (Direction::FromDevice, Some(Access::Read)),
            (Direction::Bidirectional, None),
        ] {
            let buffer = DeviceMapping {
                direction,
                ..mapping(0x1010, 64)
            };
            let mut found = Vec::new();
            let mut port = |request: &DmaRequest| -> Result<(), Fault> {
                found.push((request.iova.get(), request.bytes, request.access));
                Ok(())
            };
            for event in [
                DriverEvent::Mapped(buffer),
                DriverEvent::Unmapping(buffer),
                DriverEvent::Unmapped(buffer),
                DriverEvent::Other,
            ] {
                WrongDirection.on(&event, &mut port);
            }
            let wanted: Vec<_> = wanted
                .into_iter()
                .map(|access| (0x1010, 1, access))
                .collect();
            assert_eq!(found, wanted);
        }
    }
}
