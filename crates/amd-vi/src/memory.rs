//! Memory of the tables and queues.

use ringfence_pgtable::{Coherency, TableMemory};

/// Bits of an address that registers and entries hold.
const ADDRESS_BITS: u32 = 52;

/// Returns the memory as the unit sees it. The unit snoops CPU caches.
pub(crate) const fn tables<M>(memory: &M) -> TableMemory<'_, M> {
    TableMemory::new(memory, Coherency::Coherent, ADDRESS_BITS)
}
