//! An attacker that accesses bytes next to the buffer.

use ringfence_types::PageSize;

use super::{Attacker, DmaPort, DriverEvent};

/// Once per mapping, accesses the byte before the buffer on its first page and the byte after it on
/// its last page. A page-granular mode cannot block this.
#[derive(Debug, Clone, Copy, Default)]
pub struct Neighbour;

impl Attacker for Neighbour {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        let DriverEvent::Mapped(mapping) = event else {
            return;
        };
        let page = PageSize::Size4K.bytes();
        let (first, last) = (mapping.range.start(), mapping.range.last());
        // The observer counts successful accesses.
        if !first.is_aligned(page) {
            let _ = port.access(&mapping.request(first.wrapping_add(u64::MAX), 1));
        }
        let next = last.wrapping_add(1);
        if !next.is_aligned(page) {
            let _ = port.access(&mapping.request(next, 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Script, mapping};
    use super::*;

    #[test]
    fn stays_within_the_first_and_the_last_page() {
        let cases: [(u64, u64, &[u64]); 6] = [
            (0x1000, 0x1000, &[]),
            (0x1000, 0xfff, &[0x1fff]),
            (0x1001, 0xfff, &[0x1000]),
            (0x1800, 0x10, &[0x17ff, 0x1810]),
            (0x1fff, 2, &[0x1ffe, 0x2001]),
            (u64::MAX, 1, &[u64::MAX - 1]),
        ];
        for (iova, bytes, expected) in cases {
            let mut port = Script::new(|_| false);
            let buffer = mapping(iova, bytes);
            for event in [
                DriverEvent::Mapped(buffer),
                DriverEvent::Other,
                DriverEvent::Unmapping(buffer),
                DriverEvent::Unmapped(buffer),
            ] {
                Neighbour.on(&event, &mut port);
            }
            let expected: Vec<_> = expected.iter().map(|iova| (*iova, 1)).collect();
            assert_eq!(port.take(), expected, "{iova:#x} + {bytes:#x}");
        }
    }
}
