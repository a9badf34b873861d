//! I/O virtual addresses equal to physical addresses: pass-through in hardware (HWpt), or a table
//! that maps all memory to itself (SWpt).
//!
//! This is not an [`IovaAllocator`](crate::IovaAllocator). An identity address depends on the
//! buffer, not on free space. Two live mappings of a page share one address, and freeing one frees
//! nothing. No method of the trait could keep its contract. Only a limit check remains.

use ringfence_types::{Iova, IovaRange, Pfn, PhysRange};

use crate::AllocError;

/// Returns the addresses of `buffer` for a device whose highest reachable page is `limit`.
///
/// # Errors
/// [`AllocError::Exhausted`] if the device does not reach the whole buffer. Retrying cannot
/// succeed.
#[inline]
pub fn identity(buffer: PhysRange, limit: Pfn) -> Result<IovaRange, AllocError> {
    let (start, last) = (
        Iova::new(buffer.start().get()),
        Iova::new(buffer.last().get()),
    );
    match IovaRange::inclusive(start, last) {
        Some(range) if Pfn::containing(last) <= limit => Ok(range),
        _ => Err(AllocError::Exhausted {
            pages: buffer.pages(ringfence_types::PageSize::Size4K),
            limit,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::PhysAddr;

    #[test]
    fn is_the_buffer_or_nothing() {
        let cases = [
            (0x0, 1, 0, Ok(())),
            (0xfff, 1, 0, Ok(())),
            (0xfff, 2, 0, Err(2)),
            (0xffff_f000, 0x1000, 0xf_ffff, Ok(())),
            (0x1_0000_0000, 1, 0xf_ffff, Err(1)),
            (u64::MAX, 1, Pfn::MAX.get(), Ok(())),
        ];
        for (start, bytes, limit, expected) in cases {
            let buffer = PhysRange::new(PhysAddr::new(start), bytes).unwrap();
            let limit = Pfn::new(limit);
            let expected = match expected {
                Ok(()) => Ok(IovaRange::new(Iova::new(start), bytes).unwrap()),
                Err(pages) => Err(AllocError::Exhausted { pages, limit }),
            };
            assert_eq!(identity(buffer, limit), expected);
        }
    }
}
