//! Scatterlists in spaces that keep what is unmapped: each piece is a mapping of its own, so that it is found again in another list.

use alloc::vec::Vec;

use ringfence_types::IovaRange;

use crate::flush::{Flush, Home};
use crate::mapping::Live;
use crate::sg::segments;
use crate::space::{Remains, Space, UnmapRefusal};
use crate::{
    Attachment, Cpu, Dma, MapError, MapReason, Platform, SgMapping, SgRequest, UnmapError,
    UnmapReason,
};

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    pub(crate) fn map_list_apart<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let mut apart = Vec::with_capacity(request.pieces.len());
        let mut placed = self.place_apart(cpu, platform, at, &request, &mut apart);
        if let Err(MapReason::Alloc(_)) = placed {
            // What nobody uses makes room.
            let flushed = self.flush(cpu, platform, at).map_err(MapReason::Flush);
            placed = flushed.and_then(|()| {
                apart.clear();
                self.place_apart(cpu, platform, at, &request, &mut apart)
            });
        }
        let (steps, first) = match (placed, apart.first().copied()) {
            (Ok(steps), Some(first)) => (steps, first),
            (Ok(_), None) => return Err(request.refused(at, MapReason::Empty)),
            (Err(reason), _) => return Err(request.refused(at, reason)),
        };
        let Some(used) = segments(apart.iter().copied(), request.limits, request.out) else {
            let mut reason = MapReason::TooManySegments;
            for range in apart {
                if let Err(failed) = self.withdraw(cpu, platform, at, range) {
                    reason = MapReason::NotUndone(failed);
                }
            }
            return Err(request.refused(at, reason));
        };
        let mapping = SgMapping {
            live: Live::new(at, first, request.direction, request.buffer),
            joined: false,
            apart,
            bounced: Vec::new(),
            steps,
        };
        Ok((mapping, used))
    }

    fn place_apart<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: &SgRequest<'_, B>,
        apart: &mut Vec<IovaRange>,
    ) -> Result<u32, MapReason> {
        self.catch_up(cpu);
        let parts = self.parts(&mut cpu.spaces, at);
        let (space, own) = parts.ok_or(MapReason::NotAttached)?;
        let permissions = request.direction.permissions();
        space.map_apart(own, platform, request.pieces, permissions, at.limits, apart)
    }

    /// A list is kept if any of its pieces is: the buffer comes back as that says.
    ///
    /// # Errors
    /// A piece that is refused leaves those after it mapped, and the list with the caller.
    pub(crate) fn take_down_apart<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let SgMapping { live, apart, .. } = mapping;
        let range = live.range;
        let failed = |reason| UnmapError {
            device: at.device,
            range,
            reason,
        };
        self.catch_up(cpu);
        let known = live.tenant == at.tenant
            && self.parts(&mut cpu.spaces, at).is_some()
            && self.policies(&mut cpu.flush, at).is_some();
        if !known {
            return Err(failed(self.misplaced(live)));
        }
        let mut left: Option<S::Gone> = None;
        for range in apart {
            let unmapped = match self.parts(&mut cpu.spaces, at) {
                Some((space, own)) => space.unmap(own, platform, range),
                None => Err(UnmapRefusal::NotAllocated),
            };
            let gone = match unmapped {
                Ok(gone) => gone,
                Err(refusal) => return Err(failed(refusal.with(live.exposed()))),
            };
            let done = match left.take() {
                None => gone,
                Some(other) => {
                    let (stays, leaves) = if other.is_kept() {
                        (other, gone)
                    } else {
                        (gone, other)
                    };
                    let mut home = self.home(cpu, at);
                    if let Err((error, gone)) = leaves.purge(&mut home, platform) {
                        return Err(failed(UnmapReason::NotFlushed(error, live.owed(gone))));
                    }
                    stays
                }
            };
            left = Some(done);
        }
        let (Some(gone), Some((shared, own))) = (left, self.policies(&mut cpu.flush, at)) else {
            return Err(failed(UnmapRefusal::NotAllocated.with(live.exposed())));
        };
        let item = live.retiring(gone, at.ring());
        let home = Home {
            seats: &self.seats,
            cpus: &mut cpu.spaces,
            here: at.tenant.index(),
        };
        self.flush
            .retire(shared, own, home, platform, item)
            .map_err(|(error, owed)| failed(UnmapReason::NotFlushed(error, owed)))
    }
}
