//! The oracle: ghost state outside every model, which judges what devices reach.
//!
//! It knows, for every I/O virtual page of every device, who owns it: the grant that lives there,
//! or the last one that did. A grant begins when map returns and ends when the layer hands the
//! buffer back. Each access that the hardware lets through is judged by the present owner of the
//! address it used, and by whether the byte reached is the one that owner was granted.

mod grants;
mod owners;
mod verdict;
mod windows;

pub use grants::{Grant, GrantId, GrantState};
pub use verdict::{Tally, Verdict};
pub use windows::Windows;

use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use grants::{GrantSlot, Grants};
use owners::Owners;

use crate::limits::ReplayLimits;

/// Whether an I/O virtual page has one owner at a time, or as many as there are buffers on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// Pages are given out: a new mapping takes the page from whoever had it last.
    Page,
    /// Pages stay with the memory they lead to, and live mappings of it share them: a new mapping
    /// takes the page from those that are dead.
    Shared,
    /// The address is the physical address: buffers share pages.
    Byte,
}

/// The ghost state of one machine.
#[derive(Debug)]
pub struct Oracle {
    grants: Grants,
    /// By device.
    owners: Vec<Owners>,
    ownership: Ownership,
    /// Most owners that a page may have.
    max_sharers: usize,
    /// First page that had more.
    crowded: Option<u64>,
    /// What has been judged.
    pub tally: Tally,
}

impl Oracle {
    /// Nothing granted.
    pub fn new(ownership: Ownership) -> Self {
        Self {
            grants: Grants::default(),
            owners: Vec::new(),
            ownership,
            max_sharers: ReplayLimits::default().buffers_on_a_page,
            crowded: None,
            tally: Tally::default(),
        }
    }

    /// Lets as many as `most` buffers share a page.
    pub fn with_most(mut self, most: usize) -> Self {
        self.max_sharers = most;
        self
    }

    /// The first page that more buffers shared than may. What they reach is not judged any more.
    pub fn crowded(&self) -> Option<Iova> {
        self.crowded.map(|page| Iova::new(page << 12))
    }

    /// Map has returned: `device` may use `iova` to reach `pieces`, which lie at consecutive pages.
    pub fn grant(
        &mut self,
        device: usize,
        iova: IovaRange,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
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
                        if !owners.share(page, id.row(), grants, outlives, self.max_sharers) {
                            self.crowded.get_or_insert(page);
                        }
                    }
                }
                id
            }
        }
    }

    /// The same where each piece has addresses of its own, on pages that no other mapping has:
    /// `iovas`, as many as there are pieces.
    pub fn grant_per_segment(
        &mut self,
        device: usize,
        iovas: &[IovaRange],
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        let id = self.grants.insert_per_segment(iovas, pieces, direction);
        for iova in iovas {
            self.set_owner(device, iova, id);
        }
        id
    }

    /// Whether a live grant of `device` shares a page with `iova`.
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

    /// Makes `id` the owner of the pages of `iova`.
    fn set_owner(&mut self, device: usize, iova: &IovaRange, id: GrantId) {
        let (owners, grants) = (row_of(&mut self.owners, device), &mut self.grants);
        let pages = ringfence_types::PfnRange::covering(iova);
        for page in pages.lo().get()..=pages.hi().get() {
            if self.ownership == Ownership::Shared {
                let lives = |old: GrantSlot, grants: &Grants| {
                    grants.get(old).is_some_and(|g| g.state != GrantState::Dead)
                };
                if !owners.share(page, id.row(), grants, lives, self.max_sharers) {
                    self.crowded.get_or_insert(page);
                }
                continue;
            }
            owners.acquire(page, id.row(), |old| grants.unpin(old));
            grants.pin(id.row());
        }
    }

    /// The name of the next grant, as [`GrantId::to_raw`] will give it.
    pub fn next(&self) -> u64 {
        self.grants.next().to_raw()
    }

    /// The grant behind `id`.
    pub fn get(&self, id: GrantId) -> Option<&Grant> {
        self.grants.named(id)
    }

    /// Unmap has returned without the buffer: the device has no business there any more, but the
    /// owner does not use it yet.
    pub fn withhold(&mut self, id: GrantId) {
        self.grants.set(id, GrantState::Withheld);
    }

    /// The layer has handed the buffer back.
    pub fn release(&mut self, id: GrantId) {
        self.grants.set(id, GrantState::Dead);
        self.grants.unpin(id.row());
    }

    /// The hardware let `device` reach `reached` through `iova`. `bytes` stay within one page.
    #[inline]
    pub fn allowed(
        &mut self,
        device: usize,
        iova: Iova,
        bytes: u64,
        access: Access,
        reached: PhysAddr,
    ) -> Verdict {
        let verdict = self.judge(device, iova, bytes, access, reached);
        self.tally.count(verdict);
        verdict
    }

    /// The hardware stopped `device`.
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
            // Where mappings share a page, it is theirs who live: what somebody had there before is
            // beside what they have.
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

/// The owners of a device's pages.
fn row_of(owners: &mut Vec<Owners>, device: usize) -> &mut Owners {
    if owners.len() <= device {
        owners.resize_with(device + 1, Owners::default);
    }
    &mut owners[device]
}

#[cfg(test)]
mod tests;
