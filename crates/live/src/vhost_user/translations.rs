//! State shared by the device's thread and the session: the IOTLB and the misses in flight.
//!
//! The device's thread sends misses and waits for them offline; the session's thread receives the
//! answers. Neither thread waits for the other with the lock held. An invalidation waits for online
//! readers, and an online reader never takes the lock.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ringfence_softiommu::iotlb::{
    Iotlb, IotlbError, Message, MissAction, MissId, MissOutcome, Regions, request,
};
use ringfence_softiommu::{IommuError, ReadGuard, Reader};
use ringfence_types::Fault;
use rustix::net::{SendFlags, send};
use vm_memory::GuestMemoryMmap;

use super::refusal::Refusal;
use crate::counters::DeviceCounters;
use crate::dma::{Dma, MemoryInUse};

/// Retries of a miss whose translation is invalidated before the device can use it.
const ATTEMPTS: usize = 16;

/// Most misses of one access. The longest access is a disk's piece of 256 KiB in at most 256 runs,
/// which spans fewer pages. An access beyond the limit loses translations as fast as they arrive,
/// by eviction or invalidation, and would retry forever.
const MAX_MISSES_PER_ACCESS: usize = 2048;

/// Result of resolving a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookupResult {
    /// The IOTLB has the translation.
    Present,
    /// The front-end refused the translation.
    Refused,
    /// The wait was interrupted because the device must stop.
    Interrupted,
}

/// The IOTLB of one front-end's device.
pub(super) struct Translations {
    state: Mutex<State>,
    changed: Condvar,
    counters: Arc<DeviceCounters>,
}

struct State {
    iotlb: Iotlb<GuestMemoryMmap>,
    /// Channel to the front-end for misses.
    channel: Option<Arc<OwnedFd>>,
    /// Misses without a reply, in the order in which replies arrive.
    unreplied: VecDeque<MissId>,
    /// The miss that the device waits for, and its outcome if known.
    waits_for: Option<(MissId, Option<MissOutcome>)>,
    /// True if the device waits because too many misses are in flight.
    waits_for_room: bool,
    /// True if all waits are interrupted.
    interrupted: bool,
}

impl Translations {
    pub(super) fn new(iotlb: Iotlb<GuestMemoryMmap>, counters: Arc<DeviceCounters>) -> Self {
        Self {
            state: Mutex::new(State {
                iotlb,
                channel: None,
                unreplied: VecDeque::new(),
                waits_for: None,
                waits_for_room: false,
                interrupted: false,
            }),
            changed: Condvar::new(),
            counters,
        }
    }

