//! The oracle: state outside every model that judges device accesses.
//!
//! For every I/O virtual page of every device, the oracle knows the owner: the live grant, or the
//! last one before. A grant begins when map returns and ends when the layer returns the buffer. The
//! oracle judges each access that the hardware lets through. It compares the reached byte with the
//! grant of the page's present owner.

mod bytes;
mod grants;
mod owners;
mod recycled;
mod timeline;
mod verdict;
mod windows;

pub use bytes::{ByteGrantId, ByteOracle, ByteVerdict, Violation};
pub use grants::{Grant, GrantId, GrantState};
pub use timeline::{StaleBytes, Timeline};
pub use verdict::{Verdict, VerdictCounts};
pub use windows::Windows;

use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use grants::{GrantSlot, Grants};
use owners::Owners;
use recycled::RecycledPages;

use crate::limits::ReplayLimits;

/// The number of owners that an I/O virtual page can have at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// One owner: a new mapping takes the page from the previous owner.
    Page,
    /// Several live owners: a page stays with the memory that it maps, and live mappings share it.
    /// A new mapping removes dead owners.
    Shared,
    /// Several owners, because the IOVA equals the physical address and buffers share pages.
    Byte,
}

/// The oracle's state for one platform.
#[derive(Debug)]
pub struct Oracle {
    grants: Grants,
    /// Owners by device.
    owners: Vec<Owners>,
    ownership: Ownership,
    /// Pools that stay mapped, by device.
    pools: Vec<Option<PhysRange>>,
    /// True if drivers take their buffers from the pools.
    lends: bool,
    /// Pages of drivers' pools that stay mapped; `None` in modes without them.
    recycled: Option<RecycledPages>,
    /// Maximum number of owners of a page.
    max_sharers: usize,
    /// First page that exceeded `max_sharers`.
    crowded: Option<u64>,
    /// Counts of verdicts.
    pub tally: VerdictCounts,
}

impl Oracle {
    /// Creates an oracle without grants.
    pub fn new(ownership: Ownership) -> Self {
        Self {
            grants: Grants::default(),
            owners: Vec::new(),
            ownership,
            pools: Vec::new(),
            lends: false,
            recycled: None,
            max_sharers: ReplayLimits::default().buffers_on_a_page,
            crowded: None,
            tally: VerdictCounts::default(),
        }
    }

    /// Records the pool of `device`, which holds only what the device uses in place of buffers.
    pub fn set_pool(&mut self, device: usize, pool: PhysRange) {
        if self.pools.len() <= device {
            self.pools.resize(device + 1, None);
        }
        self.pools[device] = Some(pool);
    }

    /// Records that drivers take their buffers from the pools. The device may change what a driver
    /// still uses there.
    pub fn set_lends(&mut self, lends: bool) {
        self.lends = lends;
    }

    /// Assumes that drivers take their buffers from pools, which keep the pages of released buffers
    /// whose mappings stay.
    pub fn set_recycles(&mut self) {
        self.recycled = Some(RecycledPages::default());
    }

    /// Records that the mapping of a released grant of `device` stays. For drivers that take their
    /// buffers from pools.
    pub fn keep(&mut self, device: usize, id: GrantId) {
        if let (Some(recycled), Some(grant)) = (&mut self.recycled, self.grants.named(id)) {
            for piece in grant.memory() {
                recycled.keep((device, grant.direction), &piece);
            }
        }
    }

    /// Removes the pages of a new buffer from all other pools.
    fn take_from_pools(&mut self, device: usize, pieces: &[PhysRange], direction: Direction) {
        if let Some(recycled) = &mut self.recycled {
            for piece in pieces {
                recycled.map((device, direction), piece);
            }
        }
    }

    /// Returns true if the `bytes` bytes from `reached` are memory of the device's own pool.
    fn is_own_pool(&self, device: usize, reached: PhysAddr, bytes: u64) -> bool {
        let pool = self.pools.get(device).copied().flatten();
        let reached = PhysRange::new(reached, bytes);
        pool.zip(reached)
            .is_some_and(|(pool, reached)| pool.contains(&reached))
    }

