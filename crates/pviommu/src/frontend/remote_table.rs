//! An I/O page table that the host maintains on request.

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
/// # Errors
/// Host statuses become the errors of a local table. `NO_ROOM` is out of frames, and `MAPPED` is
/// already mapped. An address outside the window exceeds the table's width, and a bad GPA exceeds
/// an entry's width. Other failures and a [broken channel](Channel::failure) are a corrupt table.
#[derive(Debug)]
pub struct RemoteTable<R, Q, L> {
    link: R,
    device: Devid,
    domain: DomainId,
    /// Number of pages mapped now.
    live: AtomicU64,
    shared: PhantomData<fn() -> (Q, L)>,
}

impl<R, Q, L> RemoteTable<R, Q, L>
where
    R: Deref<Target = SharedChannel<Q, L>>,
    Q: Queue,
    L: Lock<Channel<Q>>,
{
    /// Creates the table of `device`, whose domain in this guest is `domain`.
    pub fn new(link: R, device: Devid, domain: DomainId) -> Self {
        Self {
            link,
            device,
            domain,
            live: AtomicU64::new(0),
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
        self.link.with(|channel| {
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
        self.link.with(|channel| {
            let step = channel.options().pages_max as usize;
            let pages = |range: &PfnRange| (range.lo().get()..=range.hi().get()).map(page_at);
            let pages: Vec<Iova> = ranges.iter().flat_map(pages).collect();
            for some in pages.chunks(step) {
                channel.unmap(self.device, some.iter().copied())?;
            }
            Ok(())
        })
    }

    /// Waits for every map of `cpu`, records the refused ones and returns the first refusal.
    fn wait_for_maps(&self, cpu: &mut RemoteCpu) -> Result<(), RemoteMapError> {
        let mut outcome = Ok(());
        for deferred in cpu.0.drain(..) {
            let result = self.link.wait(deferred.sequence);
            if result.is_err() {
                let note = |channel: &mut Channel<Q>| {
                    channel.note_late_refusal(self.device, deferred.range)
                };
                self.link.with(note);
                self.count_unmapped(deferred.range.pages());
                outcome = outcome.and(result);
            }
        }
        outcome
    }

    fn count_unmapped(&self, pages: u64) {
        self.live.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Unmaps the rest of a range after the host refused some of its maps, and waits.
    fn undo(&self, range: PfnRange) -> Result<(), ChannelFailure> {
        let refused_ranges = self
            .link
            .with(|channel| channel.take_late_refusals(self.device, &range));
        let rest = subtract(range, refused_ranges);
        self.count_unmapped(rest.iter().map(PfnRange::pages).sum());
        self.queue_unmap(&rest)?;
        let sequence = self.link.with(|channel| {
            channel.kick();
            channel.next_sequence()
        });
        loop {
            let confirmed = self.link.with(|channel| {
                channel.poll();
                channel.is_confirmed(sequence)
            })?;
            if confirmed {
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
        self.sync(cpu, platform);
        let iova = request.iova;
        self.map_nosync(cpu, platform, request)?;
        self.link.with(Channel::kick);
        self.wait_for_maps(cpu).map_err(|refused| {
            let undone = PfnRange::new(Pfn::containing(iova), request.pages)
                .map_or(Ok(()), |range| self.undo(range));
            match undone {
                Ok(()) => error_of(refused, &request),
                Err(_) => MapError::Corrupt { iova },
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
        let before = cpu.0.len();
        self.live.fetch_add(all.pages(), Ordering::Relaxed);
        let queued = self.queue_map(&request, |deferred| cpu.0.push(deferred));
        queued.map_err(|broken| {
            // A broken channel never recovers, so the caller must abandon the addresses.
            cpu.0.truncate(before);
            self.count_unmapped(all.pages());
            error_of(broken.into(), &request)
        })
    }

    fn iotlb_sync_map<P: Platform>(
        &self,
        _platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        if self
            .link
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
        if !cpu.0.is_empty() {
            // Learn first which of the pages are mapped.
            self.sync(cpu, platform);
        }
        let iova = range.lo().iova();
        let refused_ranges = self.link.with(|channel| match channel.failure() {
            Some(_) => Err(UnmapError::Corrupt { iova }),
            None => Ok(channel.take_late_refusals(self.device, &range)),
        })?;
        let rest = subtract(range, refused_ranges);
        self.queue_unmap(&rest)
            .map_err(|_| UnmapError::Corrupt { iova })?;
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
        if !cpu.0.is_empty() {
            self.sync(cpu, platform);
        }
        let iova = first.lo().iova();
        let corrupt = |_| UnmapError::Corrupt { iova };
        let refused_ranges = self.link.with(|channel| match channel.failure() {
            Some(broken) => Err(broken),
            None => Ok(ranges
                .iter()
                .any(|range| channel.has_late_refusal(self.device, range))),
        });
        if refused_ranges.map_err(corrupt)? {
            // Some parts are not mapped, so unmap the ranges one by one.
            for range in ranges {
                each(self.unmap(cpu, platform, *range)?);
            }
            return Ok(());
        }
        self.queue_unmap(ranges).map_err(corrupt)?;
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
        self.link.with(Channel::kick);
        // `wait_for_maps` records refusals. `iotlb_sync_map` finds them before the driver passes
        // the addresses to the device.
        let _ = self.wait_for_maps(cpu);
    }
}

#[inline]
fn page_at(number: u64) -> Iova {
    Pfn::new(number).iova()
}

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

fn error_of(refused: RemoteMapError, request: &MapRequest) -> MapError {
    let iova = request.iova;
    match refused {
        RemoteMapError::Status(Status::NoRoom) => MapError::OutOfFrames,
        RemoteMapError::Status(Status::BadGiova) => MapError::BeyondWidth { iova },
        RemoteMapError::Status(Status::BadGpa) => MapError::PhysicalBeyondWidth { at: request.pa },
        RemoteMapError::Status(Status::Mapped) => MapError::AlreadyMapped { iova },
        _ => MapError::Corrupt { iova },
    }
}
