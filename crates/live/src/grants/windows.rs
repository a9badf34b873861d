//! Allocator of window addresses: the addresses in the process at which granted pages are
//! mapped.

/// First address of the first window. Position-independent programs, their heaps, libraries and
/// stacks lie above [`END`], other programs below `FIRST`.
pub const FIRST: u64 = 1 << 44;
/// End of the windows, exclusive.
pub const END: u64 = 5 << 44;
/// Gap between windows, except between those that one call maps. A read past the end of a buffer
/// then faults.
const GAP_BYTES: u64 = 4096;

/// A range of addresses in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantWindow {
    /// First address of the window in the process.
    pub start: u64,
    /// Length in bytes, a multiple of the page size.
    pub bytes: u64,
}

/// Allocates windows.
///
/// It reuses an address only after all others, 2^34 pages later. A device thread that was preempted
/// after a translation would otherwise access pages of a new grant. Instead it faults.
#[derive(Debug)]
pub(super) struct GrantWindows {
    next: u64,
    end: u64,
}

impl GrantWindows {
    pub(super) fn new() -> Self {
        Self {
            next: FIRST,
            end: END,
        }
    }

    /// Like [`alloc`](Self::alloc), but directly behind `before` if that was allocated last.
    pub(super) fn alloc_after(
        &mut self,
        before: &GrantWindow,
        bytes: u64,
        is_taken: impl Fn(&GrantWindow) -> Option<GrantWindow>,
    ) -> Option<GrantWindow> {
        let end = before.start.checked_add(before.bytes)?;
        if end.checked_add(GAP_BYTES) == Some(self.next) {
            self.next = end;
        }
        self.alloc(bytes, is_taken)
    }

    /// Returns the next window of `bytes` bytes, whole pages, that overlaps no live one. `is_taken`
    /// returns a live window that overlaps its argument. `None` if no room remains.
    pub(super) fn alloc(
        &mut self,
        bytes: u64,
        is_taken: impl Fn(&GrantWindow) -> Option<GrantWindow>,
    ) -> Option<GrantWindow> {
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
            let window = GrantWindow {
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
        let mut windows = GrantWindows::new();
        windows.end = FIRST + 8 * 4096;
        let free = |_: &GrantWindow| None;
        let first = windows.alloc(4096, free).unwrap();
        let second = windows.alloc_after(&first, 2 * 4096, free).unwrap();
        assert_eq!(second.start, FIRST + 4096);
        // `first` is not the last allocation any more.
        let third = windows.alloc_after(&first, 4096, free).unwrap();
        assert_eq!(third.start, FIRST + 4 * 4096);
        // No room remains behind `third`, and `first` occupies the start.
        let over = |window: &GrantWindow| (window.start == FIRST).then_some(first);
        let around = windows.alloc_after(&third, 4 * 4096, over).unwrap();
        assert_eq!(around.start, FIRST + 2 * 4096);
    }

    #[test]
    fn windows_come_in_turn_and_around_those_that_are_taken() {
        let mut windows = GrantWindows::new();
        windows.end = FIRST + 16 * 4096;
        let free = |_: &GrantWindow| None;
        let first = windows.alloc(4096, free).unwrap();
        let second = windows.alloc(2 * 4096, free).unwrap();
        assert_eq!(first.start, FIRST);
        assert_eq!(second.start, FIRST + 2 * 4096, "a gap between");
        let third = windows.alloc(8 * 4096, free).unwrap();
        assert_eq!(third.start, FIRST + 5 * 4096);
        let over = |window: &GrantWindow| {
            let end = |w: &GrantWindow| w.start + w.bytes;
            (window.start < end(&second) && second.start < end(window)).then_some(second)
        };
        let around = windows.alloc(4 * 4096, over).unwrap();
        assert_eq!(around.start, FIRST + 5 * 4096, "begun anew, and around");
        assert_eq!(windows.alloc(17 * 4096, free), None, "larger than all");
        assert_eq!(windows.alloc(u64::MAX, free), None);
    }
}
