//! The boundary: no panic leaves the library, and pointers become references.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::Status;

/// Runs a call of the interface. A panic becomes [`Status::Internal`].
///
/// A panic below the lock of a layer or an IOTLB poisons it, so later calls fail too. The other
/// objects have no such lock: every statement leaves their state consistent.
#[inline]
pub(crate) fn boundary(call: impl FnOnce() -> Result<Status, Status>) -> Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(status) | Err(status)) => status,
        Err(_) => Status::Internal,
    }
}

/// Returns the object at `pointer`.
///
/// # Safety
/// `pointer` is NULL, or points to a `T` that no call changes or frees during `'a`.
#[inline]
pub(crate) unsafe fn object<'a, T>(pointer: *const T) -> Result<&'a T, Status> {
    // SAFETY: the caller guarantees a live object, or NULL, which `as_ref` detects.
    unsafe { pointer.as_ref() }.ok_or(Status::NullPointer)
}

/// Returns the object at `pointer`, for changes.
///
/// # Safety
/// `pointer` is NULL, or points to a `T` that no other call uses during `'a`.
#[inline]
pub(crate) unsafe fn exclusive<'a, T>(pointer: *mut T) -> Result<&'a mut T, Status> {
    // SAFETY: the caller guarantees exclusive use of a live object, or NULL.
    unsafe { pointer.as_mut() }.ok_or(Status::NullPointer)
}

/// A structure of the interface that begins with its size.
///
/// # Safety
/// The first field is a `usize`, and every bit pattern of it is valid.
pub(crate) unsafe trait SizeFirst {}

/// Checks the size of the caller's structure, and only then refers to all of it.
///
/// # Safety
/// `pointer` is NULL, or points to a `usize`. If that is the size of a `T`, it points to a `T` that
/// no call changes or frees during `'a`.
#[inline]
pub(crate) unsafe fn sized<'a, T: SizeFirst>(pointer: *const T) -> Result<&'a T, Status> {
    // SAFETY: the caller guarantees a `usize`, or NULL. The first field of a `T` is one.
    if *unsafe { object(pointer.cast::<usize>()) }? != size_of::<T>() {
        return Err(Status::StructSize);
    }
    // SAFETY: the size is that of a `T`, so the caller guarantees one.
    unsafe { object(pointer) }
}

/// Returns the variant of an enum whose number is `number`.
#[inline]
pub(crate) fn numbered<T: Copy, const N: usize>(
    all: [T; N],
    number_of: impl Fn(T) -> u32,
    number: u32,
) -> Result<T, Status> {
    let found = all.into_iter().find(|each| number_of(*each) == number);
    found.ok_or(Status::InvalidArgument)
}

/// Pointer to the memory for a result, which need not be initialised.
#[derive(Debug)]
pub(crate) struct Output<T>(*mut T);

impl<T> Output<T> {
    /// Wraps the caller's pointer. Called before any other step, so that a NULL changes nothing.
    ///
    /// # Safety
    /// `pointer` is NULL, or valid for one write of a `T` until the end of the call.
    #[inline]
    pub(crate) unsafe fn new(pointer: *mut T) -> Result<Self, Status> {
        if pointer.is_null() {
            return Err(Status::NullPointer);
        }
        Ok(Self(pointer))
    }

    /// Like [`new`](Self::new), for a result that the caller may not want.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub(crate) unsafe fn optional(pointer: *mut T) -> Option<Self> {
        // SAFETY: the caller's guarantee is the same.
        unsafe { Self::new(pointer) }.ok()
    }

    /// Stores the result.
    #[inline]
    pub(crate) fn set(self, value: T) {
        // SAFETY: `new` received a pointer that is valid for one write, and is not NULL.
        unsafe { self.0.write(value) };
    }
}

/// Moves the object out of the caller's variable, and sets the variable to NULL. `None` if it is
/// NULL already: like `free`, a second destroy does nothing.
///
/// # Safety
/// `variable` is NULL or points to a pointer. That is NULL or came from [`into_handle`]. No other
/// call uses the object during this one or later.
pub(crate) unsafe fn take<T>(variable: *mut *mut T) -> Result<Option<Box<T>>, Status> {
    // SAFETY: the caller guarantees a valid variable.
    let variable = unsafe { exclusive(variable) }?;
    let pointer = core::mem::replace(variable, core::ptr::null_mut());
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the pointer came from `Box::into_raw`, and only this call frees it.
    Ok(Some(unsafe { Box::from_raw(pointer) }))
}

/// Returns the handle of a new object.
pub(crate) fn into_handle<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Enters an object that calls callbacks. Never waits: a callback that calls its own object would
/// wait for itself.
pub(crate) fn enter<T>(lock: &Mutex<T>) -> Result<MutexGuard<'_, T>, Status> {
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => Status::Busy,
        TryLockError::Poisoned(_) => Status::Internal,
    })
}

/// Enters an object that calls no callback: waits for the other threads.
pub(crate) fn wait<T>(lock: &Mutex<T>) -> Result<MutexGuard<'_, T>, Status> {
    lock.lock().map_err(|_| Status::Internal)
}

/// Enters an object to destroy it, poisoned or not.
///
/// # Errors
/// [`Status::Busy`] if another call is in the object. The program broke the contract of destroy;
/// the object stays.
pub(crate) fn enter_last<T>(lock: &Mutex<T>) -> Result<MutexGuard<'_, T>, Status> {
    match lock.try_lock() {
        Ok(entered) => Ok(entered),
        Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
        Err(TryLockError::WouldBlock) => Err(Status::Busy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_stays_inside_and_ends_the_object() {
        let object = Mutex::new(0);
        let call = || {
            let _entered = enter(&object)?;
            panic!("inside")
        };
        assert_eq!(boundary(call), Status::Internal);
        assert_eq!(enter(&object).err(), Some(Status::Internal));
        assert_eq!(wait(&object).err(), Some(Status::Internal));
        assert!(enter_last(&object).is_ok(), "destroy accepts the object");
    }

    #[test]
    fn an_object_in_use_is_busy() {
        let object = Mutex::new(0);
        let entered = enter(&object);
        assert_eq!(enter(&object).err(), Some(Status::Busy));
        assert_eq!(enter_last(&object).err(), Some(Status::Busy));
        drop(entered);
        assert!(enter(&object).is_ok());
    }
}
