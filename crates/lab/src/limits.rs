//! Bounds on what one replay may ask for.

/// Bounds on one replay. [`Limits::default`] suits machines; a caller that trusts a larger trace
/// raises them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Devices that map memory. Every mode keeps tables for each.
    pub devices: usize,
    /// Buffers alive on one I/O virtual page, where a mode lets buffers share pages. Each access
    /// is judged against all of them.
    pub buffers_on_a_page: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            devices: 1024,
            buffers_on_a_page: 4096,
        }
    }
}
