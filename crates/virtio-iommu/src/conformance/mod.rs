//! What the specification asks of any virtio-iommu, as 40 statements that can be run against one:
//! this crate's, or any other behind the role [`Subject`].
//!
//! The statements are those of `docs/VIRTIO-IOMMU.md`, by number. Each makes the devices it needs
//! by itself ([`Make`]), so none depends on another, and returns what it found wrong rather than
//! stopping. A statement that needs a device that cannot be made, such as one without PROBE, says
//! [`Verdict::NotApplicable`].

mod attach;
mod config;
mod driver;
mod events;
mod map;
mod probe;
mod requests;
mod unmap;

use alloc::boxed::Box;
use core::fmt;

use ringfence_types::Access;

use crate::{Options, ReservedRegion};

/// A virtio-iommu under test, as a driver, its endpoints and its machine see it.
pub trait Subject {
    /// Feature bits of the device type that are offered.
    fn offered(&self) -> u64;

    /// The driver accepts `features`.
    fn accept(&mut self, features: u64);

    /// The driver reads the configuration.
    fn read_config(&self, offset: usize, bytes: &mut [u8]);

    /// The driver writes the configuration.
    fn write_config(&mut self, offset: usize, bytes: &[u8]);

    /// One chain of the request queue: what is device-readable, and room for what is
    /// device-writable. Returns the used length as soon as the used index says that the chain was
    /// returned.
    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> usize;

    /// Lets the device finish whatever it still does behind the driver's back.
    fn idle(&mut self) {}

    /// The driver resets the device.
    fn reset(&mut self);

    /// The machine is reset.
    fn reset_system(&mut self);

    /// `endpoint` accesses the byte at `iova`: the guest-physical address that it reaches. An
    /// access that is stopped is reported to the driver.
    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<u64>;

    /// `endpoint` begins to access the byte at `iova` and takes its time: whether it can. It lets
    /// go when the device asks for that, or waits for it.
    fn hold(&mut self, endpoint: u32, iova: u64, access: Access) -> bool;

    /// Whether that access can still reach the byte.
    fn holds(&self) -> bool;

    /// The driver gives one buffer to the event queue: the used length, `None` if the device keeps
    /// it for later.
    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize>;

    /// How many reports were dropped.
    fn dropped_events(&self) -> u64;
}

/// A machine: a device of these options with these endpoints.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// What the device offers.
    pub options: Options,
    /// Endpoints, and what is reserved for each.
    pub endpoints: &'static [(u32, &'static [ReservedRegion])],
}

/// Makes a device; `None` if this implementation has none like that.
pub type Make<'a> = &'a dyn Fn(&Setup) -> Option<Box<dyn Subject>>;

/// What a device did that it must not do, or did not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// What should have been so.
    Broken(&'static str),
    /// The implementation cannot make the device that the statement is about.
    NotApplicable,
}

/// Whether a statement holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Holds,
    /// It does not: what should have been so.
    Fails(&'static str),
    /// The implementation has no device that the statement is about.
    NotApplicable,
}

/// One statement.
#[derive(Debug, Clone, Copy)]
pub struct Statement {
    /// Its number, from 1.
    pub number: u8,
    /// What it says.
    pub says: &'static str,
    check: fn(Make<'_>) -> Result<(), Failure>,
}

impl Statement {
    /// Runs it against devices made by `make`.
    pub fn run(&self, make: Make<'_>) -> Verdict {
        match (self.check)(make) {
            Ok(()) => Verdict::Holds,
            Err(Failure::Broken(what)) => Verdict::Fails(what),
            Err(Failure::NotApplicable) => Verdict::NotApplicable,
        }
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.number, self.says)
    }
}

macro_rules! statements {
    ($($number:literal $check:path: $says:literal;)*) => {
        /// All statements, in order.
        pub const STATEMENTS: &[Statement] = &[
            $(Statement { number: $number, says: $says, check: $check },)*
        ];
    };
}

statements! {
    1 config::features: "MAP_UNMAP is offered; BYPASS and BYPASS_CONFIG are never offered together";
    2 config::page_size_mask: "page_size_mask is not zero";
    3 config::bypass_is_a_flag: "bypass only ever reads 0 or 1";
    4 config::bypass_over_resets: "bypass survives a device reset and reverts on a system reset";
    5 config::other_fields: "writes to every other field of the configuration are ignored";
    6 config::reset_detaches: "a device reset leaves no endpoint attached";
    7 config::unattached: "an unattached endpoint that does not bypass reaches nothing";
    8 config::bypass_without_acceptance: "bypass = 1 means identity even if the driver never accepts the feature";
    9 requests::unknown_type: "an unknown request type: nothing written, used length 0";
    10 requests::unparsable: "a request that cannot be parsed: nothing written";
    11 requests::failures_are_written: "every other failure: the status is written and the used length is not zero";
    12 requests::reserved_bytes: "reserved bytes of the head are ignored, those of the tail are zero";
    13 attach::reserved_field: "ATTACH with a reserved field that is not zero: INVAL";
    14 attach::unknown_flag: "ATTACH with an unknown flag: INVAL";
    15 attach::unknown_endpoint: "ATTACH of an unknown endpoint: NOENT";
    16 attach::contradiction: "ATTACH whose bypass flag contradicts the domain: INVAL, nothing changed";
    17 attach::again: "ATTACH of an attached endpoint: as DETACH then ATTACH, or UNSUPP";
    18 attach::joining: "joining a populated domain exposes its mappings";
    19 attach::detach_errors: "DETACH of an unknown endpoint: NOENT; of a wrong domain: INVAL; reserved bytes ignored";
    20 attach::detached: "after DETACH there is no access through the domain";
    21 attach::last_detach: "the last DETACH destroys the domain: its number can be used again and is empty";
    22 map::misaligned: "MAP misaligned: RANGE";
    23 map::overlapping: "MAP overlapping: INVAL, nothing changed";
    24 map::unknown_flag: "MAP with an unknown flag, or MMIO when not negotiated: INVAL";
    25 map::wrong_domain: "MAP in an absent domain: NOENT; in a bypass domain: INVAL";
    26 map::outside_input: "MAP outside the input range fails";
    27 map::reserved_region: "MAP over a reserved region is rejected";
    28 map::permissions: "no write without WRITE, no read without READ";
    29 unmap::splitting: "UNMAP that would split a mapping: RANGE, nothing removed";
    30 unmap::gaps: "UNMAP over gaps: OK, every covered mapping removed; the specification's seven examples";
    31 unmap::wrong_domain: "UNMAP in an absent domain: NOENT; in a bypass domain: INVAL";
    32 probe::unknown_endpoint: "PROBE of an unknown endpoint: NOENT; PROBE not offered: used length 0";
    33 probe::lengths: "PROBE with a short buffer: INVAL and no property; the rest is zero; lengths are exact";
    34 probe::regions: "at most one MSI region; reserved regions do not overlap";
    35 events::report: "a fault report has a valid endpoint and zero reserved fields, and is never split";
    36 events::no_buffer: "without event buffers faults are dropped or held, counted, and stall no request";
    37 requests::complete_when_published: "a request is complete before its used index is published";
    38 requests::extremes: "virt_end = 2^64 - 1 and an end before the start neither panic nor wrap";
    39 unmap::outstanding: "after the reply to UNMAP no translation and no outstanding access reaches the page";
    40 requests::caps: "caps on mappings and domains are enforced with NOMEM";
}
