//! Hand-over of the unit: its mappings as records in the guest's view (`docs/PVIOMMU.md`,
//! "Migration records"). The new process resolves them again in the guest memory that it has
//! mapped.

use ringfence_pviommu::backend::{DeviceState, EVENTS as MOST_EVENTS};
use ringfence_pviommu::wire::{EVENT_BYTES, Event};

use super::Unit;
use crate::saved_state::{
    HandOverBlocker, MAX_STREAM_BYTES, Reader, SaveState, StateError, Writer, save_fields,
};

const EVENTS: StateError = StateError::Register {
    what: "events of the para-virtual IOMMU",
};

/// State of the para-virtual IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PviommuState {
    /// True if the driver has set `DRIVER_OK`.
    pub running: bool,
    /// Mappings, as a stream of records in the guest's view (`docs/PVIOMMU.md`).
    pub records: Vec<u8>,
    /// Events that the driver has not received.
    pub events: Vec<u8>,
}

save_fields! {
    PviommuState {
        running,
        records: blob("length of mapping records", MAX_STREAM_BYTES),
        events: blob("length of events", MAX_STREAM_BYTES),
    }
}

impl Unit {
    /// Returns the state that another process's unit needs.
    ///
    /// # Errors
    /// A mapping cannot be expressed as a record.
    pub(crate) fn save(&self) -> Result<PviommuState, HandOverBlocker> {
        // Every device, assigned or not, is a model: the hand-over stream has its registers.
        let records = self.backend.export(|_| DeviceState::Transferred);
        Ok(PviommuState {
            running: self.running,
            records: records
                .map_err(|_| HandOverBlocker::Unsupported("a mapping of the last page"))?,
            events: self.backend.waiting().flat_map(Event::encode).collect(),
        })
    }

    /// Restores the state of another process's unit. The guest's memory must be set, and no driver
    /// started.
    ///
    /// # Errors
    /// The state is invalid; nothing was restored.
    pub(crate) fn restore(&mut self, state: &PviommuState) -> Result<(), StateError> {
        let (events, rest) = state.events.as_chunks::<EVENT_BYTES>();
        let events: Option<Vec<Event>> = events.iter().map(Event::decode).collect();
        let events = events.filter(|_| rest.is_empty()).ok_or(EVENTS)?;
        if events.len() > MOST_EVENTS || events.iter().any(|event| !self.knows(event.device)) {
            return Err(EVENTS);
        }
        self.backend
            .restore(&state.records)
            .map_err(StateError::Records)?;
        let mapped = self.devices.iter().copied().map(super::devid);
        let mapped = mapped.map(|device| self.backend.mapped_pages(device));
        if !state.running && (mapped.sum::<u64>() > 0 || !events.is_empty()) {
            // The caller gives the whole IOMMU up.
            let _ = self.reset();
            return Err(StateError::Register {
                what: "state of a para-virtual IOMMU without a driver",
            });
        }
        if state.running {
            self.start();
        }
        events
            .into_iter()
            .for_each(|event| self.backend.wait(event));
        Ok(())
    }

    fn knows(&self, device: ringfence_pviommu::wire::Devid) -> bool {
        let mut devices = self.devices.iter().copied();
        devices.any(|own| super::devid(own) == device)
    }
}
