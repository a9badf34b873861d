//! Register-based invalidation (VT-d specification, section 6.5.1): one command at a time, in
//! legacy mode.

use ringfence_types::{InvalidationError, Registers, Ticket};

use crate::command::{Command, RegisterWrite};
use crate::error::UnitError;
use crate::queue::stop_queue;
use crate::registers::{CCMD, GSTS, ICC, IOTLB, IVA, IVT, QIE};

/// CCMD.CAIG and IOTLB_REG.IAIG: the granularity that the unit performed; zero if it refused.
const CAIG: u64 = 0b11 << 59;
const IAIG: u64 = 0b11 << 57;

/// The registers of the context cache and of the IOTLB.
#[derive(Debug)]
pub(crate) struct RegisterInvalidation {
    /// Offset of IVA_REG.
    iotlb: u64,
    submitted: u64,
    /// The register of the last command, until it has completed.
    running: Option<Running>,
    polls: u32,
    poll_limit: u32,
    /// The unit refused a command, or a recovery failed: commands may have been lost.
    is_failed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    register: u64,
    busy: u64,
    actual: u64,
}

impl RegisterInvalidation {
    /// Prepares the registers at `iotlb`. Disables the queue, which firmware may have left enabled:
    /// the unit then ignores the registers.
    pub(crate) fn enable(
        registers: &impl Registers,
        iotlb: u64,
        poll_limit: u32,
    ) -> Result<Self, UnitError> {
        if registers.read32(GSTS) & QIE != 0 {
            stop_queue(registers, poll_limit)?;
        }
        Ok(Self {
            iotlb,
            submitted: 0,
            running: None,
            polls: 0,
            poll_limit,
            is_failed: false,
        })
    }

    /// Accepts commands again. The caller then invalidates everything.
    pub(crate) const fn recover(&mut self) {
        self.polls = 0;
        self.is_failed = false;
    }

    /// Fails all submissions and polls until a recovery succeeds.
    pub(crate) const fn fail(&mut self) {
        self.is_failed = true;
    }

    /// Executes the commands. Waits for all but the last one.
    pub(crate) fn submit(
        &mut self,
        registers: &impl Registers,
        commands: impl Iterator<Item = Command>,
    ) -> Result<Ticket, InvalidationError> {
        if !self.is_idle(registers)? {
            return Err(InvalidationError::QueueFull);
        }
        for command in commands {
            while !self.is_idle(registers)? {
                core::hint::spin_loop();
            }
            self.start(registers, command)?;
        }
        self.submitted = self.submitted.wrapping_add(1);
        Ok(Ticket::new(self.submitted))
    }

    fn start(
        &mut self,
        registers: &impl Registers,
        command: Command,
    ) -> Result<(), InvalidationError> {
        let write = command.register_write();
        let iotlb = self.iotlb.wrapping_add(IOTLB);
        self.running = match write.ok_or(InvalidationError::Unsupported)? {
            RegisterWrite::Nothing => return Ok(()),
            RegisterWrite::Context(command) => {
                registers.write64(CCMD, command);
                Some(Running {
                    register: CCMD,
                    busy: ICC,
                    actual: CAIG,
                })
            }
            RegisterWrite::Iotlb { address, command } => {
                if let Some(address) = address {
                    registers.write64(self.iotlb.wrapping_add(IVA), address);
                }
                registers.write64(iotlb, command);
                Some(Running {
                    register: iotlb,
                    busy: IVT,
                    actual: IAIG,
                })
            }
        };
        self.polls = 0;
        Ok(())
    }

    /// Returns true if no command is under way.
    fn is_idle(&mut self, registers: &impl Registers) -> Result<bool, InvalidationError> {
        if self.is_failed {
            return Err(InvalidationError::Failed);
        }
        let Some(running) = self.running else {
            return Ok(true);
        };
        let value = registers.read64(running.register);
        if value == u64::MAX {
            return Err(InvalidationError::Failed);
        }
        if value & running.busy == 0 {
            self.running = None;
            return match value & running.actual {
                0 => {
                    self.is_failed = true;
                    Err(InvalidationError::Failed)
                }
                _ => Ok(true),
            };
        }
        self.polls = self.polls.saturating_add(1);
        if self.polls >= self.poll_limit {
            return Err(InvalidationError::TimedOut);
        }
        Ok(false)
    }

    /// Returns true if the commands of `ticket` have completed.
    pub(crate) fn poll(
        &mut self,
        registers: &impl Registers,
        ticket: Ticket,
    ) -> Result<bool, InvalidationError> {
        if ticket.get() > self.submitted {
            return Err(InvalidationError::Failed);
        }
        // Commands before the last one have completed, unless one was refused.
        if ticket.get() < self.submitted && !self.is_failed {
            return Ok(true);
        }
        self.is_idle(registers)
    }
}
