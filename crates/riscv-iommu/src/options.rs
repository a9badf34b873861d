//! Options of a unit.

use ringfence_pgtable::Coherency;

/// Signals of the unit at completed commands, faults and page requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interrupts {
    /// None: the caller polls.
    Polled,
    /// Wires (`fctl.WSI` = 1). Each completion also raises `fence_w_ip`.
    Wired,
    /// Messages (`fctl.WSI` = 0). The caller programs `icvec` and `msi_cfg_tbl`.
    Messages,
}

/// Options of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Options {
    /// Bits of the device ids that the directory must reach, at least those of `segment`. The
    /// driver selects the smallest mode of the unit that has them. More than 16 bits: the unit
    /// serves several PCI segments, and commands to device TLBs name the segment.
    pub device_id_bits: u32,
    /// PCI segment of the devices: bits 16 to 23 of their device ids. A segment other than 0 makes
    /// the directory reach all its requester IDs.
    pub segment: u8,
    /// Entries of the command queue: a power of two from 16 to 256. One entry stays unused.
    pub command_entries: u32,
    /// Entries of the fault queue: a power of two from 2 to 128.
    pub fault_entries: u32,
    /// Entries of the page-request queue: a power of two from 2 to 256. `None`: no queue.
    pub page_request_entries: Option<u32>,
    /// Most commands for one range of pages. A range that needs more invalidates its domain.
    pub page_commands: u32,
    /// Most polls for one operation of the unit, or without progress of the command queue.
    pub poll_limit: u32,
    /// Interrupts of the unit.
    pub interrupts: Interrupts,
    /// Coherency of the unit's accesses to tables and commands with CPU caches. The unit also
    /// writes records and completions: if it does not snoop, the caller must map the queues'
    /// frames uncached.
    pub coherency: Coherency,
    /// A guest cannot make a device's accesses bypass the CPU caches: the platform ignores the
    /// memory types of Svpbmt for memory, or the caller writes each page back from the caches
    /// before it maps it. Without this the device could read what a page held before it was
    /// cleared, so a unit with Svpbmt has no first stage of guests.
    pub coherent_guests: bool,
}

/// Bits of a requester ID.
const REQUESTER_BITS: u32 = 16;

/// The PCI segments that a unit serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Segments {
    /// One: a requester ID names a device.
    One,
    /// Several: a requester ID needs its segment.
    Several,
}

impl Options {
    /// Returns the bits of the device ids that the directory must reach.
    pub(crate) const fn directory_bits(&self) -> u32 {
        let of_segment = match self.segment.checked_ilog2() {
            Some(highest) => REQUESTER_BITS + 1 + highest,
            None => 0,
        };
        if self.device_id_bits > of_segment {
            self.device_id_bits
        } else {
            of_segment
        }
    }

    pub(crate) const fn segments(&self) -> Segments {
        if self.directory_bits() > REQUESTER_BITS {
            Segments::Several
        } else {
            Segments::One
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device_id_bits: 16,
            segment: 0,
            command_entries: 256,
            fault_entries: 128,
            page_request_entries: None,
            page_commands: 32,
            poll_limit: 1_000_000,
            interrupts: Interrupts::Polled,
            coherency: Coherency::Coherent,
            coherent_guests: false,
        }
    }
}
