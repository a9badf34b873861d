//! Copies from and to memory that other processes access at the same time.
//!
//! The front-end and the guest may write the memory during a copy. As vm-memory does for objects of
//! up to 8 bytes, these functions access it with volatile loads and stores of aligned units. The
//! compiler neither repeats nor splits one, so an aligned ring index or descriptor field is never
//! torn. vm-memory itself copies longer slices with `memcpy`, which may split units.

/// Returns the largest unit of at most 8 bytes to which `address` is aligned and that fits `bytes`.
#[inline]
fn unit(address: usize, bytes: usize) -> usize {
    let fits = |unit: &usize| address.is_multiple_of(*unit) && *unit <= bytes;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// Copies `bytes` bytes of shared memory to private memory.
///
/// # Safety
/// Both ranges have `bytes` bytes and do not overlap. `shared` is valid for volatile loads; other
/// processes may write it. Only this thread accesses `private`.
pub(crate) unsafe fn read_shared(shared: *const u8, private: *mut u8, bytes: usize) {
    let mut done = 0;
    while done < bytes {
        // SAFETY: `done` is less than `bytes`, and both ranges have `bytes` bytes.
        let (from, to) = unsafe { (shared.add(done), private.add(done)) };
        let unit = unit(from.addr(), bytes - done);
        // SAFETY: `unit` bytes remain, and `from` is aligned to them. `to` may not be.
        unsafe {
            match unit {
                8 => to
                    .cast::<u64>()
                    .write_unaligned(from.cast::<u64>().read_volatile()),
                4 => to
                    .cast::<u32>()
                    .write_unaligned(from.cast::<u32>().read_volatile()),
                2 => to
                    .cast::<u16>()
                    .write_unaligned(from.cast::<u16>().read_volatile()),
                _ => to.write(from.read_volatile()),
            }
        }
        done += unit;
    }
}

/// Copies `bytes` bytes of private memory to shared memory.
///
/// # Safety
/// As for [`read_shared`], with `shared` valid for volatile stores.
pub(crate) unsafe fn write_shared(private: *const u8, shared: *mut u8, bytes: usize) {
    let mut done = 0;
    while done < bytes {
        // SAFETY: `done` is less than `bytes`, and both ranges have `bytes` bytes.
        let (from, to) = unsafe { (private.add(done), shared.add(done)) };
        let unit = unit(to.addr(), bytes - done);
        // SAFETY: `unit` bytes remain, and `to` is aligned to them. `from` may not be.
        unsafe {
            match unit {
                8 => to
                    .cast::<u64>()
                    .write_volatile(from.cast::<u64>().read_unaligned()),
                4 => to
                    .cast::<u32>()
                    .write_volatile(from.cast::<u32>().read_unaligned()),
                2 => to
                    .cast::<u16>()
                    .write_volatile(from.cast::<u16>().read_unaligned()),
                _ => to.write_volatile(from.read()),
            }
        }
        done += unit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_and_length_is_copied_exactly() {
        let source: Vec<u8> = (1..=40).collect();
        for (from, to) in (0..9).flat_map(|from| (0..9).map(move |to| (from, to))) {
            for bytes in 0..=31 {
                for copy in [
                    read_shared as unsafe fn(*const u8, *mut u8, usize),
                    write_shared,
                ] {
                    let mut target = [0; 41];
                    // SAFETY: both have 8 + 31 bytes.
                    unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), bytes) };
                    assert_eq!(target[to..to + bytes], source[from..from + bytes]);
                    assert!(target[..to].iter().all(|byte| *byte == 0));
                    assert!(target[to + bytes..].iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    #[test]
    fn one_access_covers_each_aligned_unit() {
        for (start, bytes) in (0..16).flat_map(|start| (0..32).map(move |bytes| (start, bytes))) {
            let mut accesses = Vec::new();
            let mut done = 0;
            while done < bytes {
                let unit = unit(start + done, bytes - done);
                accesses.push(start + done..start + done + unit);
                done += unit;
            }
            for size in [1, 2, 4, 8] {
                let units = (start..start + bytes).filter(|at| at % size == 0);
                for at in units.filter(|at| at + size <= start + bytes) {
                    let whole = |access: &core::ops::Range<usize>| {
                        access.start <= at && at + size <= access.end
                    };
                    assert!(accesses.iter().any(whole), "{size} bytes at {at}");
                }
            }
        }
    }
}
