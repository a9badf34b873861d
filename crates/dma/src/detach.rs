//! Removal of devices, domains and CPUs.
//!
//! The layer removes a domain in this order:
//!
//! 1. It checks that nothing is mapped, unless the caller forces the removal.
//! 2. It flushes all unmaps that the flush policy has deferred.
//! 3. The caller clears the device's context entry.
//! 4. The layer invalidates the cached context entry, then every cached entry of the domain.
//!
//! Only then may another domain use the identifier. Caches tag their entries with it (VT-d section
//! 6.5.2), so no translation of the old domain ever serves the new one.
//!
//! Other CPUs detect the removal by generations. At their next call, their handles drop their state
//! of the domain and keep the buffers that a burst withholds. The layer answers later uses of the
//! domain's tokens with their buffers, because no device reaches them any more.

use core::fmt;

use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Pending, RequesterId, WholeDomain,
};

use crate::domain_table::domain_index;
use crate::error::UnmapFailure;
use crate::flush::{FlushPolicy, OpenBursts};
use crate::space::Space;
use crate::token::{Attachment, DomainHandle};
use crate::{Cpu, Dma, Platform};

/// The treatment of live mappings when the last device leaves their domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teardown {
    /// Live mappings prevent the detach. For drivers that unmap everything first.
    IfUnused,
    /// Live mappings end with the domain. A later unmap returns their buffers as
    /// [`UnmapReason::Detached`](crate::UnmapReason::Detached). For surprise removal of a device,
    /// and for drivers that were unloaded.
    Forced,
}

/// A removed domain's space, with the proof that allows destroying its tables.
#[must_use = "the space's tables are to be destroyed"]
#[derive(Debug)]
pub struct Detached<S> {
    /// The space, with all mappings that were still live.
    pub space: S,
    /// Proof that no cache holds an entry of the domain; required to destroy its table.
    pub proof: Flushed<WholeDomain>,
}

/// The reason why a device was not detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DetachError {
    /// The device is not attached to that domain, or the domain belongs to another layer.
    NotAttached(RequesterId),
    /// The domain of this device, its last one, has live mappings. Nothing changed.
    MappingsLive(RequesterId),
    /// An invalidation failed. The device stays attached, though its context entry may be cleared
    /// already. Try again.
    NotFlushed(RequesterId, InvalidationError),
}

impl fmt::Display for DetachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAttached(device) => write!(f, "{device} is not attached"),
            Self::MappingsLive(device) => write!(f, "{device} has live mappings"),
            Self::NotFlushed(device, error) => write!(f, "cannot detach {device}: {error}"),
        }
    }
}

impl core::error::Error for DetachError {}

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Detaches a device from its domain, and removes the domain with its last device.
    ///
    /// `disconnect` clears the device's context entry in memory and makes that visible to hardware.
    /// The layer calls it when only an invalidation can still fail, and again at each retry. `each`
    /// receives the buffers that bursts of this CPU withhold in the domain.
    ///
    /// Returns the space of the removed domain. `None` if other devices stay in it. Mappings of a
    /// shared domain live as long as the domain, whichever of its devices they were made for.
    ///
    /// # Errors
    /// See [`DetachError`].
    pub fn detach<P: Platform>(
        &mut self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        teardown: Teardown,
        disconnect: impl FnOnce(&mut P),
        each: impl FnMut(B),
    ) -> Result<Option<Detached<S>>, DetachError> {
        let device = at.device;
        let not_flushed = |error| DetachError::NotFlushed(device, error);
        self.refresh_if_stale(cpu);
        let (domain, attached) = (at.domain(), DetachError::NotAttached(device));
        let space = self.space(at).ok_or(attached)?;
        let devices = &self.domains.get(domain).ok_or(attached)?.devices;
        if !devices.contains(&device) {
            return Err(attached);
        }
        let is_last = devices.len() == 1;
        if is_last {
            if teardown == Teardown::IfUnused && !space.is_empty(platform) {
                return Err(DetachError::MappingsLive(device));
            }
            self.drain_cpu(cpu, platform, domain, each)
                .map_err(not_flushed)?;
            match self.flush(cpu, platform, at) {
                // No device reaches an entry that the table refuses to clear once the domain ends.
                Ok(()) | Err(UnmapFailure::Refused(_)) => {}
                Err(UnmapFailure::NotFlushed(error)) => return Err(not_flushed(error)),
            }
        }
        disconnect(platform);
        let done = invalidate(platform, Invalidation::Context(device), ());
        let () = done.map_err(not_flushed)?.into_batch();
        if !is_last {
            if let Some(slot) = self.domains.get_mut(domain) {
                slot.devices.retain(|other| *other != device);
            }
            return Ok(None);
        }
        let proof = invalidate(platform, Invalidation::Domain(domain), WholeDomain(domain))
            .map_err(not_flushed)?;
        if let Some(shared) = self.shared.get_mut(domain_index(domain)) {
            *shared = None;
        }
        self.epoch = self.epoch.wrapping_add(1);
        let slot = self.domains.get_mut(domain).ok_or(attached)?;
        let space = slot.release().ok_or(attached)?;
        self.refresh_if_stale(cpu);
        Ok(Some(Detached { space, proof }))
    }

    /// Removes a CPU: ends its bursts, flushes its queues and frees the addresses in its magazines.
    /// `each` receives every buffer that it withheld.
    ///
    /// # Errors
    /// If an invalidation failed, returns the handle with the state that it still holds. Try again.
    pub fn remove_cpu<P: Platform>(
        &self,
        mut cpu: Cpu<S, F, B>,
        platform: &mut P,
        mut each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Cpu<S, F, B>)> {
        self.refresh_if_stale(&mut cpu);
        self.release_withheld(&mut cpu, None, &mut each);
        let mut result = Ok(());
        for slot in self.domains.iter() {
            let domain = slot.handle().domain();
            let left = self.drain_cpu(&mut cpu, platform, domain, &mut each);
            result = result.and(left);
        }
        result.map_err(|error| (error, cpu))
    }

    /// Releases this CPU's state of `domain`.
    fn drain_cpu<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        domain: DomainId,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let Some(own) = cpu
            .flush
            .get_mut(domain_index(domain))
            .and_then(Option::as_mut)
        else {
            return Ok(());
        };
        let mut ctx = self.flush_ctx(&mut cpu.spaces, domain);
        let left = self.flush.drain_cpu(own, ctx.reborrow(), platform, each);
        ctx.sync(platform);
        ctx.drain();
        left
    }

    /// Passes to `each` the buffers that this CPU withholds of the detached domain `of`, or of
    /// every detached domain if `of` is `None`.
    #[cold]
    pub(crate) fn release_withheld(
        &self,
        cpu: &mut Cpu<S, F, B>,
        of: Option<DomainHandle>,
        mut each: impl FnMut(B),
    ) {
        let mut at = 0;
        while let Some((handle, _)) = cpu.detached.get(at) {
            if of.is_none_or(|of| of == *handle) {
                let (_, state) = cpu.detached.swap_remove(at);
                state.release_withheld(&mut each);
            } else {
                at += 1;
            }
        }
    }
}

/// Submits `request` for `batch` and waits for completion.
fn invalidate<T: ringfence_types::Batch, P: Platform>(
    platform: &mut P,
    request: Invalidation,
    batch: T,
) -> Result<Flushed<T>, InvalidationError> {
    Pending::submit(platform.invalidator(), request, batch)
        .map_err(|(_, error)| error)?
        .wait(platform.invalidator())
        .map_err(|(_, error)| error)
}
