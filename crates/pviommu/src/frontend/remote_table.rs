//! An I/O page table that the host maintains on request.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    CachedLevels, Direction, DomainId, InvalidationError, Iova, Lock, Permissions, Pfn, PfnRange,
    Unmapped,
};

use super::{Channel, ChannelFailure, Queue, RemoteMapError};
use crate::wire::{Devid, Gpa, PAGE_BYTES, Status};

/// A channel behind the embedder's lock, shared by CPUs and devices.
#[derive(Debug)]
pub struct SharedChannel<Q, L> {
    channel: L,
    queue: PhantomData<fn() -> Q>,
}

impl<Q: Queue, L: Lock<Channel<Q>>> SharedChannel<Q, L> {
    /// Wraps `channel` in the lock that `lock` creates.
    pub fn new(channel: Channel<Q>, lock: impl FnOnce(Channel<Q>) -> L) -> Self {
        Self {
            channel: lock(channel),
            queue: PhantomData,
        }
    }

    /// Runs `critical` with exclusive access to the channel.
    #[inline]
    pub fn with<R>(&self, critical: impl FnOnce(&mut Channel<Q>) -> R) -> R {
        self.channel.with(critical)
    }

    /// Polls until the host answers the map with sequence number `sequence`. Releases the lock
    /// between polls.
    fn wait(&self, sequence: u64) -> Result<(), RemoteMapError> {
        loop {
            let outcome = self.channel.with(|channel| {
                channel.poll();
                channel.outcome(sequence)
            });
            match outcome {
                Some(outcome) => return outcome,
                None => core::hint::spin_loop(),
            }
        }
    }
}

/// A map request that was queued without waiting for its answer.
#[derive(Debug)]
struct QueuedMap {
    sequence: u64,
    range: PfnRange,
}

/// Per-CPU state: maps whose answers [`sync`](IoPageTable::sync) waits for.
#[derive(Debug, Default)]
pub struct RemoteCpu(Vec<QueuedMap>);

/// Translations of one device, in the host. Physical addresses are guest-physical.
///
/// A host's status becomes the error of a local table. With a [broken channel](Channel::failure),
/// every map is [`MapError::Refused`], and every unmap [`UnmapError::Refused`].
#[derive(Debug)]
pub struct RemoteTable<R, Q, L> {
    channel: R,
    device: Devid,
    domain: DomainId,
    /// Number of pages that the host may have mapped. Without those whose unmap is queued: the
    /// invalidation waits for its confirmation.
    live: Arc<AtomicU64>,
    shared: PhantomData<fn() -> (Q, L)>,
}

