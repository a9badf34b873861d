//! The lock that protects state shared between CPUs.

use core::cell::RefCell;

/// Exclusive access to a `T` that CPUs may share.
///
/// A kernel implements it with its spin lock, a user-space program with a mutex. Use `RefCell` for
/// state of one thread: `RefCell` is not `Sync`, so the compiler rejects sharing it.
pub trait Lock<T> {
    /// Runs `critical` with exclusive access. `critical` must not take the same lock again.
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
        // Ignore poisoning: the protected state is valid between any two statements, so a panic in
        // another thread leaves it usable.
        critical(
            &mut self
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }
}
