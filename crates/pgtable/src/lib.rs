//! I/O page tables: walk, map and unmap written once over a format.
