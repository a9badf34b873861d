//! A little work for each core crate: `None` if it came out wrong.

use ringfence_dma as _;
use ringfence_hw as _;
use ringfence_iova as _;
use ringfence_pgtable as _;
use ringfence_types::{PageSize, Pfn, PfnRange};

/// One part a crate, in the order of the layers.
pub(crate) const ALL: &[fn() -> Option<()>] = &[types];

fn ensure(condition: bool) -> Option<()> {
    condition.then_some(())
}

fn types() -> Option<()> {
    let range = PfnRange::new(Pfn::new(1), 2)?;
    ensure(range.iovas().bytes() == 2 * PageSize::Size4K.bytes())
}
