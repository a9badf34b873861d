//! The ports `PhysMemory` and `FrameSource`: a block of RAM whose frames hold tables, the
//! invalidation queue and the device's buffer.

use core::arch::x86_64::{_mm_clflush, _mm_mfence};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringfence_types::{
    FrameSource, MemoryError, OutOfFrames, PhysAddr, PhysMemory, PhysRange, TABLE_WORDS,
};

const FRAME: u64 = 4096;
const LINE: u64 = 64;

/// The RAM for DMA. The program maps memory at its physical address, so the address of the static
/// is physical.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct Ram {
    frames: [[AtomicU64; TABLE_WORDS]; 64],
    /// One bit for each frame: it is in use.
    used: AtomicU64,
}

pub(crate) static RAM: Ram = Ram {
    frames: [const { [const { AtomicU64::new(0) }; TABLE_WORDS] }; 64],
    used: AtomicU64::new(0),
};

impl Ram {
    fn range(&self) -> PhysRange {
        let (start, bytes) = (self.frames.as_ptr().addr(), size_of_val(&self.frames));
        PhysRange::new(PhysAddr::new(start as u64), bytes as u64).expect("RAM is not empty")
    }

    fn offset(&self, at: PhysAddr) -> u64 {
        at.get().wrapping_sub(self.range().start().get())
    }
}

impl PhysMemory for Ram {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let word = self.words(at, 1)?.first();
        word.ok_or(MemoryError::Outside { at, words: 1 })
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(FRAME) {
            return Err(MemoryError::Misaligned { at });
        }
        let frame = self.frames.get((self.offset(at) / FRAME) as usize);
        frame.ok_or(MemoryError::Outside { at, words: 512 })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let first = (self.offset(at) / 8) as usize;
        let words = self.frames.as_flattened();
        let words = words.get(first..first.saturating_add(count));
        words.ok_or(MemoryError::Outside {
            at,
            words: count as u64,
        })
    }

    fn write_back(&self, at: PhysAddr, bytes: u64) {
        let lines = at.align_down(LINE).get()..at.get().saturating_add(bytes);
        for line in lines.step_by(LINE as usize) {
            if self.offset(PhysAddr::new(line)) < self.range().bytes() {
                // SAFETY: the line is memory of this program.
                unsafe { _mm_clflush(line as *const u8) };
            }
        }
    }

    fn drain(&self) {
        // SAFETY: every x86-64 CPU has the instruction.
        unsafe { _mm_mfence() };
    }
}

impl FrameSource for Ram {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let index = self.used.load(Relaxed).trailing_ones();
        let frame = self.frames.get(index as usize).ok_or(OutOfFrames)?;
        self.used.fetch_or(1 << index, Relaxed);
        frame.iter().for_each(|word| word.store(0, Relaxed));
        Ok(PhysAddr::new(frame.as_ptr().addr() as u64))
    }

    fn free(&self, frame: PhysAddr) {
        let index = self.offset(frame) / FRAME;
        self.used.fetch_and(!(1 << index), Relaxed);
    }
}

/// A frame that a device writes. The value owns the frame, so it is no copy.
#[derive(Debug)]
pub(crate) struct Buffer(PhysAddr);

impl Buffer {
    pub(crate) fn new() -> Result<Self, OutOfFrames> {
        RAM.alloc_zeroed().map(Self)
    }

    pub(crate) fn bytes(&self) -> PhysRange {
        PhysRange::new(self.0, FRAME).expect("a frame is not empty")
    }

    pub(crate) fn clear(&self) -> Result<(), MemoryError> {
        RAM.word(self.0).map(|word| word.store(0, Relaxed))
    }

    pub(crate) fn first_word(&self) -> Result<u64, MemoryError> {
        RAM.word(self.0).map(|word| word.load(Relaxed))
    }
}
