//! The I/O virtual address is the physical address: pass-through by the hardware (HWpt) or by a
//! table that maps all of memory to itself (SWpt).
//!
//! Not an [`IovaAllocator`](crate::IovaAllocator): an identity address follows from the buffer, not
//! from what is free; two live mappings of one page share it, and freeing it frees nothing. The
//! role would have to lie in each of its methods. What remains is a check.

use ringfence_types::{Iova, IovaRange, Pfn, PhysRange};

use crate::AllocError;

/// The addresses under which a device whose highest page is `limit` sees `buffer`.
///
/// # Errors
/// [`AllocError::Exhausted`] if the device does not reach the whole buffer; no state could change
/// that.
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
        for (start, bytes, limit, wanted) in cases {
            let buffer = PhysRange::new(PhysAddr::new(start), bytes).unwrap();
            let limit = Pfn::new(limit);
            let wanted = match wanted {
                Ok(()) => Ok(IovaRange::new(Iova::new(start), bytes).unwrap()),
                Err(pages) => Err(AllocError::Exhausted { pages, limit }),
            };
            assert_eq!(identity(buffer, limit), wanted);
        }
    }
}
