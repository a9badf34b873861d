//! MSI-X vectors: eventfds that the client has handed over.

use std::io;
use std::os::fd::OwnedFd;

use ringfence_vfio_user::{IrqAction, IrqData, SetIrqs};

use crate::event::{is_eventfd, signal};
use crate::pci::BusMasterGuard;
use crate::saved_state::StateError;
use crate::session::{ERROR_IRQ, FunctionError, MSIX_IRQ};

/// `VIRTIO_MSI_NO_VECTOR`: "no vector" in virtio's registers.
pub(crate) const NO_VECTOR: u16 = 0xffff;

/// The vectors of a function.
#[derive(Debug)]
pub(crate) struct Vectors {
    events: Vec<Option<OwnedFd>>,
}

impl Vectors {
    pub(crate) fn new(count: u16) -> Self {
        Self {
            events: (0..count).map(|_| None).collect(),
        }
    }

    /// Duplicates the eventfds for another process.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub(crate) fn save(&self) -> io::Result<Vec<Option<OwnedFd>>> {
        let clone = |event: &Option<OwnedFd>| event.as_ref().map(OwnedFd::try_clone).transpose();
        self.events.iter().map(clone).collect()
    }

    /// Replaces all vectors. `events` has one entry for each vector; each descriptor must be an
    /// eventfd.
    ///
    /// # Errors
    /// The number or kind of descriptors is wrong. The vectors are unchanged.
    pub(crate) fn restore(&mut self, events: Vec<Option<OwnedFd>>) -> Result<(), StateError> {
        if events.len() != self.events.len() {
            return Err(StateError::Register { what: "vectors" });
        }
        if !events.iter().flatten().all(is_eventfd) {
            return Err(StateError::NotA { what: "eventfd" });
        }
        self.events = events;
        Ok(())
    }

    /// Returns the number of vectors of this interrupt type (VFIO). Clients expect one for errors.
    pub(crate) fn count(&self, index: u32) -> u32 {
        match index {
            MSIX_IRQ => u32::try_from(self.events.len()).unwrap_or(u32::MAX),
            ERROR_IRQ => 1,
            _ => 0,
        }
    }

    pub(crate) fn has(&self, vector: u16) -> bool {
        usize::from(vector) < self.events.len()
    }

    /// Sends the message of `vector` on behalf of the function, which must be a bus master.
    pub(crate) fn signal(&self, vector: u16, _by: BusMasterGuard<'_>) {
        self.raise(vector);
    }

    /// Signals a vector if it has an eventfd.
    fn raise(&self, vector: u16) {
        let Some(Some(event)) = self.events.get(usize::from(vector)) else {
            return;
        };
        signal(event);
    }

    pub(crate) fn set(&mut self, request: SetIrqs) -> Result<(), FunctionError> {
        let SetIrqs {
            index,
            start,
            count,
            action,
            data,
        } = request;
        let none = FunctionError::NoSuchVector {
            index,
            start,
            count,
        };
        // The function never reports an error this way, but clients expect the error IRQ: one
        // vector, never signalled.
        if index == ERROR_IRQ && start == 0 && count <= 1 {
            return Ok(());
        }
        // The other kinds have no vectors; disabling zero vectors succeeds.
        if index != MSIX_IRQ {
            return match (count, &data) {
                (0, IrqData::None) => Ok(()),
                _ => Err(none),
            };
        }
        if action != IrqAction::Trigger {
            return Err(FunctionError::IrqUnsupported { index });
        }
        if count == 0 {
            let IrqData::None = data else {
                return Err(none);
            };
            self.events.iter_mut().for_each(|event| *event = None);
            return Ok(());
        }
        let from = usize::try_from(start).map_err(|_| none)?;
        let to = usize::try_from(count)
            .ok()
            .and_then(|count| from.checked_add(count))
            .ok_or(none)?;
        let run = self.events.get_mut(from..to).ok_or(none)?;
        match data {
            IrqData::Events(fds) if fds.is_empty() => {
                run.iter_mut().for_each(|event| *event = None)
            }
            IrqData::Events(fds) => {
                for (vector, fd) in (start..).zip(&fds) {
                    if !is_eventfd(fd) {
                        return Err(FunctionError::NotAnEvent { vector });
                    }
                }
                for (event, fd) in run.iter_mut().zip(fds) {
                    *event = Some(fd);
                }
            }
            IrqData::None => (start..start.saturating_add(count)).for_each(|v| self.trigger(v)),
            IrqData::Bools(bools) => {
                for (vector, on) in (start..).zip(bools) {
                    if on != 0 {
                        self.trigger(vector);
                    }
                }
            }
        }
        Ok(())
    }

    /// Signals a vector for the client, without a bus transaction.
    fn trigger(&self, vector: u32) {
        if let Ok(vector) = u16::try_from(vector) {
            self.raise(vector);
        }
    }
}
