//! Buffers mapped once and used many times (OS19; Fujita and Moriai, section 2.2).
//!
//! Mapping and unmapping cost nothing here because they do not happen; what is paid instead is
//! exposure. The device reaches every buffer of the pool for as long as the pool lives, whoever's
//! turn it is: the safety of such a mapping is `bounded` by the life of the pool, whatever the
//! flush policy. The types order the turns, they do not enforce them on the device:
//!
//! ```text
//! pool --lend--> CpuOwned (the processor's turn) --post--> DeviceOwned (the device's turn) --reap--> CpuOwned --give_back--> pool
//! ```

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Direction, Iova, IovaRange};

use crate::flush::Flush;
use crate::multi::{MapMultiError, MapMultiRequest, UnmapMultiError};
use crate::space::Space;
use crate::{Attachment, Cpu, Dma, Mapping, Platform};

/// Mapped buffers of one device that wait to be used. Dropping it leaks them: see
/// [`Dma::unmap_premapped`].
#[must_use = "buffers of a pool that is dropped stay reachable by the device for ever"]
#[derive(Debug)]
pub struct Premapped<B> {
    at: Attachment,
    idle: Vec<Mapping<B>>,
    in_use: usize,
}

/// A buffer of a pool while it is the processor's turn.
#[must_use = "a buffer that does not come back keeps its pool alive"]
#[derive(Debug)]
pub struct CpuOwned<B> {
    mapping: Mapping<B>,
}

/// A buffer of a pool while it is the device's turn: only now there is an address to tell it.
#[must_use = "a buffer that does not come back keeps its pool alive"]
#[derive(Debug)]
pub struct DeviceOwned<B> {
    mapping: Mapping<B>,
}

impl<B> CpuOwned<B> {
    /// What stands for the buffer.
    pub fn buffer(&self) -> &B {
        self.mapping.buffer()
    }

    /// The direction.
    pub fn direction(&self) -> Direction {
        self.mapping.direction()
    }
}

impl<B> DeviceOwned<B> {
    /// What the device is told.
    pub fn iova(&self) -> Iova {
        self.mapping.iova()
    }

    /// The device-visible bytes.
    pub fn range(&self) -> IovaRange {
        self.mapping.range()
    }
}

impl<B> Premapped<B> {
    /// A buffer to use, last in first out, so that the IOTLB and the processor's caches know it;
    /// `None` if all are out.
    pub fn acquire(&mut self) -> Option<CpuOwned<B>> {
        let mapping = self.idle.pop()?;
        self.in_use = self.in_use.saturating_add(1);
        Some(CpuOwned { mapping })
    }

    /// Takes a buffer back for the next use.
    ///
    /// # Errors
    /// The loan comes back: it is of another domain's pool, whoever has that domain's identifier
    /// now, or none is out.
    pub fn release(&mut self, loan: CpuOwned<B>) -> Result<(), CpuOwned<B>> {
        match self.in_use.checked_sub(1) {
            Some(lent) if loan.mapping.live.domain_handle == self.at.domain_handle => {
                self.in_use = lent;
                self.idle.push(loan.mapping);
                Ok(())
            }
            _ => Err(loan),
        }
    }

    /// Buffers in the pool.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Buffers that are out.
    pub fn in_use(&self) -> usize {
        self.in_use
    }
}

/// Why a pool was not unmapped.
#[derive(Debug)]
#[non_exhaustive]
pub enum PremappedError<B> {
    /// This many buffers are out; the pool comes back.
    InUse(usize, Premapped<B>),
    /// Some of its mappings were refused, or their invalidation failed.
    Unmap(UnmapMultiError<B>),
}

impl<B> fmt::Display for PremappedError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(count, _) => write!(f, "{count} buffers of the pool are out"),
            Self::Unmap(error) => error.fmt(f),
        }
    }
}

impl<B: fmt::Debug> core::error::Error for PremappedError<B> {}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Maps every buffer of `requests` for as long as the pool lives, or none.
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
            idle,
            in_use: 0,
        })
    }

    /// The device's turn: after this call it reads what the processor wrote.
    pub fn post<P: Platform>(&self, platform: &P, loan: CpuOwned<B>) -> DeviceOwned<B> {
        self.sync_for_device(platform, &loan.mapping);
        DeviceOwned {
            mapping: loan.mapping,
        }
    }

    /// The processor's turn: after this call it reads what the device wrote.
    pub fn reap<P: Platform>(&self, platform: &P, posted: DeviceOwned<B>) -> CpuOwned<B> {
        self.sync_for_cpu(platform, &posted.mapping);
        CpuOwned {
            mapping: posted.mapping,
        }
    }

    /// Ends the pool as [`unmap_multi`](Self::unmap_multi) would; `each` receives the buffers that
    /// are back.
    ///
    /// # Errors
    /// See [`PremappedError`].
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
