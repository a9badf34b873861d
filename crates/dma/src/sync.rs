//! Transfers of a live mapping between the CPU and the device, and unmaps of buffers that the
//! device filled in part.
//!
//! They copy bytes if the device uses a copy of the buffer: a bounce slot, or the shadow of a
//! [`ShadowSpace`](crate::space::ShadowSpace). Otherwise the device uses the buffer itself, and
//! they only check their arguments.

use core::fmt;

use ringfence_types::IovaRange;

use crate::bounce_pool::{Part, copy_in, copy_out};
use crate::flush::FlushPolicy;
use crate::space::Space;
use crate::token::{Attachment, LiveMapping, Mapping};
use crate::{Cpu, Dma, Platform, SgMapping, UnmapError, UnmapReason};

/// A part that lies outside its mapping. Nothing was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct OutsideMapping {
    pub part: IovaRange,
    pub mapping: IovaRange,
}

impl fmt::Display for OutsideMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lies outside the mapping {}", self.part, self.mapping)
    }
}

impl core::error::Error for OutsideMapping {}

/// Returns the offset and the length of `part` in `mapping`.
fn part_of(mapping: IovaRange, part: IovaRange) -> Result<Part, OutsideMapping> {
    let offset = part.start().offset_from(&mapping.start());
    match offset.filter(|_| mapping.contains(&part)) {
        Some(offset) => Ok(Part {
            offset,
            bytes: part.bytes(),
        }),
        None => Err(OutsideMapping { part, mapping }),
    }
}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Transfers a live mapping to the CPU, which then reads the data that the device wrote. Each
    /// byte of a shadow is copied once: a later unmap does not copy it again, so that the device
    /// cannot change what the driver has examined.
    pub fn sync_for_cpu<P: Platform>(&self, platform: &P, mapping: &Mapping<B>) {
        let range = mapping.range();
        self.copy_for_cpu(platform, &mapping.live, range);
        if let Some(slot) = &mapping.bounce {
            copy_out(platform.memory(), slot, mapping.direction(), slot.whole());
        }
    }

    /// Transfers a live mapping to the device, which then reads the data that the CPU wrote.
    pub fn sync_for_device<P: Platform>(&self, platform: &P, mapping: &Mapping<B>) {
        let range = mapping.range();
        self.copy_for_device(platform, &mapping.live, range);
        if let Some(slot) = &mapping.bounce {
            copy_in(platform.memory(), slot, mapping.direction(), slot.whole());
        }
    }

    /// Like [`sync_for_cpu`](Self::sync_for_cpu), for `part` of the mapping. The layer keeps one
    /// synced part of each mapping: it also copies the bytes between an earlier part and this one.
    ///
    /// # Errors
    /// The part lies outside the mapping.
    pub fn sync_part_for_cpu<P: Platform>(
        &self,
        platform: &P,
        mapping: &Mapping<B>,
        part: IovaRange,
    ) -> Result<(), OutsideMapping> {
        let inside = part_of(mapping.range(), part)?;
        self.copy_for_cpu(platform, &mapping.live, part);
        if let Some(slot) = &mapping.bounce {
            copy_out(platform.memory(), slot, mapping.direction(), inside);
        }
        Ok(())
    }

    /// Like [`sync_for_device`](Self::sync_for_device), for `part` of the mapping. If the part
    /// begins inside the synced part of the mapping, all later bytes of that part belong to the
    /// device again, too. The layer does not copy them: an unmap replaces what the CPU has written
    /// there.
    ///
    /// # Errors
    /// The part lies outside the mapping.
    pub fn sync_part_for_device<P: Platform>(
        &self,
        platform: &P,
        mapping: &Mapping<B>,
        part: IovaRange,
    ) -> Result<(), OutsideMapping> {
        let inside = part_of(mapping.range(), part)?;
        self.copy_for_device(platform, &mapping.live, part);
        if let Some(slot) = &mapping.bounce {
            copy_in(platform.memory(), slot, mapping.direction(), inside);
        }
        Ok(())
    }

    /// Like [`sync_for_cpu`](Self::sync_for_cpu), for a list.
    pub fn sync_sg_for_cpu<P: Platform>(&self, platform: &P, mapping: &SgMapping<B>) {
        if let Some(range) = mapping.range() {
            self.copy_for_cpu(platform, &mapping.live, range);
        }
        for slot in &mapping.bounced {
            copy_out(platform.memory(), slot, mapping.direction(), slot.whole());
        }
    }

    /// Like [`sync_for_device`](Self::sync_for_device), for a list.
    pub fn sync_sg_for_device<P: Platform>(&self, platform: &P, mapping: &SgMapping<B>) {
        if let Some(range) = mapping.range() {
            self.copy_for_device(platform, &mapping.live, range);
        }
        for slot in &mapping.bounced {
            copy_in(platform.memory(), slot, mapping.direction(), slot.whole());
        }
    }

    fn copy_for_cpu<P: Platform>(&self, platform: &P, live: &LiveMapping<B>, part: IovaRange) {
        if let Some(space) = self.domains.space_of(live.domain_handle) {
            space.sync_for_cpu(platform, live.range, part);
        }
    }

    fn copy_for_device<P: Platform>(&self, platform: &P, live: &LiveMapping<B>, part: IovaRange) {
        if let Some(space) = self.domains.space_of(live.domain_handle) {
            space.sync_for_device(platform, live.range, part);
        }
    }

    /// Unmaps a buffer of which the device wrote the first `received` bytes, as its completion
    /// reports. A space with shadows copies only these bytes, so the other bytes of the buffer keep
    /// their values.
    ///
    /// # Errors
    /// As for [`unmap_single`](Self::unmap_single), and [`UnmapReason::TooManyReceived`].
    #[inline]
    pub fn unmap_received<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: Mapping<B>,
        received: u64,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let range = mapping.range();
        if received > range.bytes() {
            return Err(too_many(at, mapping.live, received));
        }
        let space = self
            .space(at)
            .filter(|_| mapping.live.domain_handle == at.domain_handle);
        let Some(space) = space else {
            return self.unmap_single(cpu, platform, at, mapping);
        };
        // All bytes are copied unless the space is told otherwise.
        if received < range.bytes() {
            space.set_received(range, received);
        }
        let result = self.unmap_single(cpu, platform, at, mapping);
        if result.is_err() {
            // A rejected unmap changes nothing: the next one copies all bytes again.
            space.set_received(range, u64::MAX);
        }
        result
    }
}

#[cold]
fn too_many<B>(at: &Attachment, live: LiveMapping<B>, received: u64) -> UnmapError<B> {
    UnmapError {
        device: at.device,
        range: live.range,
        reason: UnmapReason::TooManyReceived(received, live.into_still_mapped()),
    }
}
