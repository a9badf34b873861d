//! Requests in two steps: reserve addresses, link pieces one by one, make them visible once.
//!
//! Linux 6.16 has this interface (`dma_iova_try_alloc`, `dma_iova_link`, `dma_iova_sync`,
//! `dma_iova_destroy` in `drivers/iommu/dma-iommu.c`). A driver that learns the pieces of a request
//! one after the other needs no scatterlist. The whole request takes one range of addresses, one
//! write-back of table entries, and one invalidation at its end.

use ringfence_types::{Direction, IovaRange, Pfn, PfnRange, PhysRange};

use crate::flush::{FlushPolicy, OpenBursts};
use crate::map::{AllocRetries, map_error};
use crate::space::{GRANULE, LinkSpace, Space};
use crate::token::{Attachment, LiveMapping};
use crate::{Cpu, Dma, MapError, MapReason, Platform, UnmapError, UnmapReason};

/// The addresses of one request, with the pieces that are linked so far. It owns the driver's
/// `buffer`, which stands for the memory of all pieces. Dropping it leaks the buffer and the
/// addresses, because the device may reach linked pieces.
#[must_use = "a request that is dropped stays reachable by the device for ever"]
#[derive(Debug)]
pub struct LinkedRequest<B> {
    live: LiveMapping<B>,
    reserved: PfnRange,
    /// Linked pages, from the start of the range.
    linked: u64,
    /// Linked pages that the device may use.
    visible: u64,
}

impl<B> LinkedRequest<B> {
    /// Returns the reserved addresses.
    pub fn reserved(&self) -> PfnRange {
        self.reserved
    }

    /// Returns the number of pages that further pieces can take.
    pub fn room(&self) -> u64 {
        self.reserved.pages() - self.linked
    }

    /// Returns true if all linked pieces are visible to the device.
    pub fn is_synced(&self) -> bool {
        self.visible == self.linked
    }

    fn pages(&self) -> Option<PfnRange> {
        PfnRange::new(self.reserved.lo(), self.linked)
    }
}

