//! Coherent memory: the layer allocates it and keeps it mapped for both directions until the driver
//! frees it.

use alloc::vec::Vec;

use ringfence_types::{Direction, FrameSource, InvalidationError, IovaRange, PhysAddr, PhysRange};

use crate::flush::FlushPolicy;
use crate::map::{Layout, MapArgs, map_error};
use crate::space::{GRANULE, Space};
use crate::token::{Attachment, ClearedRange, DomainHandle};
use crate::{Cpu, Dma, MapError, MapReason, Platform};

/// Memory shared with a device until it is freed: rings, completion queues, head registers.
#[must_use = "coherent memory that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct Coherent {
    range: IovaRange,
    domain_handle: DomainHandle,
    frames: Vec<PhysAddr>,
    /// Set if an earlier [`Dma::free_coherent`] cleared the entries and its invalidation failed.
    cleared: Option<ClearedRange>,
}

impl Coherent {
    /// Returns the mapped bytes of the I/O virtual address space, in whole pages.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Returns the 4 KiB frames in the order of their I/O virtual addresses.
    pub fn frames(&self) -> &[PhysAddr] {
        &self.frames
    }
}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Allocates `pages` zeroed pages and maps them at consecutive addresses. With a page table the
    /// frames need not be contiguous. In an identity space and in a ring the map succeeds only if
    /// they are.
    ///
    /// # Errors
    /// Nothing stays allocated, unless the reason is [`MapReason::RollbackFailed`].
    pub fn alloc_coherent<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        pages: usize,
    ) -> Result<Coherent, MapError> {
        let mut frames = Vec::new();
        let mut pieces = Vec::new();
        if pages == 0 {
            return Err(map_error(at, None, MapReason::Empty));
        }
        if frames.try_reserve_exact(pages).is_err() || pieces.try_reserve_exact(pages).is_err() {
            return Err(map_error(at, None, MapReason::OutOfMemory));
        }
        for _ in 0..pages {
            let frame = platform.frames().alloc_zeroed().ok();
            let piece = frame.and_then(|frame| PhysRange::new(frame, GRANULE.bytes()));
            match (frame, piece) {
                (Some(frame), Some(piece)) => {
                    frames.push(frame);
                    push_merged(&mut pieces, piece);
                }
                _ => {
                    free_frames(platform, &frames);
                    return Err(map_error(at, None, MapReason::OutOfMemory));
                }
            }
        }
        let args = MapArgs {
            pieces: &pieces,
            layout: Layout::BypassCache,
            direction: Direction::Bidirectional,
        };
        match self.map_common(cpu, platform, at, args) {
            Ok(mapped) => Ok(Coherent {
                range: mapped.range,
                domain_handle: at.domain_handle,
                frames,
                cleared: None,
            }),
            Err(reason) => {
                // Leak frames that a device may still reach.
                if !matches!(reason, MapReason::RollbackFailed(_)) {
                    free_frames(platform, &frames);
                }
                Err(map_error(at, pieces.first().copied(), reason))
            }
        }
    }

    /// Unmaps coherent memory, invalidates at once under every policy, and frees the pages.
    ///
    /// # Errors
    /// Returns the memory. The layer reuses neither pages nor addresses, because the device may
    /// still reach them. If the invalidation failed, the memory is no longer mapped, and another
    /// call retries the invalidation. For memory of a detached domain, the call only frees the
    /// pages.
    pub fn free_coherent<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mut memory: Coherent,
    ) -> Result<(), (FreeCoherentError, Coherent)> {
        self.refresh_if_stale(cpu);
        if self.domains.is_stale(memory.domain_handle) {
            free_frames(platform, &memory.frames);
            return Ok(());
        }
        let Some((space, space_cpu)) = self.space_and_cpu(&mut cpu.spaces, at) else {
            return Err((FreeCoherentError::NotMapped, memory));
        };
        if memory.domain_handle != at.domain_handle {
            return Err((FreeCoherentError::NotMapped, memory));
        }
        let invalidated = match memory.cleared.take() {
            None => {
                let Ok(result) = space.unmap(space_cpu, platform, memory.range) else {
                    return Err((FreeCoherentError::NotMapped, memory));
                };
                self.flush_ctx(&mut cpu.spaces, at.domain())
                    .iotlb_sync(result, platform)
            }
            Some(cleared) => self
                .flush_ctx(&mut cpu.spaces, at.domain())
                .invalidate_and_release(cleared, platform),
        };
        match invalidated {
            Ok(()) => {
                free_frames(platform, &memory.frames);
                Ok(())
            }
            Err((error, cleared)) => {
                memory.cleared = Some(cleared);
                Err((FreeCoherentError::NotFlushed(error), memory))
            }
        }
    }
}

/// The reason why coherent memory was not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FreeCoherentError {
    /// The memory is not mapped for this device.
    NotMapped,
    /// The invalidation failed.
    NotFlushed(InvalidationError),
}

impl core::fmt::Display for FreeCoherentError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NotMapped => f.write_str("not mapped for this device"),
            Self::NotFlushed(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for FreeCoherentError {}

/// Appends `piece` to the list, or extends the last piece if the two are adjacent. A ring maps one
/// piece per slot.
fn push_merged(pieces: &mut Vec<PhysRange>, piece: PhysRange) {
    if let Some(last) = pieces.last_mut()
        && last.last().checked_add(1) == Some(piece.start())
        && let Some(merged) = PhysRange::inclusive(last.start(), piece.last())
    {
        *last = merged;
    } else {
        pieces.push(piece);
    }
}

fn free_frames<P: Platform>(platform: &P, frames: &[PhysAddr]) {
    for frame in frames {
        platform.frames().free(*frame);
    }
}