    /// Allows at most `most` buffers on a page.
    pub fn set_max_sharers(&mut self, most: usize) {
        self.max_sharers = most;
    }

    /// Returns the first page that exceeded the limit on buffers. The oracle does not judge
    /// accesses to the excess buffers.
    pub fn crowded(&self) -> Option<Iova> {
        self.crowded.map(|page| Iova::new(page << 12))
    }

    /// Grants `pieces` to `device` when map returns. The pieces lie at consecutive pages from
    /// `iova`.
    pub fn grant(
        &mut self,
        device: usize,
        iova: IovaRange,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        self.take_from_pools(device, pieces, direction);
        match self.ownership {
            Ownership::Page | Ownership::Shared => {
                let id = self.grants.insert(iova, pieces, direction);
                self.set_owner(device, &iova, id);
                id
            }
            Ownership::Byte => {
                let id = self.grants.insert_identity(pieces, direction);
                let (owners, grants) = (row_of(&mut self.owners, device), &mut self.grants);
                for piece in pieces {
                    let (first, last) = (piece.start().get() >> 12, piece.last().get() >> 12);
                    for page in first..=last {
                        let outlives = |old: GrantSlot, grants: &Grants| {
                            let grant = grants.get(old);
                            grant.is_some_and(|g| g.state != GrantState::Dead || !g.overlaps(piece))
                        };
                        if !owners.share(page, id.slot(), grants, outlives, self.max_sharers) {
                            self.crowded.get_or_insert(page);
                        }
                    }
                }
                id
            }
        }
    }

    /// Like [`grant`](Self::grant), for pieces with separate IOVA ranges. `iovas` has one range for
    /// each piece, on pages that no other mapping uses.
    pub fn grant_per_segment(
        &mut self,
        device: usize,
        iovas: &[IovaRange],
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        self.take_from_pools(device, pieces, direction);
        let id = self.grants.insert_per_segment(iovas, pieces, direction);
        for iova in iovas {
            self.set_owner(device, iova, id);
        }
        id
    }

    /// Returns true if a live grant of `device` shares a page with `iova`.
    pub fn is_live(&self, device: usize, iova: &IovaRange) -> bool {
        let Some(owners) = self.owners.get(device) else {
            return false;
        };
        let pages = ringfence_types::PfnRange::covering(iova);
        (pages.lo().get()..=pages.hi().get()).any(|page| {
            owners.owners_of(page).any(|id| {
                let grant = self.grants.get(id);
                grant.is_some_and(|grant| grant.state == GrantState::Live)
            })
        })
    }

    /// Makes `id` an owner of the pages of `iova`.
    fn set_owner(&mut self, device: usize, iova: &IovaRange, id: GrantId) {
        let (owners, grants) = (row_of(&mut self.owners, device), &mut self.grants);
        let pages = ringfence_types::PfnRange::covering(iova);
        for page in pages.lo().get()..=pages.hi().get() {
            if self.ownership == Ownership::Shared {
                let lives = |old: GrantSlot, grants: &Grants| {
                    grants.get(old).is_some_and(|g| g.state != GrantState::Dead)
                };
                if !owners.share(page, id.slot(), grants, lives, self.max_sharers) {
                    self.crowded.get_or_insert(page);
                }
                continue;
            }
            owners.acquire(page, id.slot(), grants);
        }
    }

    /// Returns the ID of the next grant, as [`GrantId::to_raw`] gives it.
    pub fn next(&self) -> u64 {
        self.grants.next().to_raw()
    }

    /// Returns the grant `id`; `None` if it is forgotten.
    pub fn get(&self, id: GrantId) -> Option<&Grant> {
        self.grants.named(id)
    }

    /// Marks the grant as withheld: unmap has returned without the buffer. The device should not
    /// access it, but the driver does not use it yet.
    pub fn withhold(&mut self, id: GrantId) {
        self.grants.set(id, GrantState::Withheld);
    }

