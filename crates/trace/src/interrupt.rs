//! Ends a read early.

use std::fmt;
use std::sync::Arc;

/// A function that readers call before each chunk, and replays between modes. If it returns true,
/// the read ends with [`TraceError::Interrupted`](crate::TraceError::Interrupted).
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// Creates the interrupt of the function `ended`, which must be quick.
    pub fn new(ended: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(ended))
    }

    /// Returns true if the read ends now.
    pub fn is_set(&self) -> bool {
        (self.0)()
    }
}

impl Default for Interrupt {
    /// An interrupt that is never set.
    fn default() -> Self {
        Self::new(|| false)
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt")
    }
}
