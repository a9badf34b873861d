//! The function: registers in front of the ring unit.

use alloc::vec::Vec;
use core::fmt;

use ringfence_hw::{Geometry, Prefetch, Replacement, RingUnit, RingUnitConfig, Translate};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Invalidation, Iova, PhysAddr, PhysMemory, PhysRange,
    RequesterId,
};

use crate::fault_queue::{FaultEntry, FaultQueue};
use crate::invalidate::{InvalidateScope, InvalidateWord};
use crate::register::{self, BAD_INVALIDATION, CTRL_BITS, MAX_DEVICES, MAX_QUEUE_SHIFT};

/// ROOT: the address; bits 0 to 11 are reserved and read as 0.
const ROOT_ADDRESS: u64 = !0xfff;

/// Caches of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Geometry of the rIOTLB: one entry per ring, shared by all devices.
    pub riotlb: Geometry,
    /// Geometry of the cache of contexts and rDEVICEs.
    pub contexts: Geometry,
    /// Time at which the unit reads the next slot of a ring.
    pub prefetch: Prefetch,
}

/// No caches: each access reads context, ring and slot from memory.
impl Default for Config {
    fn default() -> Self {
        Self {
            riotlb: Geometry::ABSENT,
            contexts: Geometry::ABSENT,
            prefetch: Prefetch::Absent,
        }
    }
}

/// Reason why a list of devices is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// More than [`MAX_DEVICES`] devices.
    TooManyDevices {
        /// Number of devices in the list.
        count: usize,
    },
    /// A device is listed twice.
    Twice {
        /// Requester ID that occurs twice.
        device: RequesterId,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyDevices { count } => {
                write!(f, "{count} devices exceed the maximum of {MAX_DEVICES}")
            }
            Self::Twice { device } => write!(f, "device {device} is listed twice"),
        }
    }
}

impl core::error::Error for ConfigError {}

/// A saved register has bits that the function never sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UndefinedBits {
    /// Name of the register.
    pub register: &'static str,
}

impl fmt::Display for UndefinedBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "undefined bits in a saved {}", self.register)
    }
}

impl core::error::Error for UndefinedBits {}

/// Values of the registers, for a hand-over to another process. The caches are not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct State {
    /// Address of the root table (ROOT).
    pub root: u64,
    /// Control bits (CTRL).
    pub control: u32,
    /// Status bits (STS).
    pub status: u32,
    /// Address and size of the fault queue (FQ).
    pub fault_queue: u64,
    /// Entries that the driver has read (FQ_HEAD).
    pub head: u32,
    /// Entries that the function has written (FQ_TAIL).
    pub tail: u32,
    /// True if the interrupt was raised since the last write to FQ_HEAD.
    pub raised: bool,
}

/// A ring IOMMU as a PCI function.
///
/// The embedder must serialise its use, and must hold its lock during each access of a device, from
/// the translation to the last byte. An invalidation then waits for the accesses that began before
/// it.
#[derive(Debug)]
pub struct RiommuDevice {
    unit: RingUnit,
    devices: Vec<RequesterId>,
    prefetches: bool,
    root: u64,
    control: u32,
    status: u32,
    queue: FaultQueue,
    /// The interrupt was raised since the last write to FQ_HEAD.
    raised: bool,
    /// The embedder has to deliver an interrupt.
    interrupt: bool,
}

impl RiommuDevice {
    /// Creates a function in front of `devices`, all blocked.
    ///
    /// # Errors
    /// [`ConfigError`] if there are too many devices, or one is listed twice.
    pub fn new(config: &Config, devices: &[RequesterId]) -> Result<Self, ConfigError> {
        let count = devices.len();
        if count > MAX_DEVICES {
            return Err(ConfigError::TooManyDevices { count });
        }
        let mut devices = devices.to_vec();
        devices.sort_unstable();
        let mut next = devices.iter().skip(1);
        if let Some(device) = devices.iter().find(|device| next.next() == Some(device)) {
            return Err(ConfigError::Twice { device: *device });
        }
        let mut unit = RingUnit::new(&RingUnitConfig {
            riotlb: config.riotlb,
            replacement: Replacement::Lru,
            contexts: config.contexts,
            prefetch: config.prefetch,
            // The queue in memory takes their place.
            fault_log: 0,
        });
        unit.enable();
        Ok(Self {
            unit,
            devices,
            prefetches: config.prefetch != Prefetch::Absent,
            root: 0,
            control: 0,
            status: 0,
            queue: FaultQueue::default(),
            raised: false,
            interrupt: false,
        })
    }

