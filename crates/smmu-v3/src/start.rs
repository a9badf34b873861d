//! Initialisation of a unit (IHI 0070, section 3.11 "Reset, Enable and initialization").

use ringfence_types::{FrameSource, Invalidator, PhysMemory, Registers};

use crate::attachments::Attachments;
use crate::capabilities::{Capabilities, StallModel};
use crate::command_queue::{COMMAND_BYTES, CommandQueue};
use crate::context::Contexts;
use crate::error::{Feature, UnitError, UnitQueue};
use crate::event_queue::{EventQueue, RECORD_BYTES};
use crate::global_errors::GlobalErrors;
use crate::options::{Interrupts, Options};
use crate::registers::{
    CR0_ATSCHK, CR0_CMDQEN, CR0_EVENTQEN, CR0_SMMUEN, CR1, CR1_CACHED, CR2, CR2_PTM, CR2_RECINVSID,
    EVENTQ_IRQ_CFG0, GERROR_IRQ_CFG0, IRQ_EVENTQ, IRQ_GERROR, STRTAB_BASE, STRTAB_BASE_CFG,
    abort_when_off, write_cr0, write_irq_ctrl,
};
use crate::stream_table::{Shape, StreamTable};
use crate::unit::{Unit, tables};

/// Fewest commands that a burst needs, rounded up.
const FEWEST_COMMANDS: u32 = 16;
const FEWEST_RECORDS: u32 = 2;
/// Most bits of a stream id.
const STREAM_ID_BITS: u32 = 32;

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Takes over the unit: aborts all accesses, sets up the queues, empties the caches and enables
    /// translation with an empty stream table.
    ///
    /// # Errors
    /// [`UnitError`]: the unit is absent, lacks what `options` ask for, or does not finish an
    /// operation. All frames are freed, unless the unit does not confirm that it stopped using
    /// them. If it stopped, all devices are blocked.
    pub fn new(registers: R, memory: M, frames: S, options: &Options) -> Result<Self, UnitError> {
        let capabilities = Capabilities::read(&registers).ok_or(UnitError::Absent)?;
        check(&capabilities, options, &frames)?;
        // The unit may run: its tables must not change before it has stopped.
        stop(&registers, options.poll_limit)?;
        let mut unit = Self::allocate(registers, memory, frames, capabilities, options)?;
        match unit.start() {
            Ok(()) => Ok(unit),
            Err(error) => {
                if stop(&unit.registers, options.poll_limit).is_ok() {
                    unit.free();
                }
                Err(error)
            }
        }
    }

    /// Allocates tables and queues.
    fn allocate(
        registers: R,
        memory: M,
        frames: S,
        capabilities: Capabilities,
        options: &Options,
    ) -> Result<Self, UnitError> {
        let mem = tables(&memory, &capabilities);
        let frame = frames.frame_size();
        let shape = Shape::new(capabilities.two_levels, options.stream_id_bits, frame);
        let streams = StreamTable::new(shape, options.stream_table, &mem)?;
        let commands = mem.frame(&frames)?;
        let events = mem.frame(&frames).inspect_err(|_| frames.free(commands))?;
        Ok(Self {
            commands: CommandQueue::new(commands, options.command_entries),
            events: EventQueue::new(events, options.event_entries),
            errors: GlobalErrors::new(&registers),
            registers,
            memory,
            frames,
            capabilities,
            options: *options,
            control: 0,
            streams,
            contexts: Contexts::default(),
            attachments: Attachments::default(),
        })
    }

    /// Enables the queues and translation. The unit is off.
    fn start(&mut self) -> Result<(), UnitError> {
        let polls = self.options.poll_limit;
        let attributes = match self.capabilities.coherent {
            true => CR1_CACHED,
            false => 0,
        };
        self.registers.write32(CR1, attributes);
        let private = match self.capabilities.broadcast {
            true => CR2_PTM,
            false => 0,
        };
        self.registers.write32(CR2, CR2_RECINVSID | private);
        let shape = self.streams.shape();
        self.registers
            .write64(STRTAB_BASE, self.streams.top().get());
        self.registers
            .write32(STRTAB_BASE_CFG, shape.configuration());
        self.commands.write_base(&self.registers);
        self.commands.recover_at(0);
        self.events.write_base(&self.registers);
        self.enable(CR0_CMDQEN)?;
        // Caches keep their entries while the unit is off.
        let ticket = self.submit_everything()?;
        self.wait(ticket)?;
        self.enable(CR0_EVENTQEN)?;
        self.enable_interrupts()?;
        // Without the check, translated transactions bypass the stream table.
        let check = match self.capabilities.ats {
            true => CR0_ATSCHK,
            false => 0,
        };
        self.control |= check;
        write_cr0(&self.registers, self.control, polls)?;
        self.enable(CR0_SMMUEN)
    }

    fn enable(&mut self, field: u32) -> Result<(), UnitError> {
        self.control |= field;
        write_cr0(&self.registers, self.control, self.options.poll_limit)
    }

    fn enable_interrupts(&self) -> Result<(), UnitError> {
        if self.options.interrupts == Interrupts::Polled {
            return Ok(());
        }
        if self.capabilities.msi {
            // Without an address no message is sent.
            self.registers.write64(GERROR_IRQ_CFG0, 0);
            self.registers.write64(EVENTQ_IRQ_CFG0, 0);
        }
        let polls = self.options.poll_limit;
        write_irq_ctrl(&self.registers, IRQ_GERROR | IRQ_EVENTQ, polls)
    }
}

/// Turns the unit off, whatever firmware or an earlier kernel left. Accesses are aborted then.
pub(crate) fn stop<R: Registers>(unit: &R, polls: u32) -> Result<(), UnitError> {
    abort_when_off(unit, polls)?;
    write_cr0(unit, 0, polls)?;
    write_irq_ctrl(unit, 0, polls)
}

fn check<S: FrameSource>(
    unit: &Capabilities,
    options: &Options,
    frames: &S,
) -> Result<(), UnitError> {
    for (supported, feature) in [
        (unit.aarch64, Feature::Aarch64),
        (unit.little_endian, Feature::LittleEndian),
        (
            unit.stall_model != StallModel::Forced,
            Feature::TerminateModel,
        ),
        (
            !unit.queues_preset && !unit.tables_preset,
            Feature::WritableBases,
        ),
    ] {
        if !supported {
            return Err(UnitError::Unsupported(feature));
        }
    }
    let bits = options.stream_id_bits;
    if bits > unit.stream_id_bits.min(STREAM_ID_BITS) {
        return Err(UnitError::StreamIdBits { bits });
    }
    let frame = frames.frame_size().bytes();
    let (commands, events) = (options.command_entries, options.event_entries);
    let most = |log2, bytes| {
        let of_frame = u32::try_from(frame / bytes).unwrap_or(u32::MAX);
        of_frame.min(1_u32.checked_shl(log2).unwrap_or(u32::MAX))
    };
    let commands_most = most(unit.command_queue, COMMAND_BYTES);
    let events_most = most(unit.event_queue, RECORD_BYTES);
    for (queue, entries, fewest, most) in [
        (
            UnitQueue::Commands,
            commands,
            FEWEST_COMMANDS,
            commands_most,
        ),
        (UnitQueue::Events, events, FEWEST_RECORDS, events_most),
    ] {
        if !entries.is_power_of_two() || !(fewest..=most).contains(&entries) {
            return Err(UnitError::QueueEntries {
                queue,
                entries,
                fewest,
                most,
            });
        }
    }
    Ok(())
}
