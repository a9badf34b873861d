//! Where granted pages appear in the process.

/// First address of the first window. Position-independent programs, their heaps, libraries and
/// stacks lie above the last one, others below.
pub const FIRST: u64 = 1 << 44;
/// Windows end here.
pub const END: u64 = 5 << 44;
/// Between windows, but for those that are asked for with one call. What a device reads past the
/// end of its buffer is nobody's.
const GAP_BYTES: u64 = 4096;

/// A run of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Window {
    /// First one.
    pub start: u64,
    /// Bytes, whole pages.
    pub bytes: u64,
}

/// Gives out windows.
///
/// An address comes again only after all others had their turn, 2^34 pages later. A device that
/// looked an address up and then lost its processor would otherwise find another grant's pages
/// there; so it finds none, and faults.
#[derive(Debug)]
pub(super) struct Windows {
    next: u64,
    end: u64,
}

impl Windows {
    pub(super) fn new() -> Self {
        Self {
            next: FIRST,
            end: END,
        }
    }

    /// The same as [`alloc`](Self::alloc), but right behind `before` if that was given out last.
    pub(super) fn alloc_after(
        &mut self,
        before: &Window,
        bytes: u64,
        is_taken: impl Fn(&Window) -> Option<Window>,
    ) -> Option<Window> {
        let end = before.start.checked_add(before.bytes)?;
        if end.checked_add(GAP_BYTES) == Some(self.next) {
            self.next = end;
        }
        self.alloc(bytes, is_taken)
    }

    /// The next window of `bytes` bytes, whole pages, that `is_taken` does not say is taken. None
    /// if all of them are, or there is no room for such a one at all.
    pub(super) fn alloc(
        &mut self,
        bytes: u64,
        is_taken: impl Fn(&Window) -> Option<Window>,
    ) -> Option<Window> {
        let mut wrapped = false;
        loop {
            let end = self.next.checked_add(bytes)?;
            if end > self.end {
                if wrapped {
                    return None;
                }
                wrapped = true;
                self.next = FIRST;
                continue;
            }
            let window = Window {
                start: self.next,
                bytes,
            };
            match is_taken(&window) {
                Some(taken) => self.next = taken.start.checked_add(taken.bytes)?,
                None => {
                    self.next = end.checked_add(GAP_BYTES)?;
                    return Some(window);
                }
            }
            self.next = self.next.checked_add(GAP_BYTES)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_behind_the_last_one_touches_it() {
        let mut windows = Windows::new();
        windows.end = FIRST + 8 * 4096;
        let free = |_: &Window| None;
        let first = windows.alloc(4096, free).unwrap();
        let second = windows.alloc_after(&first, 2 * 4096, free).unwrap();
        assert_eq!(second.start, FIRST + 4096);
        // Not the last one any more.
        let third = windows.alloc_after(&first, 4096, free).unwrap();
        assert_eq!(third.start, FIRST + 4 * 4096);
        // No room behind it, and what comes first is taken.
        let over = |window: &Window| (window.start == FIRST).then_some(first);
        let around = windows.alloc_after(&third, 4 * 4096, over).unwrap();
        assert_eq!(around.start, FIRST + 2 * 4096);
    }

    #[test]
    fn windows_come_in_turn_and_around_those_that_are_taken() {
        let mut windows = Windows::new();
        windows.end = FIRST + 16 * 4096;
        let free = |_: &Window| None;
        let first = windows.alloc(4096, free).unwrap();
        let second = windows.alloc(2 * 4096, free).unwrap();
        assert_eq!(first.start, FIRST);
        assert_eq!(second.start, FIRST + 2 * 4096, "a gap between");
        let third = windows.alloc(8 * 4096, free).unwrap();
        assert_eq!(third.start, FIRST + 5 * 4096);
        let over = |window: &Window| {
            let end = |w: &Window| w.start + w.bytes;
            (window.start < end(&second) && second.start < end(window)).then_some(second)
        };
        let around = windows.alloc(4 * 4096, over).unwrap();
        assert_eq!(around.start, FIRST + 5 * 4096, "begun anew, and around");
        assert_eq!(windows.alloc(17 * 4096, free), None, "larger than all");
        assert_eq!(windows.alloc(u64::MAX, free), None);
    }
}