    /// Returns the devices in ascending order.
    pub fn devices(&self) -> &[RequesterId] {
        &self.devices
    }

    /// Returns the ring unit, for its counters.
    pub fn unit(&self) -> &RingUnit {
        &self.unit
    }

    /// Returns the value of the register at `offset` for a read of `bytes` bytes. Reads that do not
    /// match a register in offset and size return 0.
    pub fn read(&self, offset: u64, bytes: u64) -> u64 {
        match (offset, bytes) {
            (register::ID, 4) => register::MAGIC.into(),
            (register::VERSION, 4) => register::VERSION_1.into(),
            (register::CAP, 8) => self.capabilities(),
            (register::ROOT, 8) => self.root,
            (register::CTRL, 4) => self.control.into(),
            (register::STS, 4) => self.status.into(),
            (register::FQ, 8) => self.queue.get(),
            (register::FQ_HEAD, 4) => self.queue.head.into(),
            (register::FQ_TAIL, 4) => self.queue.tail.into(),
            (register::DEV.., 4) => self.listed(offset),
            _ => 0,
        }
    }

    fn capabilities(&self) -> u64 {
        let prefetch = if self.prefetches {
            register::CAP_PREFETCH
        } else {
            0
        };
        let queue = u64::from(MAX_QUEUE_SHIFT) << register::CAP_QUEUE_SHIFT;
        self.devices.len() as u64 | queue | prefetch
    }

    fn listed(&self, offset: u64) -> u64 {
        let offset = offset.wrapping_sub(register::DEV);
        if !offset.is_multiple_of(4) {
            return 0;
        }
        let index = usize::try_from(offset >> 2).unwrap_or(usize::MAX);
        let device = self.devices.get(index);
        device.map_or(0, |device| device.get().into())
    }

    /// Executes a write of `bytes` bytes to the register at `offset`. Ignores writes that do not
    /// match a writable register in offset and size. An invalidation is complete when the call
    /// returns.
    pub fn write(&mut self, offset: u64, bytes: u64, value: u64) {
        // The match below has only sizes of 4 and 8.
        let low = value as u32;
        match (offset, bytes) {
            (register::ROOT, 8) => self.set_root(value & ROOT_ADDRESS),
            (register::CTRL, 4) => self.set_control(low & CTRL_BITS),
            (register::STS, 4) => self.status &= !low,
            (register::INV, 8) => self.invalidate(InvalidateWord::from_raw(value)),
            (register::FQ, 8) if self.control & register::RECORD_FAULTS == 0 => {
                self.queue.set(value);
            }
            (register::FQ_HEAD, 4) => self.set_head(low),
            _ => {}
        }
    }

    fn set_root(&mut self, root: u64) {
        self.root = root;
        self.unit.set_root_table(PhysAddr::new(root));
    }

    /// Translation that is switched on begins without cached entries.
    fn set_control(&mut self, control: u32) {
        let switched = self.control ^ control;
        self.control = control;
        if switched & register::TRANSLATE != 0 {
            self.unit.set_root_table(PhysAddr::new(self.root));
        }
    }

