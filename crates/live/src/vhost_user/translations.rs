//! What the device's thread and the conversation share: the IOTLB, and the misses under way.
//!
//! The device's thread asks and waits, offline; the conversation's thread hears the answers.
//! Neither waits for the other with the lock held: an invalidation waits for readers that are
//! online, and those never take it.

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
use crate::dma::Dma;

/// Times that a translation is asked for which is gone each time before it could be used.
const ATTEMPTS: usize = 16;

/// Translations that one access may ask for. The longest access is that of a disk's piece, 256 KiB
/// in at most 256 runs, and takes fewer pages; whoever needs more has them taken away as fast as
/// they come, for want of room or by the front-end, and would ask for ever.
const MAX_MISSES_PER_ACCESS: usize = 2048;

/// What came of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookupResult {
    /// It is there.
    Present,
    /// It is not to be had.
    Refused,
    /// The device is to stop.
    CutShort,
}

/// The IOTLB of one front-end's device.
pub(super) struct Translations {
    state: Mutex<State>,
    changed: Condvar,
    counters: Arc<DeviceCounters>,
}

struct State {
    iotlb: Iotlb<GuestMemoryMmap>,
    /// Where misses are sent.
    channel: Option<Arc<OwnedFd>>,
    /// Misses that were sent, in the order in which replies come.
    unreplied: VecDeque<MissId>,
    /// The miss that the device waits for, and what became of it.
    waits_for: Option<(MissId, Option<MissOutcome>)>,
    /// The device waits until fewer misses are under way.
    crowded: bool,
    /// Nothing is waited for any more.
    cut_short: bool,
}

impl Translations {
    pub(super) fn new(iotlb: Iotlb<GuestMemoryMmap>, counters: Arc<DeviceCounters>) -> Self {
        Self {
            state: Mutex::new(State {
                iotlb,
                channel: None,
                unreplied: VecDeque::new(),
                waits_for: None,
                crowded: false,
                cut_short: false,
            }),
            changed: Condvar::new(),
            counters,
        }
    }

    /// The state is whole whoever panicked: nothing is changed before it has been checked.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reader(self: &Arc<Self>) -> Result<IotlbMemory, IommuError> {
        Ok(IotlbMemory {
            reader: self.state().iotlb.reader()?,
            translations: Arc::clone(self),
            fault: None,
            asked: 0,
            cut_short: false,
        })
    }

    /// Whether the device waits for the front-end, and nothing that it was told since changes that.
    pub(super) fn waits(&self) -> bool {
        let state = self.state();
        let unanswered = match state.waits_for {
            Some((miss, None)) => !state.iotlb.has_arrived(miss),
            _ => false,
        };
        (unanswered || state.crowded) && !state.cut_short
    }

    /// Where the device asks.
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

    /// The front-end has something to say. When it returns `Ok`, it is done.
    pub(super) fn receive(&self, bytes: &[u8; 32]) -> Result<(), Refusal> {
        let message = Message::decode(bytes).map_err(Refusal::Message)?;
        let mut state = self.state();
        let done = state.iotlb.receive(&message);
        state.crowded = false;
        match (&done, message) {
            (Ok(()), Message::Update { .. }) => self.counters.iotlb_updates.add(1),
            (Ok(()), Message::Invalidate(_)) => self.counters.iotlb_invalidations.add(1),
            _ => {}
        }
        drop(state);
        self.changed.notify_all();
        done.map_err(Refusal::Iotlb)
    }

    /// Nothing that was said holds any more: the front-end no longer tells what the guest takes
    /// away.
    pub(super) fn clear(&self) {
        // Nobody who calls this is a reader.
        let _ = self.state().iotlb.receive(&Message::Invalidate(None));
    }

    /// The oldest miss has its reply.
    pub(super) fn replied(&self, done: bool) -> Result<(), Refusal> {
        let mut state = self.state();
        let miss = state.unreplied.pop_front().ok_or(IotlbError::NoMiss);
        let miss = miss.map_err(Refusal::Iotlb)?;
        let outcome = state.iotlb.replied(miss, done).map_err(Refusal::Iotlb)?;
        state.crowded = false;
        if let Some((waited, told)) = &mut state.waits_for
            && *waited == miss
        {
            *told = Some(outcome);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Whoever waits for a translation is sent away, and so is whoever comes, until
    /// [`go_on`](Self::go_on).
    pub(super) fn cut_short(&self) {
        self.state().cut_short = true;
        self.changed.notify_all();
    }

    pub(super) fn go_on(&self) {
        self.state().cut_short = false;
    }

    fn resolve(&self, fault: &Fault) -> LookupResult {
        let mut state = self.state();
        let mut gone = 0;
        let resolved = loop {
            if gone >= ATTEMPTS {
                break LookupResult::Refused;
            }
            if state.cut_short {
                break LookupResult::CutShort;
            }
            let miss = match state.iotlb.miss(fault) {
                Ok(MissAction::Present) => break LookupResult::Present,
                Ok(MissAction::Wait(miss)) => miss,
                Ok(MissAction::Send(miss, message)) => {
                    if !state.send(&message) {
                        // Without an answer it would stay under way.
                        let _ = state.iotlb.replied(miss, false);
                        break LookupResult::Refused;
                    }
                    self.counters.iotlb_misses.add(1);
                    state.unreplied.push_back(miss);
                    miss
                }
                Err(IotlbError::TooManyMisses) => {
                    state.crowded = true;
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
                if state.cut_short {
                    break None;
                }
                state = self.wait(state);
            };
            state.waits_for = None;
            match outcome {
                Some(MissOutcome::Present) => break LookupResult::Present,
                Some(MissOutcome::Refused) => break LookupResult::Refused,
                // Answered, and taken away meanwhile: asked again.
                Some(MissOutcome::Invalidated) | None => gone += 1,
            }
        };
        state.crowded = false;
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
    /// Whether the message is on its way. A front-end that does not read gets no more than its
    /// socket holds.
    fn send(&self, message: &Message) -> bool {
        let bytes = request(message);
        self.channel.as_ref().is_some_and(|channel| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            send(channel.as_fd(), &bytes, flags) == Ok(bytes.len())
        })
    }
}

/// The device's way to memory.
pub(super) struct IotlbMemory {
    translations: Arc<Translations>,
    reader: Reader<GuestMemoryMmap>,
    /// What the last access met.
    fault: Option<Fault>,
    /// Translations that were asked for since an access met no fault.
    asked: usize,
    cut_short: bool,
}

impl IotlbMemory {
    /// The device begins again.
    pub(super) fn begin(&mut self) {
        self.fault = None;
        self.asked = 0;
        self.cut_short = false;
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
            self.asked = 0;
            return false;
        };
        self.asked += 1;
        if self.asked > MAX_MISSES_PER_ACCESS {
            self.asked = 0;
            self.translations.counters.faults.add(1);
            return false;
        }
        let resolved = self.translations.resolve(&fault);
        if resolved != LookupResult::Present {
            self.asked = 0;
        }
        self.cut_short |= resolved == LookupResult::CutShort;
        resolved == LookupResult::Present
    }

    fn interrupted(&self) -> bool {
        self.cut_short
    }

    /// The guest's memory is the front-end's to share.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) {}
}