impl<S: Space + LinkSpace, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Reserves `pages` pages of addresses for a request (`dma_iova_try_alloc`). Nothing is mapped.
    ///
    /// # Errors
    /// Returns the buffer. The layer is unchanged.
    pub fn reserve_request<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        pages: u64,
        direction: Direction,
    ) -> Result<LinkedRequest<B>, (B, MapError)> {
        self.refresh_if_stale(cpu);
        let mut retries = AllocRetries::default();
        let reserved = loop {
            let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at) else {
                return Err((buffer, map_error(at, None, MapReason::NotAttached)));
            };
            let failed = if pages == 0 {
                MapReason::Empty
            } else {
                match space.reserve_range(own, pages, direction.permissions(), at.limits) {
                    Ok(reserved) => break reserved,
                    Err(reason) => reason,
                }
            };
            let freed = match failed {
                MapReason::Alloc(error) => {
                    self.free_addresses(cpu, platform, at, error, &mut retries)
                }
                reason => Err(reason),
            };
            if let Err(reason) = freed {
                return Err((buffer, map_error(at, None, reason)));
            }
        };
        let Some(range) = bytes_of(reserved) else {
            return Err((buffer, map_error(at, None, MapReason::TooLarge)));
        };
        Ok(LinkedRequest {
            live: LiveMapping::new(at, range, direction, buffer),
            reserved,
            linked: 0,
            visible: 0,
        })
    }

    /// Maps the next piece of a request (`dma_iova_link`) and returns its addresses. The piece
    /// begins on a new page, at its offset in its first page. The device must not use the addresses
    /// before [`sync_request`](Self::sync_request).
    ///
    /// # Errors
    /// [`MapReason::TooLarge`] if the piece does not fit, [`MapReason::NotAttached`] if the request
    /// belongs to another domain, and the errors of the table. The request is unchanged.
    #[inline]
    pub fn link_piece<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &mut LinkedRequest<B>,
        piece: PhysRange,
    ) -> Result<IovaRange, MapError> {
        let failed = |reason| map_error(at, Some(piece), reason);
        self.refresh_if_stale(cpu);
        if request.live.domain_handle != at.domain_handle {
            return Err(failed(MapReason::NotAttached));
        }
        let pages = piece.pages(GRANULE);
        if pages > request.room() {
            return Err(failed(MapReason::TooLarge));
        }
        let (space, own) = self
            .space_and_cpu(&mut cpu.spaces, at)
            .ok_or(failed(MapReason::NotAttached))?;
        let page = Pfn::new(request.reserved.lo().get() + request.linked);
        let start = page
            .iova()
            .wrapping_add(piece.start().offset_in(GRANULE.bytes()));
        let range = IovaRange::new(start, piece.bytes()).ok_or(failed(MapReason::TooLarge))?;
        let permissions = request.live.direction.permissions();
        space
            .link(own, platform, page, piece, permissions)
            .map_err(failed)?;
        request.linked += pages;
        Ok(range)
    }

    /// Makes all linked pieces visible to the device (`dma_iova_sync`). More pieces may be linked
    /// and made visible later.
    ///
    /// # Errors
    /// The device may not see the pieces that were linked since the last call. The request is
    /// unchanged.
    pub fn sync_request<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &mut LinkedRequest<B>,
    ) -> Result<(), MapError> {
        let failed = |reason| map_error(at, None, reason);
        self.refresh_if_stale(cpu);
        if request.live.domain_handle != at.domain_handle {
            return Err(failed(MapReason::NotAttached));
        }
        let (space, own) = self
            .space_and_cpu(&mut cpu.spaces, at)
            .ok_or(failed(MapReason::NotAttached))?;
        if let Some(linked) = request.pages() {
            space.sync_links(own, platform, linked).map_err(failed)?;
        }
        request.visible = request.linked;
        Ok(())
    }

    /// Unmaps all pieces of a request and frees its addresses (`dma_iova_destroy`). The flush
    /// policy defines the result, as for [`unmap_single`](Self::unmap_single): one invalidation
    /// covers the request under [`Strict`](crate::flush::Strict).
    ///
    /// # Errors
    /// Those of [`unmap_single`](Self::unmap_single). A request cannot be claimed again.
    pub fn destroy_request<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: LinkedRequest<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let linked = request.pages();
        let LinkedRequest { live, reserved, .. } = request;
        let range = live.range;
        let failed = |reason| UnmapError {
            device: at.device,
            range,
            reason,
        };
        self.refresh_if_stale(cpu);
        if live.domain_handle != at.domain_handle {
            return Err(failed(self.wrong_domain(live)));
        }
        let (Some((space, own)), Some((shared, flush))) = (
            self.space_and_cpu(&mut cpu.spaces, at),
            self.flush_state(&mut cpu.flush, at),
        ) else {
            return Err(failed(self.wrong_domain(live)));
        };
        let ring = at.ring();
        if !flush.has_room(live.burst_key(ring)) {
            return Err(failed(UnmapReason::BurstFull(live.into_still_mapped())));
        }
        let result = match space.unlink(own, platform, linked, reserved) {
            Ok(result) => result,
            Err(refusal) => return Err(failed(refusal.with(live.into_still_mapped()))),
        };
        let item = live.into_pending_unmap(result, ring);
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        self.flush
            .queue_unmap(shared, flush, ctx, platform, item)
            .map_err(|(error, token)| failed(UnmapReason::NotFlushed(error, token)))
    }
}

/// Returns all bytes of `pages`.
fn bytes_of(pages: PfnRange) -> Option<IovaRange> {
    let last = pages.hi().iova().wrapping_add(GRANULE.bytes() - 1);
    IovaRange::inclusive(pages.lo().iova(), last)
}