    fn invalidate(&mut self, word: InvalidateWord) {
        match word.scope() {
            Some(InvalidateScope::Ring(device, ring)) => {
                // The unit finds the ring by its device; the domain is not needed.
                let domain = DomainId::new(0);
                self.unit.invalidate(&Invalidation::Ring {
                    domain,
                    device,
                    ring,
                });
            }
            Some(InvalidateScope::Device(device)) => {
                self.unit.invalidate(&Invalidation::Context(device));
            }
            Some(InvalidateScope::All) => self.set_root(self.root),
            None => {
                self.status |= BAD_INVALIDATION;
                self.set_root(self.root);
            }
        }
    }

    /// Raises the interrupt again if unread entries remain: an entry that was written between the
    /// driver's last look and this write would otherwise raise none.
    fn set_head(&mut self, head: u32) {
        self.queue.head = head;
        self.raised = false;
        if head != self.queue.tail {
            self.raise();
        }
    }

    /// Translates an access of `device`. A blocked access is also written to the fault queue.
    ///
    /// # Errors
    /// The fault. A device that is not listed is blocked.
    pub fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        memory: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<PhysRange, Fault> {
        let translated = if self.is_blocked(device) {
            Err(Fault {
                device,
                iova,
                access,
                reason: FaultReason::Blocked,
            })
        } else {
            let translation = self.unit.translate(memory, device, iova, bytes, access);
            // An access lies in one buffer, which is contiguous.
            translation.map(|translation| translation.first())
        };
        translated.inspect_err(|fault| self.record(memory, fault))
    }

    fn is_blocked(&self, device: RequesterId) -> bool {
        self.control & register::TRANSLATE == 0 || self.devices.binary_search(&device).is_err()
    }

    fn record<M: PhysMemory + ?Sized>(&mut self, memory: &M, fault: &Fault) {
        if self.control & register::RECORD_FAULTS == 0 {
            return;
        }
        match self.queue.push(memory, FaultEntry::new(fault)) {
            Ok(()) => {}
            Err(status) => {
                self.status |= status;
                if status & register::QUEUE_ERROR != 0 {
                    self.control &= !register::RECORD_FAULTS;
                }
            }
        }
        self.raise();
    }

    fn raise(&mut self) {
        if self.control & register::INTERRUPT != 0 && !self.raised {
            self.raised = true;
            self.interrupt = true;
        }
    }

    /// Returns true if the embedder has to deliver an interrupt, once. At most one is raised
    /// between two writes to FQ_HEAD, however many faults there are.
    #[must_use = "the interrupt is not raised again until the driver has read the queue"]
    pub fn take_interrupt(&mut self) -> bool {
        core::mem::take(&mut self.interrupt)
    }

    /// Blocks all devices and sets all registers to 0, as at power-on.
    pub fn reset(&mut self) {
        self.set(&State::default());
    }

    /// Returns the values of the registers.
    pub fn save(&self) -> State {
        State {
            root: self.root,
            control: self.control,
            status: self.status,
            fault_queue: self.queue.get(),
            head: self.queue.head,
            tail: self.queue.tail,
            raised: self.raised,
        }
    }

    /// Sets the registers to saved values and drops all cached entries.
    ///
    /// # Errors
    /// [`UndefinedBits`] if no function can have saved the values; nothing has changed. Values from
    /// another process are as untrusted as those that a guest writes.
    pub fn restore(&mut self, state: &State) -> Result<(), UndefinedBits> {
        let mut queue = FaultQueue::default();
        queue.set(state.fault_queue);
        let registers = [
            ("ROOT", state.root & !ROOT_ADDRESS == 0),
            ("CTRL", state.control & !CTRL_BITS == 0),
            ("STS", state.status & !register::STS_BITS == 0),
            ("FQ", queue.get() == state.fault_queue),
        ];
        if let Some((register, _)) = registers.into_iter().find(|(_, defined)| !defined) {
            return Err(UndefinedBits { register });
        }
        self.set(state);
        Ok(())
    }

    fn set(&mut self, state: &State) {
        self.control = state.control;
        self.set_root(state.root);
        self.status = state.status;
        self.queue.set(state.fault_queue);
        self.queue.head = state.head;
        self.queue.tail = state.tail;
        self.raised = state.raised;
        self.interrupt = false;
    }
}
