//! Domains and processors that go away.
//!
//! A domain ends in this order: nothing is mapped in it, or the caller says that it does not
//! matter; what the flush policy holds back is flushed; the device's context entry is cleared; the
//! cached context and then everything cached of the domain is invalidated. Only then is the
//! identifier free for another domain, so that no cached translation of the old one is ever read as
//! the new one's (VT-d section 6.5.2: domains tag what is cached).
//!
//! What other processors know of the domain is found out by generations: their handles drop their
//! parts at their next call, and keep for the driver what a burst withholds. Tokens of the old
//! domain, whenever they turn up, are answered by what the detachment has made true: no device
//! reaches their buffers.

use core::fmt;

use ringfence_types::{
    Flushed, Invalidation, InvalidationError, Pending, RequesterId, WholeDomain,
};

use crate::domain_table::DomainHandle;
use crate::flush::{Flush, FlushContext};
use crate::space::Space;
use crate::{Attachment, Cpu, Dma, Platform};

/// What happens to mappings that live when the last device leaves their domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teardown {
    /// They are a reason not to detach. For drivers that clean up.
    IfUnused,
    /// They end with the domain: unmapping them later yields their buffers as
    /// [`UnmapReason::Detached`](crate::UnmapReason::Detached). For devices that were pulled out,
    /// and drivers that are gone.
    Forced,
}

/// What is left of a domain that no device is attached to.
#[must_use = "the space's tables are to be destroyed"]
#[derive(Debug)]
pub struct Detached<S> {
    /// The space, with whatever is still mapped in it.
    pub space: S,
    /// That nothing of the domain is cached: what destroying its table asks for.
    pub proof: Flushed<WholeDomain>,
}

/// Why a device was not detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DetachError {
    /// The device is not attached to that domain (any more), or the domain is not one of this
    /// layer.
    NotAttached(RequesterId),
    /// Mappings live in the domain of this device, the last one attached to it. Nothing has
    /// changed.
    MappingsLive(RequesterId),
    /// An invalidation failed. The device stays attached, though its context entry may be cleared
    /// already; to be tried again.
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

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Takes a device away from its domain, and with the last one the domain. `disconnect` clears
    /// the device's context entry in memory and makes that visible to hardware; it is called when
    /// nothing but an invalidation can fail any more, and again if the detachment is tried again.
    /// `each` receives the buffers that bursts of this processor withhold in the domain.
    ///
    /// What is left of a domain comes back; nothing if other devices stay in it. With mappings of a
    /// shared domain it makes no difference which of its devices they were made for: they live as
    /// long as the domain.
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
        let (index, attached) = (at.domain_handle.index(), DetachError::NotAttached(device));
        let space = self.space(at).ok_or(attached)?;
        let devices = &self.domain_slots.get(index).ok_or(attached)?.devices;
        if !devices.contains(&device) {
            return Err(attached);
        }
        let is_last = devices.len() == 1;
        if is_last {
            if teardown == Teardown::IfUnused && !space.is_empty(platform) {
                return Err(DetachError::MappingsLive(device));
            }
            self.drain_cpu(cpu, platform, index, each)
                .map_err(not_flushed)?;
            self.flush(cpu, platform, at).map_err(not_flushed)?;
        }
        disconnect(platform);
        let done = invalidate(platform, Invalidation::Context(device), ());
        let () = done.map_err(not_flushed)?.into_batch();
        if !is_last {
            if let Some(seat) = self.domain_slots.get_mut(index) {
                seat.devices.retain(|other| *other != device);
            }
            return Ok(None);
        }
        let domain = at.domain();
        let proof = invalidate(platform, Invalidation::Domain(domain), WholeDomain(domain))
            .map_err(not_flushed)?;
        if let Some(shared) = self.shared.get_mut(index) {
            *shared = None;
        }
        self.epoch = self.epoch.wrapping_add(1);
        let seat = self.domain_slots.get_mut(index).ok_or(attached)?;
        let space = seat.release().ok_or(attached)?;
        self.refresh_if_stale(cpu);
        Ok(Some(Detached { space, proof }))
    }

    /// Gives up a processor: ends its bursts, flushes what it has queued, and returns the addresses
    /// in its magazines. `each` receives every buffer that it withheld.
    ///
    /// # Errors
    /// An invalidation failed: the handle comes back with what it still holds, to be tried again.
    pub fn remove_cpu<P: Platform>(
        &self,
        mut cpu: Cpu<S, F, B>,
        platform: &mut P,
        mut each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Cpu<S, F, B>)> {
        self.refresh_if_stale(&mut cpu);
        self.release_withheld(&mut cpu, None, &mut each);
        let mut result = Ok(());
        for here in 0..self.domain_slots.len() {
            let left = self.drain_cpu(&mut cpu, platform, here, &mut each);
            result = result.and(left);
        }
        result.map_err(|error| (error, cpu))
    }

    /// Gives up what this processor holds of the domain at `here`.
    fn drain_cpu<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        here: usize,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        let Some(own) = cpu.flush.get_mut(here).and_then(Option::as_mut) else {
            return Ok(());
        };
        let mut home = FlushContext {
            domain_slots: &self.domain_slots,
            cpus: &mut cpu.spaces,
            domain_index: here,
        };
        let left = self.flush.drain_cpu(own, home.reborrow(), platform, each);
        home.sync(platform);
        home.drain();
        left
    }

    /// Hands up what this processor withholds of a domain that is gone, or of all of them.
    #[cold]
    pub(crate) fn release_withheld(
        &self,
        cpu: &mut Cpu<S, F, B>,
        of: Option<DomainHandle>,
        mut each: impl FnMut(B),
    ) {
        let mut at = 0;
        while let Some((tenant, _)) = cpu.detached.get(at) {
            if of.is_none_or(|of| of == *tenant) {
                self.flush
                    .release_withheld(cpu.detached.swap_remove(at).1, &mut each);
            } else {
                at += 1;
            }
        }
    }
}

/// Submits `request` for `batch` and waits.
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
