//! Initialisation of a unit (specification 1.0, section "Guidelines for initialization").

use ringfence_pgtable::TableMemory;
use ringfence_types::{FrameSource, Invalidator, PhysAddr, PhysMemory, Registers, poll_until};

use crate::attachments::Attachments;
use crate::capabilities::{Capabilities, InterruptSupport};
use crate::completion::Completion;
use crate::directory::{Directory, Shape};
use crate::error::{Feature, UnitError};
use crate::options::{Interrupts, Options};
use crate::queue::{Queue, QueueRegisters, switch_off};
use crate::registers::{
    CAPABILITIES, CQB, CQCSR, CQH, CQT, DDTP, DDTP_1LVL, DDTP_BUSY, DDTP_MODE, FCTL, FCTL_BE,
    FCTL_GXL, FCTL_WSI, FQB, FQCSR, FQH, FQT, PPN, PPN_FROM_ADDRESS, PQB, PQCSR, PQH, PQT,
    Register,
};
use crate::unit::{Unit, block_all, tables};

const COMMANDS: QueueRegisters = QueueRegisters {
    base: CQB,
    base_name: Register::Cqb,
    index: CQT,
    unit_index: CQH,
    csr: CQCSR,
    csr_name: Register::Cqcsr,
};
const FAULTS: QueueRegisters = QueueRegisters {
    base: FQB,
    base_name: Register::Fqb,
    index: FQH,
    unit_index: FQT,
    csr: FQCSR,
    csr_name: Register::Fqcsr,
};
const PAGE_REQUESTS: QueueRegisters = QueueRegisters {
    base: PQB,
    base_name: Register::Pqb,
    index: PQH,
    unit_index: PQT,
    csr: PQCSR,
    csr_name: Register::Pqcsr,
};
/// 64-bit words of a command, a fault record and a page request.
const COMMAND_WORDS: u32 = 2;
const FAULT_WORDS: u32 = 4;
const PAGE_REQUEST_WORDS: u32 = 2;
/// Words of a frame.
const FRAME_WORDS: u32 = 512;
/// Fewest commands that a burst needs without devices, with its completion, rounded up.
const FEWEST_COMMANDS: u32 = 16;
/// Major version of the specification.
const VERSION: u8 = 1;
/// Device-id bits of the modes `1LVL` to `3LVL`, and of a leaf table: base and extended format.
const BASE: ([u32; 3], u32) = ([7, 16, 24], 7);
const EXTENDED: ([u32; 3], u32) = ([6, 15, 24], 6);

impl<R: Registers, M: PhysMemory> Unit<R, M> {
    /// Takes over the unit: blocks all devices, sets up the queues, empties the caches and enables
    /// translation with an empty device directory.
    ///
    /// # Errors
    /// [`UnitError`]: the unit is absent, lacks what `options` ask for, or does not finish an
    /// operation. All frames are freed, unless the unit does not confirm that it stopped using
    /// them. If it stopped, all devices are blocked.
    pub fn new<S: FrameSource + ?Sized>(
        registers: R,
        memory: M,
        frames: &S,
        options: Options,
    ) -> Result<Self, UnitError> {
        let raw = registers.read64(CAPABILITIES);
        if raw == u64::MAX {
            return Err(UnitError::Absent);
        }
        let capabilities = Capabilities::decode(raw);
        let shape = check(&capabilities, &options)?;
        reset(&registers, &capabilities, options.poll_limit)?;
        set_features(&registers, &capabilities, &options)?;
        let parts = Parts::allocate(shape, &tables(&memory, &options), frames, &options)?;
        let mut unit = Self {
            registers,
            memory,
            options,
            capabilities,
            directory: parts.directory,
            commands: parts.commands,
            faults: parts.faults,
            page_requests: parts.page_requests,
            completion: Completion::new(parts.completion),
            attachments: Attachments::default(),
        };
        match unit.start() {
            Ok(()) => Ok(unit),
            Err(error) => {
                if unit.stop().is_ok() {
                    unit.free(frames);
                }
                Err(error)
            }
        }
    }

    /// Enables the queues and translation.
    fn start(&mut self) -> Result<(), UnitError> {
        let polls = self.options.poll_limit;
        self.commands.enable(&self.registers, polls)?;
        self.faults.enable(&self.registers, polls)?;
        if let Some(queue) = &mut self.page_requests {
            queue.enable(&self.registers, polls)?;
        }
        // Caches keep their entries in mode Off.
        let ticket = self.submit_everything()?;
        self.wait(ticket)?;
        self.enable_directory()
    }

    /// Selects the smallest mode that the unit supports and whose directory has enough bits.
    fn enable_directory(&mut self) -> Result<(), UnitError> {
        let polls = self.options.poll_limit;
        let register = Register::Ddtp;
        let root = self.directory.root().get() >> PPN_FROM_ADDRESS & PPN;
        for (shape, mode) in modes(&self.capabilities, &self.options) {
            let value = root | mode;
            self.registers.write64(DDTP, value);
            let idle = || self.registers.read64(DDTP) & DDTP_BUSY == 0;
            poll_until(polls, UnitError::TimedOut { register }, idle)?;
            let found = self.registers.read64(DDTP) & (PPN | DDTP_MODE);
            if found == value {
                self.directory.set_shape(shape);
                return Ok(());
            }
            // The mode may change to another directory only from Off.
            block_all(&self.registers, polls)?;
        }
        Err(UnitError::Rejected { register })
    }
}