    /// Marks the grant as dead: the layer has returned the buffer.
    pub fn release(&mut self, id: GrantId) {
        self.grants.set(id, GrantState::Dead);
        self.grants.unpin(id.slot());
    }

    /// Judges an access of `device` that the hardware let through from `iova` to `reached`. `bytes`
    /// must stay within one page.
    #[inline]
    pub fn allowed(
        &mut self,
        device: usize,
        iova: Iova,
        bytes: u64,
        access: Access,
        reached: PhysAddr,
    ) -> Verdict {
        let mut verdict = self.judge(device, iova, bytes, access, reached);
        let outside = matches!(
            verdict,
            Verdict::Stale | Verdict::Never | Verdict::Colocated
        );
        if outside && self.is_own_pool(device, reached, bytes) {
            let released = verdict == Verdict::Stale && access == Access::Write;
            verdict = if self.lends && released {
                Verdict::Mutable
            } else {
                Verdict::Shadow
            };
        }
        let recycled = self.recycled.as_ref();
        if verdict == Verdict::Stale
            && recycled.is_some_and(|pages| pages.is_own(device, access, reached))
        {
            verdict = match access {
                Access::Read => Verdict::Shadow,
                Access::Write => Verdict::Mutable,
            };
        }
        self.tally.count(verdict);
        if verdict == Verdict::Direction && access == Access::Read {
            self.tally.direction_reads += 1;
        }
        verdict
    }

    /// Judges an access of `device` that the hardware stopped.
    #[inline]
    pub fn faulted(&mut self, device: usize, iova: Iova, bytes: u64, access: Access) -> Verdict {
        self.tally.faults += 1;
        let legal = self.owners.get(device).is_some_and(|owners| {
            owners.owners_of(iova.get() >> 12).any(|id| {
                self.grants.get(id).is_some_and(|grant| {
                    grant.state == GrantState::Live
                        && grant.direction.permissions().allows(access)
                        && grant.translate(iova, bytes).is_some()
                })
            })
        });
        let verdict = if legal {
            Verdict::FalseFault
        } else {
            Verdict::Stopped
        };
        self.tally.count(verdict);
        verdict
    }

    #[inline]
    fn judge(
        &self,
        device: usize,
        iova: Iova,
        bytes: u64,
        access: Access,
        reached: PhysAddr,
    ) -> Verdict {
        let page = iova.get() >> 12;
        let mut worst = None;
        if let Some(owners) = self.owners.get(device) {
            // On a shared page, live owners decide. They see a dead owner's bytes as bytes beside
            // their own.
            let lives = |id| {
                self.grants
                    .get(id)
                    .is_some_and(|g| g.state != GrantState::Dead)
            };
            let living = self.ownership == Ownership::Shared && owners.owners_of(page).any(lives);
            for id in owners.owners_of(page) {
                let Some(grant) = self.grants.get(id) else {
                    continue;
                };
                if living && grant.state == GrantState::Dead {
                    continue;
                }
                let verdict = grant.judge(iova, bytes, access, reached);
                if verdict == Verdict::Granted {
                    return verdict;
                }
                worst = Some(match worst {
                    None => verdict,
                    Some(other) => verdict.closer(other),
                });
            }
        }
        worst.unwrap_or_else(|| {
            let foreign = self.owners.iter().enumerate().any(|(other, owners)| {
                other != device
                    && owners.owners_of(page).any(|id| {
                        self.grants
                            .get(id)
                            .is_some_and(|grant| grant.state != GrantState::Dead)
                    })
            });
            if foreign {
                Verdict::Foreign
            } else {
                Verdict::Never
            }
        })
    }
}

/// Returns the page owners of a device, and creates the entry if necessary.
fn row_of(owners: &mut Vec<Owners>, device: usize) -> &mut Owners {
    if owners.len() <= device {
        owners.resize_with(device + 1, Owners::default);
    }
    &mut owners[device]
}

#[cfg(test)]
mod tests;