    /// A panic leaves the state consistent: every change is preceded by its checks.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reader(self: &Arc<Self>) -> Result<IotlbMemory, IommuError> {
        Ok(IotlbMemory {
            reader: self.state().iotlb.reader()?,
            translations: Arc::clone(self),
            fault: None,
            misses: 0,
            interrupted: false,
        })
    }

    /// Returns true if the device waits for the front-end, and no message received so far ends the
    /// wait.
    pub(super) fn waits(&self) -> bool {
        let state = self.state();
        let unanswered = match state.waits_for {
            Some((miss, None)) => !state.iotlb.has_arrived(miss),
            _ => false,
        };
        (unanswered || state.waits_for_room) && !state.interrupted
    }

    /// Sets the channel on which the device sends misses.
    pub(super) fn set_channel(&self, channel: Arc<OwnedFd>) {
        self.state().channel = Some(channel);
    }

    pub(super) fn set_memory(
        &self,
        memory: GuestMemoryMmap,
        regions: Regions,
    ) -> Result<(), IotlbError> {
        self.state().iotlb.set_memory(memory, regions)
    }

    /// Handles an IOTLB message of the front-end. On `Ok`, an invalidation is complete.
    pub(super) fn receive(&self, bytes: &[u8; 32]) -> Result<(), Refusal> {
        let message = Message::decode(bytes).map_err(Refusal::Message)?;
        let mut state = self.state();
        let done = state.iotlb.receive(&message);
        state.waits_for_room = false;
        match (&done, message) {
            (Ok(()), Message::Update { .. }) => self.counters.iotlb_updates.add(1),
            (Ok(()), Message::Invalidate(_)) => self.counters.iotlb_invalidations.add(1),
            _ => {}
        }
        drop(state);
        self.changed.notify_all();
        done.map_err(Refusal::Iotlb)
    }

    /// Discards all translations. The front-end no longer sends invalidations from here on.
    pub(super) fn clear(&self) {
        // The call fails only for a reader, and the caller is not one.
        let _ = self.state().iotlb.receive(&Message::Invalidate(None));
    }

    /// Handles the reply to the oldest miss.
    pub(super) fn replied(&self, done: bool) -> Result<(), Refusal> {
        let mut state = self.state();
        let miss = state.unreplied.pop_front().ok_or(IotlbError::NoMiss);
        let miss = miss.map_err(Refusal::Iotlb)?;
        let outcome = state.iotlb.replied(miss, done).map_err(Refusal::Iotlb)?;
        state.waits_for_room = false;
        if let Some((waited, report)) = &mut state.waits_for
            && *waited == miss
        {
            *report = Some(outcome);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Interrupts current and future waits for translations, until [`resume`](Self::resume).
    pub(super) fn interrupt(&self) {
        self.state().interrupted = true;
        self.changed.notify_all();
    }

    pub(super) fn resume(&self) {
        self.state().interrupted = false;
    }

    fn resolve(&self, fault: &Fault) -> LookupResult {
        let mut state = self.state();
        let mut invalidated = 0;
        let resolved = loop {
            if invalidated >= ATTEMPTS {
                break LookupResult::Refused;
            }
            if state.interrupted {
                break LookupResult::Interrupted;
            }
            let miss = match state.iotlb.miss(fault) {
                Ok(MissAction::Present) => break LookupResult::Present,
                Ok(MissAction::Wait(miss)) => miss,
                Ok(MissAction::Send(miss, message)) => {
                    if !state.send(&message) {
                        // No reply will come, so complete the miss here.
                        let _ = state.iotlb.replied(miss, false);
                        break LookupResult::Refused;
                    }
                    self.counters.iotlb_misses.add(1);
                    state.unreplied.push_back(miss);
                    miss
                }
                Err(IotlbError::TooManyMisses) => {
                    state.waits_for_room = true;
                    state = self.wait(state);
                    continue;
                }
                Err(_) => break LookupResult::Refused,
            };
            state.waits_for = Some((miss, None));
            let outcome = loop {
                if state.iotlb.has_arrived(miss) {
                    break Some(MissOutcome::Present);
                }
                if let Some((_, Some(outcome))) = state.waits_for {
                    break Some(outcome);
                }
                if state.interrupted {
                    break None;
                }
                state = self.wait(state);
            };
            state.waits_for = None;
            match outcome {
                Some(MissOutcome::Present) => break LookupResult::Present,
                Some(MissOutcome::Refused) => break LookupResult::Refused,
                // The translation arrived and was invalidated in between, so ask again.
                Some(MissOutcome::Invalidated) | None => invalidated += 1,
            }
        };
        state.waits_for_room = false;
        drop(state);
        if resolved == LookupResult::Refused {
            self.counters.faults.add(1);
        }
        resolved
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let woken = self.changed.wait(state);
        woken.unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns true if the message was sent. Does not block: a front-end that does not read gets
    /// only as many messages as its socket buffers.
    fn send(&self, message: &Message) -> bool {
        let bytes = request(message);
        self.channel.as_ref().is_some_and(|channel| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            send(channel.as_fd(), &bytes, flags) == Ok(bytes.len())
        })
    }
}

/// Guest memory as the device accesses it.
pub(super) struct IotlbMemory {
    translations: Arc<Translations>,
    reader: Reader<GuestMemoryMmap>,
    /// Fault of the last access.
    fault: Option<Fault>,
    /// Misses since the last access without a fault.
    misses: usize,
    interrupted: bool,
}

impl IotlbMemory {
    /// Resets the state before the device's thread starts.
    pub(super) fn begin(&mut self) {
        self.fault = None;
        self.misses = 0;
        self.interrupted = false;
    }
}

impl Dma for IotlbMemory {
    type View<'a> = ReadGuard<'a, GuestMemoryMmap>;

    fn with<R>(&mut self, access: impl FnOnce(&ReadGuard<'_, GuestMemoryMmap>) -> R) -> R {
        let mut online = self.reader.online();
        let pin = online.guard();
        let result = access(&pin);
        self.fault = pin.take_fault();
        result
    }

    fn should_retry(&mut self) -> bool {
        let Some(fault) = self.fault.take() else {
            self.misses = 0;
            return false;
        };
        self.misses += 1;
        if self.misses > MAX_MISSES_PER_ACCESS {
            self.misses = 0;
            self.translations.counters.faults.add(1);
            return false;
        }
        let resolved = self.translations.resolve(&fault);
        if resolved != LookupResult::Present {
            self.misses = 0;
        }
        self.interrupted |= resolved == LookupResult::Interrupted;
        resolved == LookupResult::Present
    }

    fn interrupted(&self) -> bool {
        self.interrupted
    }

    /// Does nothing: the front-end shares the guest's memory.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        Ok(())
    }
}
