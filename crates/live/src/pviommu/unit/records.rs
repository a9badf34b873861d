//! What the unit holds, for another process: its mappings as records in the guest's view
//! (`docs/PVIOMMU.md`, "Migration records"). Where they lead is found anew there, from the guest's
//! memory as it is mapped then.

use ringfence_pviommu::backend::EVENTS as MOST_EVENTS;
use ringfence_pviommu::wire::{EVENT_BYTES, Event};

use super::Unit;
use crate::handover::{HandOverBlocker, PviommuState, StateError};

const EVENTS: StateError = StateError::Register {
    what: "events of the para-virtual IOMMU",
};

impl Unit {
    /// What another process's unit needs.
    ///
    /// # Errors
    /// There are mappings that no record can say.
    pub(crate) fn save(&self) -> Result<PviommuState, HandOverBlocker> {
        let records = self.backend.export();
        Ok(PviommuState {
            running: self.running,
            records: records.map_err(|_| HandOverBlocker::Keeps("a mapping of the last page"))?,
            events: self.backend.waiting().flat_map(Event::encode).collect(),
        })
    }

    /// Takes over what another's held. The guest's memory is here, and the driver has not begun.
    ///
    /// # Errors
    /// Nothing was taken over.
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
            self.reset();
            return Err(StateError::Register {
                what: "para-virtual IOMMU without a driver",
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