/// Returns the modes with enough device-id bits, smallest first.
fn modes(
    capabilities: &Capabilities,
    options: &Options,
) -> impl Iterator<Item = (Shape, u64)> + use<> {
    let (bits, leaf_bits) = match capabilities.msi_flat {
        true => EXTENDED,
        false => BASE,
    };
    let needed = options.directory_bits();
    (1..)
        .zip(DDTP_1LVL..)
        .zip(bits)
        .filter(move |(_, bits)| *bits >= needed)
        .map(move |((levels, mode), bits)| {
            let shape = Shape {
                levels,
                bits,
                leaf_bits,
            };
            (shape, mode)
        })
}

/// Checks `options` before the first write of a register. Returns the smallest directory for them.
fn check(capabilities: &Capabilities, options: &Options) -> Result<Shape, UnitError> {
    if capabilities.version >> 4 != VERSION {
        return Err(UnitError::UnsupportedVersion(capabilities.version));
    }
    let page_requests = options.page_request_entries;
    if page_requests.is_some() && !capabilities.ats {
        return Err(UnitError::Unsupported(Feature::Ats));
    }
    let queues = [
        (options.command_entries, FEWEST_COMMANDS, COMMAND_WORDS),
        (options.fault_entries, 2, FAULT_WORDS),
        (page_requests.unwrap_or(2), 2, PAGE_REQUEST_WORDS),
    ];
    for (entries, fewest, words) in queues {
        let fits = (fewest..=FRAME_WORDS / words).contains(&entries);
        if !entries.is_power_of_two() || !fits {
            return Err(UnitError::QueueEntries { entries });
        }
    }
    let bits = options.directory_bits();
    let mut modes = modes(capabilities, options);
    let (shape, _) = modes.next().ok_or(UnitError::DirectoryBits { bits })?;
    Ok(shape)
}

/// Blocks all devices and disables the queues, whatever firmware or an earlier kernel left.
fn reset<R: Registers>(
    registers: &R,
    capabilities: &Capabilities,
    polls: u32,
) -> Result<(), UnitError> {
    block_all(registers, polls)?;
    switch_off(registers, &COMMANDS, polls)?;
    switch_off(registers, &FAULTS, polls)?;
    if capabilities.ats {
        switch_off(registers, &PAGE_REQUESTS, polls)?;
    }
    Ok(())
}

/// Selects little-endian accesses, the schemes of RV64 and the method of interrupts.
fn set_features<R: Registers>(
    registers: &R,
    capabilities: &Capabilities,
    options: &Options,
) -> Result<(), UnitError> {
    let (wires, messages) = match capabilities.igs {
        InterruptSupport::Messages => (false, true),
        InterruptSupport::Wires => (true, false),
        InterruptSupport::Both => (true, true),
        InterruptSupport::Reserved => (false, false),
    };
    let old = registers.read32(FCTL);
    let interrupts = match options.interrupts {
        Interrupts::Polled => old & FCTL_WSI,
        Interrupts::Wired if wires => FCTL_WSI,
        Interrupts::Messages if messages => 0,
        Interrupts::Wired => return Err(UnitError::Unsupported(Feature::WiredInterrupts)),
        Interrupts::Messages => return Err(UnitError::Unsupported(Feature::MessageInterrupts)),
    };
    let fields = FCTL_BE | FCTL_WSI | FCTL_GXL;
    let value = old & !fields | interrupts;
    if value != old {
        registers.write32(FCTL, value);
    }
    let found = registers.read32(FCTL);
    if found & FCTL_BE != 0 {
        return Err(UnitError::Unsupported(Feature::LittleEndian));
    }
    if found & FCTL_GXL != 0 {
        return Err(UnitError::Unsupported(Feature::Gxl64));
    }
    match found & FCTL_WSI == interrupts {
        true => Ok(()),
        false => Err(UnitError::Rejected {
            register: Register::Fctl,
        }),
    }
}

/// The frames of a unit.
struct Parts {
    directory: Directory,
    commands: Queue,
    faults: Queue,
    page_requests: Option<Queue>,
    completion: PhysAddr,
}

impl Parts {
    fn allocate<M: PhysMemory, S: FrameSource + ?Sized>(
        shape: Shape,
        tables: &TableMemory<'_, M>,
        frames: &S,
        options: &Options,
    ) -> Result<Self, UnitError> {
        let mut taken = [None; 4];
        let result = Self::fill(shape, tables, frames, options, &mut taken);
        if result.is_err() {
            for frame in taken.into_iter().flatten() {
                frames.free(frame);
            }
        }
        result
    }

    fn fill<M: PhysMemory, S: FrameSource + ?Sized>(
        shape: Shape,
        tables: &TableMemory<'_, M>,
        frames: &S,
        options: &Options,
        taken: &mut [Option<PhysAddr>; 4],
    ) -> Result<Self, UnitError> {
        let [commands, faults, completion, page_requests] = taken;
        let interrupts = options.interrupts != Interrupts::Polled;
        let frame = |slot: &mut Option<PhysAddr>| -> Result<PhysAddr, UnitError> {
            let frame = tables.frame(frames)?;
            *slot = Some(frame);
            Ok(frame)
        };
        let queue = |registers, frame, entries, words| {
            Queue::new(registers, frame, entries, words, interrupts)
        };
        let commands = frame(commands)?;
        let faults = frame(faults)?;
        let completion = frame(completion)?;
        let page_requests = match options.page_request_entries {
            Some(entries) => Some((frame(page_requests)?, entries)),
            None => None,
        };
        Ok(Self {
            commands: queue(COMMANDS, commands, options.command_entries, COMMAND_WORDS),
            faults: queue(FAULTS, faults, options.fault_entries, FAULT_WORDS),
            page_requests: page_requests
                .map(|(frame, entries)| queue(PAGE_REQUESTS, frame, entries, PAGE_REQUEST_WORDS)),
            completion,
            directory: Directory::new(shape, tables, frames)?,
        })
    }
}