impl<R, Q, L> RemoteTable<R, Q, L>
where
    R: Deref<Target = SharedChannel<Q, L>>,
    Q: Queue,
    L: Lock<Channel<Q>>,
{
    /// Creates the table of `device`, whose domain in this guest is `domain`.
    pub fn new(channel: R, device: Devid, domain: DomainId) -> Self {
        let live = channel.with(|channel| channel.add_table(device));
        Self {
            channel,
            device,
            domain,
            live,
            shared: PhantomData,
        }
    }

    /// Queues `request` in pieces of at most `pages_max` pages.
    fn queue_map(
        &self,
        request: &MapRequest,
        mut queued: impl FnMut(QueuedMap),
    ) -> Result<(), ChannelFailure> {
        let direction = direction_of(request.permissions);
        self.channel.with(|channel| {
            let step = u64::from(channel.options().pages_max);
            let mut done = 0;
            while done < request.pages {
                let count = step.min(request.pages.wrapping_sub(done));
                let bytes =
                    |page: u32| (done.wrapping_add(u64::from(page))).wrapping_mul(PAGE_BYTES);
                // `count` is at most `pages_max`.
                let pages = (0..count as u32).map(|page| {
                    (
                        request.iova.wrapping_add(bytes(page)),
                        Gpa::new(request.pa.get().wrapping_add(bytes(page))),
                    )
                });
                let sequence = channel.map(self.device, direction, pages)?;
                let first = Pfn::containing(request.iova.wrapping_add(bytes(0)));
                if let Some(range) = PfnRange::new(first, count) {
                    queued(QueuedMap { sequence, range });
                }
                done = done.wrapping_add(count);
            }
            Ok(())
        })
    }

    /// Queues unmaps of `ranges` without waiting.
    fn queue_unmap(&self, ranges: &[PfnRange]) -> Result<(), ChannelFailure> {
        let mut pages = Pages::new(ranges);
        self.channel.with(|channel| {
            let step = channel.options().pages_max as usize;
            while pages.len() > 0 {
                channel.unmap(self.device, pages.clone().take(step))?;
                pages.by_ref().take(step).for_each(drop);
            }
            Ok(())
        })
    }

    /// Waits for every map of `cpu`, records the failed ones and returns the first failure.
    fn wait_for_maps(&self, cpu: &mut RemoteCpu) -> Result<(), RemoteMapError> {
        let mut outcome = Ok(());
        for queued_map in cpu.0.drain(..) {
            let result = self.channel.wait(queued_map.sequence);
            if result.is_err() {
                let note = |channel: &mut Channel<Q>| {
                    channel.note_late_refusal(self.device, queued_map.range)
                };
                self.channel.with(note);
                outcome = outcome.and(result);
            }
            // After any other failure the host may have mapped the pages.
            if matches!(result, Err(RemoteMapError::Status(_))) {
                self.count_unmapped(queued_map.range.pages());
            }
        }
        outcome
    }

    fn count_unmapped(&self, pages: u64) {
        self.live.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Waits until this CPU's earlier maps have succeeded or failed. An unmap needs to know which.
    fn wait_for_queued_maps<P: Platform>(&self, cpu: &mut RemoteCpu, platform: &mut P) {
        if !cpu.0.is_empty() {
            self.sync(cpu, platform);
        }
    }

    /// Unmaps the rest of a range after the host refused some of its maps, and waits.
    fn undo(&self, range: PfnRange) -> Result<(), ChannelFailure> {
        let refused_ranges = self
            .channel
            .with(|channel| channel.take_late_refusals(self.device, &range));
        let rest = subtract(range, refused_ranges);
        self.queue_unmap(&rest)?;
        let sequence = self.channel.with(|channel| {
            channel.kick();
            channel.next_sequence()
        });
        loop {
            let confirmed = self.channel.with(|channel| {
                channel.poll();
                channel.is_confirmed(sequence)
            })?;
            if confirmed {
                self.count_unmapped(rest.iter().map(PfnRange::pages).sum());
                return Ok(());
            }
            core::hint::spin_loop();
        }
    }
}

impl<R, Q, L> IoPageTable for RemoteTable<R, Q, L>
where
    R: Deref<Target = SharedChannel<Q, L>>,
    Q: Queue,
    L: Lock<Channel<Q>>,
{
    type PerCpu = RemoteCpu;
    type Pages = ();

    fn per_cpu(&self) -> RemoteCpu {
        RemoteCpu::default()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut RemoteCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        // Answer this CPU's earlier maps first, so that their refusals do not fail this request.
        self.wait_for_queued_maps(cpu, platform);
        let iova = request.iova;
        self.map_nosync(cpu, platform, request)?;
        self.channel.with(Channel::kick);
        self.wait_for_maps(cpu).map_err(|refused| {
            let undone = PfnRange::new(Pfn::containing(iova), request.pages)
                .map_or(Ok(()), |range| self.undo(range));
            match undone {
                Ok(()) => error_of(refused, &request),
                Err(_) => MapError::Refused { iova },
            }
        })
    }

    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut RemoteCpu,
        _platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        let iova = request.iova;
        let all = PfnRange::new(Pfn::containing(iova), request.pages).ok_or(MapError::Empty)?;
        if !iova.is_aligned(PAGE_BYTES) || !request.pa.is_aligned(PAGE_BYTES) {
            return Err(MapError::Misaligned);
        }
        let before = cpu.0.len();
        self.live.fetch_add(all.pages(), Ordering::Relaxed);
        let result = self.queue_map(&request, |queued_map| cpu.0.push(queued_map));
        result.map_err(|broken| {
            // A broken channel never recovers, so the caller must abandon the addresses. The host
            // may have mapped the pages that were queued.
            let queued = cpu.0.drain(before..).map(|map| map.range.pages()).sum();
            self.count_unmapped(all.pages().saturating_sub(queued));
            error_of(broken.into(), &request)
        })
    }

    fn iotlb_sync_map<P: Platform>(
        &self,
        _platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        if self
            .channel
            .with(|channel| channel.has_late_refusal(self.device, &range))
        {
            return Err(InvalidationError::Failed);
        }
        Ok(())
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut RemoteCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.wait_for_queued_maps(cpu, platform);
        let iova = range.lo().iova();
        let refused_ranges = self.channel.with(|channel| match channel.failure() {
            Some(_) => Err(UnmapError::Refused { iova }),
            None => Ok(channel.take_late_refusals(self.device, &range)),
        })?;
        let rest = subtract(range, refused_ranges);
        self.queue_unmap(&rest)
            .map_err(|_| UnmapError::Refused { iova })?;
        self.count_unmapped(rest.iter().map(PfnRange::pages).sum());
        // The host clears the entries before it answers, and the invalidation waits for the answer.
        let cleared = Unmapped::attest_cleared(self.domain, range);
        Ok((cleared, CachedLevels::Leaves, ()))
    }

    /// Unmaps `ranges` with as few requests as `pages_max` allows.
    fn unmap_many<P: Platform>(
        &self,
        cpu: &mut RemoteCpu,
        platform: &mut P,
        ranges: &[PfnRange],
        mut each: impl FnMut((Unmapped, CachedLevels, ())),
    ) -> Result<(), UnmapError> {
        let Some(first) = ranges.first() else {
            return Ok(());
        };
        self.wait_for_queued_maps(cpu, platform);
        let iova = first.lo().iova();
        let refused = |_| UnmapError::Refused { iova };
        let any_refused = self.channel.with(|channel| match channel.failure() {
            Some(broken) => Err(broken),
            None => Ok(ranges
                .iter()
                .any(|range| channel.has_late_refusal(self.device, range))),
        });
        if any_refused.map_err(refused)? {
            // Some parts are not mapped, so unmap the ranges one by one.
            for range in ranges {
                each(self.unmap(cpu, platform, *range)?);
            }
            return Ok(());
        }
        self.queue_unmap(ranges).map_err(refused)?;
        self.count_unmapped(ranges.iter().map(PfnRange::pages).sum());
        for range in ranges {
            let cleared = Unmapped::attest_cleared(self.domain, *range);
            each((cleared, CachedLevels::Leaves, ()));
        }
        Ok(())
    }

    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        self.live.load(Ordering::Relaxed) == 0
    }

    fn sync<P: Platform>(&self, cpu: &mut RemoteCpu, _platform: &mut P) {
        self.channel.with(Channel::kick);
        // `wait_for_maps` records refusals. `iotlb_sync_map` finds them before the driver passes
        // the addresses to the device.
        let _ = self.wait_for_maps(cpu);
    }
}

