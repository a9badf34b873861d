//! The unit: its parts, its records, and its end.

use ringfence_pgtable::TableMemory;
use ringfence_types::{FrameSource, PhysMemory, Registers, RequesterId, poll_until};

use crate::attachments::Attachments;
use crate::capabilities::Capabilities;
use crate::completion::Completion;
use crate::directory::Directory;
use crate::error::UnitError;
use crate::fault::{FaultEvent, FaultRecord};
use crate::invalidate::Planner;
use crate::options::Options;
use crate::page_request::{PageRequest, PageRequestEvent};
use crate::queue::Queue;
use crate::registers::{
    CQCSR, CQCSR_FENCE_W_IP, DDTP, DDTP_BUSY, DDTP_OFF, IPSR, IPSR_CIP, IPSR_FIP, IPSR_PIP, PPN,
    Register,
};

/// A RISC-V IOMMU.
///
/// All methods take `&mut self`: the embedder serialises them, for example by a lock.
#[derive(Debug)]
pub struct Unit<R, M> {
    pub(crate) registers: R,
    pub(crate) memory: M,
    pub(crate) options: Options,
    pub(crate) capabilities: Capabilities,
    pub(crate) directory: Directory,
    pub(crate) commands: Queue,
    pub(crate) faults: Queue,
    pub(crate) page_requests: Option<Queue>,
    pub(crate) completion: Completion,
    pub(crate) attachments: Attachments,
}

/// Interrupts that were pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PendingInterrupts {
    /// From the command queue: a completion or an error.
    pub commands: bool,
    /// From the fault queue.
    pub faults: bool,
    /// From the page-request queue.
    pub page_requests: bool,
}

impl<R: Registers, M: PhysMemory> Unit<R, M> {
    /// Returns the features of the unit.
    pub const fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Returns the number of device-id bits that the device directory reaches.
    pub const fn device_id_bits(&self) -> u32 {
        self.directory.shape().bits
    }

    /// Returns the device id of a requester: the segment above the requester ID.
    ///
    /// # Errors
    /// [`UnitError::DeviceBeyondDirectory`].
    pub fn device_id(&self, device: RequesterId) -> Result<u32, UnitError> {
        let id = u32::from(self.options.segment) << 16 | u32::from(device.get());
        match self.directory.shape().reaches(id) {
            true => Ok(id),
            false => Err(UnitError::DeviceBeyondDirectory { device }),
        }
    }

    /// Takes the next entry of the fault queue, or reports once that entries were lost.
    ///
    /// A device can cause faults as fast as they are read: bound the number of calls.
    pub fn next_fault(&mut self) -> Option<FaultEvent> {
        let tables = tables(&self.memory, &self.options);
        if let Some(raw) = self.faults.pop(&self.registers, &tables) {
            let record = FaultRecord::decode(raw);
            return Some(record.map_or(FaultEvent::Malformed(raw), FaultEvent::Record));
        }
        let polls = self.options.poll_limit;
        let loss = self.faults.take_loss(&self.registers, polls)?;
        Some(FaultEvent::Lost(loss))
    }

    /// Takes the next entry of the page-request queue, or reports once that entries were lost.
    pub fn next_page_request(&mut self) -> Option<PageRequestEvent> {
        let tables = tables(&self.memory, &self.options);
        let queue = self.page_requests.as_mut()?;
        if let Some(raw) = queue.pop(&self.registers, &tables) {
            let request = PageRequest::decode(raw);
            return Some(
                request.map_or(PageRequestEvent::Malformed(raw), PageRequestEvent::Request),
            );
        }
        let loss = queue.take_loss(&self.registers, self.options.poll_limit)?;
        Some(PageRequestEvent::Lost(loss))
    }

    /// Acknowledges the pending interrupts. The caller then polls completions, faults and page
    /// requests (section "Guidelines for handling interrupts from IOMMU").
    pub fn acknowledge_interrupts(&mut self) -> PendingInterrupts {
        let pending = self.registers.read32(IPSR) & (IPSR_CIP | IPSR_FIP | IPSR_PIP);
        if pending & IPSR_CIP != 0 && self.registers.read32(CQCSR) & CQCSR_FENCE_W_IP != 0 {
            let polls = self.options.poll_limit;
            self.commands
                .clear(&self.registers, CQCSR_FENCE_W_IP, polls);
        }
        if pending != 0 {
            self.registers.write32(IPSR, pending);
        }
        PendingInterrupts {
            commands: pending & IPSR_CIP != 0,
            faults: pending & IPSR_FIP != 0,
            page_requests: pending & IPSR_PIP != 0,
        }
    }

    /// Blocks all devices, and frees all tables and queues.
    ///
    /// # Errors
    /// Returns the unit if it did not stop: it may still access its memory.
    // The unit is large, and disable is rare.
    #[allow(clippy::result_large_err)]
    pub fn disable<S: FrameSource + ?Sized>(self, frames: &S) -> Result<(), (Self, UnitError)> {
        if let Err(error) = self.stop() {
            return Err((self, error));
        }
        self.free(frames);
        Ok(())
    }

    /// Turns translation and the queues off.
    pub(crate) fn stop(&self) -> Result<(), UnitError> {
        let polls = self.options.poll_limit;
        block_all(&self.registers, polls)?;
        self.commands.disable(&self.registers, polls)?;
        self.faults.disable(&self.registers, polls)?;
        match &self.page_requests {
            Some(queue) => queue.disable(&self.registers, polls),
            None => Ok(()),
        }
    }

    /// Frees all frames of a unit that has stopped.
    pub(crate) fn free<S: FrameSource + ?Sized>(&self, frames: &S) {
        let tables = tables(&self.memory, &self.options);
        for device in self.attachments.devices.values() {
            if let Some(directory) = &device.directory {
                directory.destroy(&tables, frames);
            }
        }
        self.directory.destroy(&tables, frames);
        frames.free(self.commands.frame());
        frames.free(self.faults.frame());
        frames.free(self.completion.word);
        if let Some(queue) = &self.page_requests {
            frames.free(queue.frame());
        }
    }

    pub(crate) fn planner(&self) -> Planner<'_> {
        Planner {
            unit: &self.capabilities,
            attachments: &self.attachments,
            page_commands: self.options.page_commands,
        }
    }
}

/// Bits of an address that the PPN field of tables and registers holds.
pub(crate) const ADDRESS_BITS: u32 = 56;

/// Returns the memory of the tables.
pub(crate) fn tables<'m, M: PhysMemory>(memory: &'m M, options: &Options) -> TableMemory<'m, M> {
    TableMemory::new(memory, options.coherency, ADDRESS_BITS)
}

/// Sets the mode `Off`, which blocks all devices. Keeps the PPN, as the specification demands.
pub(crate) fn block_all<R: Registers>(registers: &R, polls: u32) -> Result<(), UnitError> {
    let late = UnitError::TimedOut {
        register: Register::Ddtp,
    };
    let idle = || registers.read64(DDTP) & DDTP_BUSY == 0;
    poll_until(polls, late, idle)?;
    let old = registers.read64(DDTP);
    registers.write64(DDTP, old & PPN | DDTP_OFF);
    poll_until(polls, late, idle)
}
