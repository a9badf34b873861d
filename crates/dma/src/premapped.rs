//! Buffers mapped once and used many times (OS19; Fujita and Moriai, section 2.2).
//!
//! A DMA needs no map and no unmap. The price is exposure: the device reaches every buffer of the
//! pool until it is unmapped, also while the CPU owns the buffer. The safety of such a mapping is
//! `none`, whatever the flush policy: only unmapping ends the exposure. A driver that keeps the
//! buffers of a pool for this device, as Linux's page_pool and registered buffers do, exposes no
//! other memory. The device may still change a buffer while the CPU reads it, so the CPU reads each
//! byte once, by copying. A buffer leaves the pool by [`Dma::trim_premapped`] or
//! [`Dma::unmap_premapped`] alone. The types order the accesses of the driver; they do not restrict
//! the device:
//!
//! ```text
//! pool --acquire--> CpuOwned --post--> DeviceOwned --reap--> CpuOwned --release--> pool
//! ```

use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;

use ringfence_types::{Direction, Iova, IovaRange};

use crate::flush::FlushPolicy;
use crate::multi::{MapMultiError, MapMultiRequest, UnmapMultiError};
use crate::space::Space;
use crate::token::{Attachment, Mapping};
use crate::{Cpu, Dma, Platform};

/// Mapped buffers of one device that are ready for use. Dropping the pool leaks them: see
/// [`Dma::unmap_premapped`].
#[must_use = "buffers of a pool that is dropped stay reachable by the device for ever"]
#[derive(Debug)]
pub struct Premapped<B> {
    at: Attachment,
    /// Distinguishes the pools of one layer.
    id: u64,
    idle: Vec<Mapping<B>>,
    in_use: usize,
}

/// A buffer of a pool that the CPU owns.
#[must_use = "a buffer that does not come back keeps its pool alive"]
#[derive(Debug)]
pub struct CpuOwned<B> {
    mapping: Mapping<B>,
    pool: u64,
}

/// A buffer of a pool that the device owns. Only this state has an address for the device.
#[must_use = "a buffer that does not come back keeps its pool alive"]
#[derive(Debug)]
pub struct DeviceOwned<B> {
    mapping: Mapping<B>,
    pool: u64,
}

impl<B> CpuOwned<B> {
    /// Returns the embedder's representation of the buffer.
    pub fn buffer(&self) -> &B {
        self.mapping.buffer()
    }

    /// Returns the direction.
    pub fn direction(&self) -> Direction {
        self.mapping.direction()
    }
}

impl<B> DeviceOwned<B> {
    /// Returns the DMA address for the device.
    pub fn iova(&self) -> Iova {
        self.mapping.iova()
    }

    /// Returns the mapped bytes of the I/O virtual address space.
    pub fn range(&self) -> IovaRange {
        self.mapping.range()
    }
}

impl<B> Premapped<B> {
    /// Takes an idle buffer, last in first out, so that it is likely to be in the IOTLB and the CPU
    /// caches. `None` if all buffers are in use.
    pub fn acquire(&mut self) -> Option<CpuOwned<B>> {
        let mapping = self.idle.pop()?;
        self.in_use = self.in_use.saturating_add(1);
        Some(CpuOwned {
            mapping,
            pool: self.id,
        })
    }

    /// Puts a buffer back into the pool.
    ///
    /// # Errors
    /// Returns the buffer if it belongs to another pool, of this domain or another one, even if
    /// that domain had the same identifier.
    pub fn release(&mut self, loan: CpuOwned<B>) -> Result<(), CpuOwned<B>> {
        let is_own =
            loan.pool == self.id && loan.mapping.live.domain_handle == self.at.domain_handle;
        match self.in_use.checked_sub(1) {
            Some(lent) if is_own => {
                self.in_use = lent;
                self.idle.push(loan.mapping);
                Ok(())
            }
            _ => Err(loan),
        }
    }

    /// Returns the number of idle buffers.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Returns the number of buffers in use.
    pub fn in_use(&self) -> usize {
        self.in_use
    }
}

/// The reason why a pool was not unmapped.
#[derive(Debug)]
#[non_exhaustive]
pub enum PremappedError<B> {
    /// Buffers are in use: their number, and the unchanged pool.
    InUse(usize, Premapped<B>),
    /// Some mappings were rejected, or their invalidation failed.
    Unmap(UnmapMultiError<B>),
}

impl<B> fmt::Display for PremappedError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(count, _) => write!(f, "{count} buffers of the pool are in use"),
            Self::Unmap(error) => error.fmt(f),
        }
    }
}

impl<B: fmt::Debug> core::error::Error for PremappedError<B> {}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Maps every buffer of `requests` for the life of the pool, or none of them.
    ///
    /// # Errors
    /// As for [`map_multi`](Self::map_multi).
    pub fn premap<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        requests: Vec<MapMultiRequest<B>>,
    ) -> Result<Premapped<B>, MapMultiError<B>> {
        let idle = self.map_multi(cpu, platform, at, requests)?;
        Ok(Premapped {
            at: *at,
            id: self.pools.fetch_add(1, Ordering::Relaxed),
            idle,
            in_use: 0,
        })
    }

    /// Transfers a buffer to the device, which then reads the data that the CPU wrote.
    pub fn post<P: Platform>(&self, platform: &P, loan: CpuOwned<B>) -> DeviceOwned<B> {
        self.sync_for_device(platform, &loan.mapping);
        DeviceOwned {
            mapping: loan.mapping,
            pool: loan.pool,
        }
    }

    /// Transfers a buffer to the CPU, which then reads the data that the device wrote.
    pub fn reap<P: Platform>(&self, platform: &P, posted: DeviceOwned<B>) -> CpuOwned<B> {
        self.sync_for_cpu(platform, &posted.mapping);
        CpuOwned {
            mapping: posted.mapping,
            pool: posted.pool,
        }
    }

    /// Unmaps idle buffers until `keep` remain, those that were released longest ago first. `each`
    /// receives the buffers that the policy releases. Buffers in use stay in the pool.
    ///
    /// # Errors
    /// As for [`unmap_multi`](Self::unmap_multi). The error owns the buffers that are not unmapped;
    /// they have left the pool.
    #[expect(
        clippy::result_large_err,
        reason = "the error owns the mappings, and a box could fail to allocate"
    )]
    pub fn trim_premapped<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        pool: &mut Premapped<B>,
        keep: usize,
        each: impl FnMut(B),
    ) -> Result<(), UnmapMultiError<B>> {
        let excess = pool.idle.len().saturating_sub(keep);
        let oldest = pool.idle.drain(..excess).collect();
        self.unmap_multi(cpu, platform, &pool.at, oldest, each)
    }

    /// Unmaps the pool like [`unmap_multi`](Self::unmap_multi). `each` receives the buffers that
    /// the policy releases.
    ///
    /// # Errors
    /// See [`PremappedError`].
    #[expect(
        clippy::result_large_err,
        reason = "the error owns the mappings, and a box could fail to allocate"
    )]
    pub fn unmap_premapped<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        pool: Premapped<B>,
        each: impl FnMut(B),
    ) -> Result<(), PremappedError<B>> {
        if pool.in_use > 0 {
            return Err(PremappedError::InUse(pool.in_use, pool));
        }
        self.unmap_multi(cpu, platform, &pool.at, pool.idle, each)
            .map_err(PremappedError::Unmap)
    }
}
