//! The reverse translation cache (section 4.5): mappings that their driver has released and the host still holds, found again by page and
//! direction.