/// Iterates over the pages of several ranges.
#[derive(Clone)]
struct Pages<'a> {
    ranges: &'a [PfnRange],
    /// Number of pages of the first range that were returned.
    done: u64,
    /// Number of pages that were not returned yet.
    remaining: usize,
}

impl<'a> Pages<'a> {
    fn new(ranges: &'a [PfnRange]) -> Self {
        let count: u64 = ranges.iter().map(PfnRange::pages).sum();
        Self {
            ranges,
            done: 0,
            remaining: usize::try_from(count).unwrap_or(usize::MAX),
        }
    }
}

impl Iterator for Pages<'_> {
    type Item = Iova;

    #[inline]
    fn next(&mut self) -> Option<Iova> {
        self.remaining = self.remaining.checked_sub(1)?;
        let (first, rest) = self.ranges.split_first()?;
        let page = first.lo().get().wrapping_add(self.done);
        self.done = self.done.wrapping_add(1);
        if self.done == first.pages() {
            (self.ranges, self.done) = (rest, 0);
        }
        Some(Pfn::new(page).iova())
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Pages<'_> {}

pub(super) const fn direction_of(permissions: Permissions) -> Direction {
    match permissions {
        Permissions::READ => Direction::ToDevice,
        Permissions::WRITE => Direction::FromDevice,
        _ => Direction::Bidirectional,
    }
}

/// Returns the parts of `range` outside `holes`. The holes lie inside `range` and do not overlap.
fn subtract(range: PfnRange, mut holes: Vec<PfnRange>) -> Vec<PfnRange> {
    if holes.is_empty() {
        return alloc::vec![range];
    }
    holes.sort_unstable();
    let mut rest = Vec::new();
    let mut next = range.lo().get();
    for hole in holes {
        let before = hole.lo().get().saturating_sub(next);
        rest.extend(PfnRange::new(Pfn::new(next), before));
        next = hole.hi().get().saturating_add(1);
    }
    let after = range.hi().get().saturating_add(1).saturating_sub(next);
    rest.extend(PfnRange::new(Pfn::new(next), after));
    rest
}

/// Returns the error of a local table for a failure in the host.
///
/// | status | error |
/// |---|---|
/// | `NO_ROOM` | [`MapError::OutOfFrames`] |
/// | `BAD_GIOVA`, outside the window | [`MapError::BeyondWidth`] |
/// | `BAD_GPA` | [`MapError::PhysicalBeyondWidth`] |
/// | `MAPPED` | [`MapError::AlreadyMapped`] |
/// | others, and a [broken channel](Channel::failure) | [`MapError::Refused`] |
///
/// The host does not say which page is mapped, so [`MapError::AlreadyMapped`] names the first one
/// of the request.
fn error_of(refused: RemoteMapError, request: &MapRequest) -> MapError {
    let iova = request.iova;
    match refused {
        RemoteMapError::Status(Status::NoRoom) => MapError::OutOfFrames,
        RemoteMapError::Status(Status::BadGiova) => MapError::BeyondWidth { iova },
        RemoteMapError::Status(Status::BadGpa) => MapError::PhysicalBeyondWidth { at: request.pa },
        RemoteMapError::Status(Status::Mapped) => MapError::AlreadyMapped { iova },
        _ => MapError::Refused { iova },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(lo: u64, hi: u64) -> PfnRange {
        PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap()
    }

    #[test]
    fn subtract_leaves_the_parts_between_the_holes() {
        type Bounds = &'static [(u64, u64)];
        let cases: [(Bounds, Bounds); 7] = [
            (&[], &[(10, 19)]),
            (&[(10, 12)], &[(13, 19)]),
            (&[(18, 19)], &[(10, 17)]),
            (&[(14, 14)], &[(10, 13), (15, 19)]),
            (&[(15, 16), (12, 14)], &[(10, 11), (17, 19)]),
            (&[(10, 19)], &[]),
            (&[(12, 12), (17, 17)], &[(10, 11), (13, 16), (18, 19)]),
        ];
        for (holes, rest) in cases {
            let ranges = |of: Bounds| -> Vec<PfnRange> {
                of.iter().map(|(lo, hi)| range(*lo, *hi)).collect()
            };
            assert_eq!(
                subtract(range(10, 19), ranges(holes)),
                ranges(rest),
                "{holes:?}"
            );
        }
    }

    #[test]
    fn pages_are_those_of_the_ranges_in_order() {
        let ranges = [range(5, 5), range(9, 11), range(2, 3)];
        let mut pages = Pages::new(&ranges);
        for (index, page) in [5, 9, 10, 11, 2, 3].into_iter().enumerate() {
            assert_eq!(pages.len(), 6 - index);
            assert_eq!(pages.next(), Some(Pfn::new(page).iova()));
        }
        assert_eq!((pages.len(), pages.next()), (0, None));
    }
}
