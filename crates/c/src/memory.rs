//! The port to the caller's memory, which holds the tables.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_pgtable::Coherency;
use ringfence_types::{
    FrameSource, MemoryError, OutOfFrames, PageSize, PhysAddr, PhysMemory, TABLE_WORDS,
};

use crate::Status;
use crate::boundary::SizeFirst;

/// The caller's memory. The callbacks must not call the library with the object that calls them,
/// must return, and, for a table that several threads use, must be safe on several threads.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory {
    /// The size of this structure. The caller sets it.
    pub size: usize,
    /// The first argument of the callbacks.
    pub context: *mut c_void,
    /// Returns a pointer to the `bytes` bytes at physical address `phys`, a multiple of 8. NULL if
    /// they are not all memory. The pointer is a multiple of 8 too. It stays valid until the object
    /// is destroyed, and the program accesses the bytes only atomically until then.
    pub address:
        Option<unsafe extern "C" fn(context: *mut c_void, phys: u64, bytes: u64) -> *mut c_void>,
    /// Stores the physical address of an unused frame in `*frame` and returns 0, or returns
    /// another number. A frame has 4096 bytes and their alignment. The library clears it.
    pub alloc_frame: Option<unsafe extern "C" fn(context: *mut c_void, frame: *mut u64) -> i32>,
    /// Takes a frame back. No walker reaches it any more.
    pub free_frame: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64)>,
    /// Writes the cache lines of the bytes back to memory. NULL if the IOMMU's walk snoops the
    /// caches of CPUs.
    pub write_back: Option<unsafe extern "C" fn(context: *mut c_void, phys: u64, bytes: u64)>,
    /// Orders all previous write-backs before every later store. NULL together with `write_back`.
    pub drain: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

type Address = unsafe extern "C" fn(*mut c_void, u64, u64) -> *mut c_void;
type AllocFrame = unsafe extern "C" fn(*mut c_void, *mut u64) -> i32;
type FreeFrame = unsafe extern "C" fn(*mut c_void, u64);
type WriteBack = unsafe extern "C" fn(*mut c_void, u64, u64);
type Drain = unsafe extern "C" fn(*mut c_void);

/// A [`Memory`] whose required callbacks exist.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallerMemory {
    context: *mut c_void,
    address: Address,
    alloc_frame: AllocFrame,
    free_frame: FreeFrame,
    non_coherent: Option<(WriteBack, Drain)>,
}

// SAFETY: the contract of `Memory` demands callbacks that any thread may call, and the library
// passes `context` to them without using it.
unsafe impl Send for CallerMemory {}
// SAFETY: the contract of `Memory` demands callbacks that several threads may call at once.
unsafe impl Sync for CallerMemory {}

// SAFETY: the first field is the size.
unsafe impl SizeFirst for Memory {}

impl Memory {
    /// Checks the callbacks.
    pub(crate) fn check(&self) -> Result<CallerMemory, Status> {
        let non_coherent = match (self.write_back, self.drain) {
            (None, None) => None,
            (Some(write_back), Some(drain)) => Some((write_back, drain)),
            _ => return Err(Status::NullPointer),
        };
        Ok(CallerMemory {
            context: self.context,
            address: self.address.ok_or(Status::NullPointer)?,
            alloc_frame: self.alloc_frame.ok_or(Status::NullPointer)?,
            free_frame: self.free_frame.ok_or(Status::NullPointer)?,
            non_coherent,
        })
    }
}

impl CallerMemory {
    pub(crate) fn coherency(&self) -> Coherency {
        match self.non_coherent {
            Some(_) => Coherency::NonCoherent,
            None => Coherency::Coherent,
        }
    }
}

impl PhysMemory for CallerMemory {
    #[inline]
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let words = self.words(at, 1)?;
        words.first().ok_or(MemoryError::Outside { at, words: 1 })
    }

    #[inline]
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(PageSize::Size4K.bytes()) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = self.words(at, TABLE_WORDS)?;
        words.first_chunk().ok_or(MemoryError::Outside {
            at,
            words: TABLE_WORDS as u64,
        })
    }

    #[inline]
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = count as u64;
        let outside = MemoryError::Outside { at, words };
        let bytes = count
            .checked_mul(8)
            .filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or(outside)? as u64;
        // SAFETY: the callback may be called with any address: its contract.
        let pointer = unsafe { (self.address)(self.context, at.get(), bytes) };
        let pointer = pointer.cast::<AtomicU64>();
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(outside);
        }
        // SAFETY: the contract of `address` gives `bytes` bytes that stay valid while `self` does,
        // and that the program accesses only atomically. The pointer is aligned and not NULL.
        Ok(unsafe { core::slice::from_raw_parts(pointer, count) })
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        if let Some((write_back, _)) = self.non_coherent {
            // SAFETY: the callback may be called with any address: its contract.
            unsafe { write_back(self.context, at.get(), bytes) };
        }
    }

    fn drain(&self) {
        if let Some((_, drain)) = self.non_coherent {
            // SAFETY: the callback has no precondition.
            unsafe { drain(self.context) };
        }
    }
}

impl FrameSource for CallerMemory {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut frame = 0;
        // SAFETY: `frame` is valid for one write during the call.
        if unsafe { (self.alloc_frame)(self.context, &raw mut frame) } != 0 {
            return Err(OutOfFrames);
        }
        let frame = PhysAddr::new(frame);
        // The caller's allocator is not trusted to clear frames: an old entry would be a mapping.
        match self.table(frame) {
            Ok(words) => words
                .iter()
                .for_each(|word| word.store(0, Ordering::Relaxed)),
            Err(_) => {
                self.free(frame);
                return Err(OutOfFrames);
            }
        }
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        // SAFETY: the frame came from `alloc_frame`, and no walker reaches it.
        unsafe { (self.free_frame)(self.context, frame.get()) };
    }
}
