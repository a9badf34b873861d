//! Physical memory in a private mapping that the host backs on first write.

use core::sync::atomic::AtomicU64;

use ringfence_types::{MemoryError, PageSize, PhysAddr, PhysMemory, TABLE_WORDS};

use crate::WriteBack;
use crate::device_view::DeviceView;
use crate::line::LINE;
use crate::mmap_region::MmapRegion;

/// Physical memory from address 0, backed only where it was written. Other memory reads as zero.
///
/// Tables and buffers share an arena. To separate them, give [`Frames`](crate::Frames) a range
/// above the buffers.
#[derive(Debug)]
pub struct Arena {
    mapping: MmapRegion,
    bytes: u64,
    write_back: WriteBack,
    device_view: Option<Box<DeviceView>>,
}

impl Arena {
    /// Creates an arena of `bytes` bytes that writes lines back by the host's best instruction.
    ///
    /// # Errors
    /// As for [`with_write_back`](Self::with_write_back).
    pub fn new(bytes: u64) -> Result<Self, ArenaError> {
        // Query the CPU once: under a hypervisor CPUID takes microseconds.
        Self::map(bytes, WriteBack::best())
    }

    /// Creates an arena of `bytes` bytes that writes lines back by the given instruction.
    ///
    /// # Errors
    /// [`ArenaError`]: the size is zero, not a multiple of 4 KiB, or more than the host maps, or
    /// the host lacks the instruction.
    pub fn with_write_back(bytes: u64, write_back: WriteBack) -> Result<Self, ArenaError> {
        if !write_back.is_available() {
            return Err(ArenaError::NoSuchInstruction(write_back));
        }
        Self::map(bytes, write_back)
    }

    /// Creates an arena of `bytes` bytes whose devices do not snoop: they see its
    /// [`device_view`](Self::device_view).
    ///
    /// # Errors
    /// As for [`with_write_back`](Self::with_write_back).
    pub fn with_device_view(bytes: u64) -> Result<Self, ArenaError> {
        let view = Self::map(bytes, WriteBack::FenceOnly)?;
        Ok(Self {
            device_view: Some(Box::new(DeviceView::new(view))),
            ..Self::map(bytes, WriteBack::FenceOnly)?
        })
    }

    fn map(bytes: u64, write_back: WriteBack) -> Result<Self, ArenaError> {
        if bytes == 0 || !bytes.is_multiple_of(PageSize::Size4K.bytes()) {
            return Err(ArenaError::BadSize { bytes });
        }
        let length = usize::try_from(bytes).map_err(|_| ArenaError::BadSize { bytes })?;
        let mapping = MmapRegion::new(length).map_err(|errno| ArenaError::Refused {
            bytes,
            errno: errno.raw_os_error(),
        })?;
        Ok(Self {
            mapping,
            bytes,
            write_back,
            device_view: None,
        })
    }

    /// Returns the size in bytes; all addresses below it exist.
    #[inline]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the instruction that writes lines back.
    #[inline]
    pub const fn write_back_kind(&self) -> WriteBack {
        self.write_back
    }

    /// Returns the memory that devices see; `None` if they snoop.
    #[inline]
    pub fn device_view(&self) -> Option<&DeviceView> {
        self.device_view.as_deref()
    }

    /// Returns the index of the word at `at`, a multiple of `align` bytes. The word may lie outside
    /// the arena.
    #[inline]
    fn index(at: PhysAddr, align: u64) -> Result<usize, MemoryError> {
        if !at.is_aligned(align) {
            return Err(MemoryError::Misaligned { at });
        }
        // On a host with narrower pointers, such an index lies outside every arena.
        Ok(usize::try_from(at.get() / 8).unwrap_or(usize::MAX))
    }

    /// Returns the error of a copy that leaves the arena.
    #[cfg(target_arch = "x86_64")]
    #[cold]
    fn outside(&self, from: PhysAddr, to: PhysAddr, bytes: u64) -> MemoryError {
        let end = from.get().checked_add(bytes);
        MemoryError::Outside {
            at: if end.is_some_and(|end| end <= self.bytes) {
                to
            } else {
                from
            },
            words: bytes.div_ceil(8),
        }
    }
}

impl PhysMemory for Arena {
    #[inline]
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.mapping.word(at.get()).ok_or_else(|| {
            if at.is_aligned(8) {
                MemoryError::Outside { at, words: 1 }
            } else {
                MemoryError::Misaligned { at }
            }
        })
    }

    #[inline]
    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        let words = TABLE_WORDS as u64;
        let index = Self::index(at, PageSize::Size4K.bytes())?;
        self.mapping
            .words()
            .get(index..)
            .and_then(<[AtomicU64]>::first_chunk)
            .ok_or(MemoryError::Outside { at, words })
    }

    #[inline]
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        let words = count as u64;
        if count == 0 && at.is_aligned(8) {
            return Ok(&[]);
        }
        let index = Self::index(at, 8)?;
        self.mapping
            .words()
            .get(index..)
            .and_then(|rest| rest.get(..count))
            .ok_or(MemoryError::Outside { at, words })
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn copy_bytes(&self, from: PhysAddr, to: PhysAddr, bytes: u64) -> Result<(), MemoryError> {
        if from.offset_in(8) != to.offset_in(8) {
            return Err(MemoryError::Misaligned { at: to });
        }
        if self.mapping.copy(from.get(), to.get(), bytes) {
            Ok(())
        } else {
            Err(self.outside(from, to, bytes))
        }
    }

    #[inline]
    fn write_back(&self, at: PhysAddr, bytes: u64) {
        if bytes == 0 || at.get() >= self.bytes {
            return;
        }
        let last = at.get().saturating_add(bytes - 1).min(self.bytes - 1);
        let words = self.mapping.words();
        let mut line = at.get() & !(LINE - 1);
        while line <= last {
            if let Some(word) = words.get((line / 8) as usize) {
                self.write_back.line(word.as_ptr().cast());
            }
            line += LINE;
        }
        if let Some(view) = &self.device_view {
            for line in (at.get() & !(LINE - 1)..=last).step_by(LINE as usize) {
                view.stage(line, words.get((line / 8) as usize..).unwrap_or_default());
            }
        }
    }

    #[inline]
    fn drain(&self) {
        self.write_back.drain();
        if let Some(view) = &self.device_view {
            view.publish();
        }
    }

    #[inline]
    fn prefetch(&self, at: PhysAddr) {
        if let Some(word) = self.mapping.word(at.get() & !(LINE - 1)) {
            WriteBack::prefetch(word.as_ptr().cast());
        }
    }
}

/// The reason why an arena cannot be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The size is zero, not a multiple of 4 KiB, or more than the host can address.
    #[error(
        "invalid arena size {bytes}: expected a non-zero multiple of 4096 that this host can \
        address"
    )]
    BadSize {
        /// Requested size in bytes.
        bytes: u64,
    },
    /// The host refused to map that much.
    #[error(
        "cannot map {bytes} bytes: {}; allow memory overcommit or use a smaller arena",
        std::io::Error::from_raw_os_error(*errno)
    )]
    Refused {
        /// Requested size in bytes.
        bytes: u64,
        /// The host's error number.
        errno: i32,
    },
    /// The host lacks the instruction.
    #[error("this CPU lacks {0}")]
    NoSuchInstruction(WriteBack),
}
