//! The unit: its parts, its records, and its end.

use ringfence_pgtable::{Coherency, TableMemory};
use ringfence_types::{FrameSource, PhysMemory, Registers, RequesterId};

use crate::attachments::Attachments;
use crate::capabilities::Capabilities;
use crate::command_queue::CommandQueue;
use crate::context::Contexts;
use crate::error::UnitError;
use crate::event::{EventRecord, FaultEvent};
use crate::event_queue::EventQueue;
use crate::global_errors::GlobalErrors;
use crate::options::Options;
use crate::start::stop;
use crate::stream_table::StreamTable;

/// An SMMUv3 that translates. Devices are blocked until they are attached.
///
/// All methods take `&mut self`: the embedder serialises them, for example by a lock. A dropped
/// unit keeps its frames and its state; call [`disable`](Self::disable) to end it.
#[derive(Debug)]
pub struct Unit<R, M, S> {
    pub(crate) registers: R,
    pub(crate) memory: M,
    pub(crate) frames: S,
    pub(crate) options: Options,
    pub(crate) capabilities: Capabilities,
    /// The value of `CR0`.
    pub(crate) control: u32,
    pub(crate) streams: StreamTable,
    pub(crate) contexts: Contexts,
    pub(crate) commands: CommandQueue,
    pub(crate) events: EventQueue,
    pub(crate) errors: GlobalErrors,
    pub(crate) attachments: Attachments,
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Returns the features of the unit.
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Returns the coherency of the unit's table walk.
    pub const fn coherency(&self) -> Coherency {
        self.capabilities.coherency()
    }

    /// Returns the stream id of a requester.
    ///
    /// # Errors
    /// [`UnitError::DeviceBeyondTable`].
    pub fn stream_id(&self, device: RequesterId) -> Result<u32, UnitError> {
        let stream = self
            .options
            .first_stream_id
            .checked_add(device.get().into());
        let reached = stream.filter(|stream| self.streams.shape().reaches(*stream));
        reached.ok_or(UnitError::DeviceBeyondTable { device })
    }

    /// Returns the requester of a stream id, such as that of a [`EventRecord`]; `None` if it
    /// belongs to no requester id.
    pub fn requester(&self, stream_id: u32) -> Option<RequesterId> {
        let id = stream_id.checked_sub(self.options.first_stream_id)?;
        u16::try_from(id).ok().map(RequesterId::new)
    }

    /// Takes the next entry of the event queue, or reports once that entries were lost.
    pub fn next_fault(&mut self) -> Option<FaultEvent> {
        let memory = tables(&self.memory, &self.capabilities);
        if let Some(raw) = self.events.pop(&self.registers, &memory) {
            let record = EventRecord::decode(raw);
            return Some(record.map_or(FaultEvent::Malformed(raw), FaultEvent::Record));
        }
        let loss = self.events.take_loss(&self.registers, &mut self.errors);
        loss.map(FaultEvent::Lost)
    }

    /// Turns the unit off, which aborts all accesses, and frees all frames.
    ///
    /// # Errors
    /// Returns the unit if it did not stop: it may still access its memory.
    // The unit is large, and disable is rare.
    #[allow(clippy::result_large_err)]
    pub fn disable(self) -> Result<(), (Self, UnitError)> {
        match stop(&self.registers, self.options.poll_limit) {
            Ok(()) => {
                self.free();
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Frees all frames of a unit that has stopped.
    pub(crate) fn free(&self) {
        let memory = tables(&self.memory, &self.capabilities);
        self.streams.destroy(&memory, &self.frames);
        self.contexts.destroy(&self.frames);
        self.frames.free(self.commands.frame());
        self.frames.free(self.events.frame());
    }
}

/// Returns the memory of tables and queues.
pub(crate) fn tables<'m, M: PhysMemory>(memory: &'m M, unit: &Capabilities) -> TableMemory<'m, M> {
    TableMemory::new(memory, unit.coherency(), unit.address_bits)
}
