//! The lock that an embedder puts around what several processors share.

use core::cell::RefCell;

/// Exclusive access to a `T` that may be shared between processors.
///
/// A kernel implements it over its own spin lock, a user-space program over a mutex. `RefCell` is
/// the lock for a state used by one thread only: it is not `Sync`, so the compiler keeps it there.
pub trait Lock<T> {
    /// Runs `critical` with exclusive access. `critical` never takes the same lock again.
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R;
}

impl<T> Lock<T> for RefCell<T> {
    #[inline]
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        critical(&mut self.borrow_mut())
    }
}

#[cfg(feature = "std")]
impl<T> Lock<T> for std::sync::Mutex<T> {
    #[inline]
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        // A panic elsewhere leaves the value as that thread left it; the state is kept valid
        // between statements, so the poison flag carries no information here.
        critical(
            &mut self
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }
}
