//! A conformance suite: 40 requirements of the specification that can be checked on any
//! virtio-iommu behind the interface [`Subject`].
//!
//! The statements are those of `docs/VIRTIO-IOMMU.md`, by number. Each creates its own devices
//! ([`Make`]), so none depends on another, and returns a failure instead of panicking. A statement
//! whose device cannot be created, for instance one without PROBE, returns
//! [`Verdict::NotApplicable`].
//!
//! ```
//! use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Subject, Verdict};
//!
//! // An implementation that supports no setup.
//! let make = |_: &Setup| -> Option<Box<dyn Subject>> { None };
//! assert!(STATEMENTS.iter().all(|one| one.run(&make) == Verdict::NotApplicable));
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

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

use ringfence_virtio_iommu::{Options, ReservedRegion};

/// A virtio-iommu under test, with the interfaces of the driver, the endpoints and the machine.
pub trait Subject {
    /// Returns the offered feature bits of the device type.
    fn offered(&self) -> u64;

    /// The driver accepts `features`.
    fn accept(&mut self, features: u64);

    /// The driver reads the configuration.
    fn read_config(&self, offset: usize, bytes: &mut [u8]);

    /// The driver writes the configuration.
    fn write_config(&mut self, offset: usize, bytes: &[u8]);

    /// Sends one chain through the request queue: the device-readable part, and a buffer for the
    /// device-writable part. Returns the used length as soon as the device publishes the used
    /// index.
    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> usize;

    /// Waits until the device has finished all deferred work.
    fn idle(&mut self) {}

    /// The driver resets the device.
    fn reset(&mut self);

    /// The machine resets the device.
    fn reset_system(&mut self);

    /// Accesses the byte at `iova` from `endpoint`. Returns the guest-physical address. A blocked
    /// access is reported to the driver.
    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<u64>;

    /// Starts a long access of `endpoint` to the byte at `iova`. Returns true if the device allows
    /// it. The access ends when the device requests it or waits for it.
    fn hold(&mut self, endpoint: u32, iova: u64, access: Access) -> bool;

    /// Returns true if the long access can still reach the byte.
    fn holds(&self) -> bool;

    /// Adds a buffer to the event queue. Returns the used length; `None` if the device keeps the
    /// buffer.
    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize>;

    /// Returns the number of dropped reports.
    fn dropped_events(&self) -> u64;
}

/// A test setup: a device with these options and endpoints.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Options of the device.
    pub options: Options,
    /// Endpoints and their reserved regions.
    pub endpoints: &'static [(u32, &'static [ReservedRegion])],
}

/// Creates a device; `None` if the implementation does not support this setup.
pub type Make<'a> = &'a dyn Fn(&Setup) -> Option<Box<dyn Subject>>;

/// Failure of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The violated requirement.
    Broken(&'static str),
    /// The implementation does not support the statement's device.
    NotApplicable,
}

/// Result of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The statement holds.
    Holds,
    /// The statement fails, with the violated requirement.
    Fails(&'static str),
    /// The implementation does not support the statement's device.
    NotApplicable,
}

/// A statement about the device.
#[derive(Debug, Clone, Copy)]
pub struct Statement {
    /// Number of the statement, from 1.
    pub number: u8,
    /// Text of the statement.
    pub says: &'static str,
    check: fn(Make<'_>) -> Result<(), Failure>,
}

impl Statement {
    /// Checks the statement on devices made by `make`.
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
    8 config::bypass_without_acceptance: "bypass = 1 means identity even if the driver never \
        accepts the feature";
    9 requests::unknown_type: "an unknown request type: nothing written, used length 0";
    10 requests::unparsable: "a request that cannot be parsed: nothing written";
    11 requests::failures_are_written: "every other failure: the status is written and the used \
        length is not zero";
    12 requests::reserved_bytes: "reserved bytes of the head are ignored, those of the tail are \
        zero";
    13 attach::reserved_field: "ATTACH with a reserved field that is not zero: INVAL";
    14 attach::unknown_flag: "ATTACH with an unknown flag: INVAL";
    15 attach::unknown_endpoint: "ATTACH of an unknown endpoint: NOENT";
    16 attach::contradiction: "ATTACH whose bypass flag contradicts the domain: INVAL, nothing \
        changed";
    17 attach::again: "ATTACH of an attached endpoint: as DETACH then ATTACH, or UNSUPP";
    18 attach::joining: "joining a populated domain exposes its mappings";
    19 attach::detach_errors: "DETACH of an unknown endpoint: NOENT; of a wrong domain: INVAL; \
        reserved bytes ignored";
    20 attach::detached: "after DETACH there is no access through the domain";
    21 attach::last_detach: "the last DETACH destroys the domain: its number can be used again and \
        is empty";
    22 map::misaligned: "MAP misaligned: RANGE";
    23 map::overlapping: "MAP overlapping: INVAL, nothing changed";
    24 map::unknown_flag: "MAP with an unknown flag, or MMIO when not negotiated: INVAL";
    25 map::wrong_domain: "MAP in an absent domain: NOENT; in a bypass domain: INVAL";
    26 map::outside_input: "MAP outside the input range fails";
    27 map::reserved_region: "MAP over a reserved region is rejected";
    28 map::permissions: "no write without WRITE, no read without READ";
    29 unmap::splitting: "UNMAP that would split a mapping: RANGE, nothing removed";
    30 unmap::gaps: "UNMAP over gaps: OK, every covered mapping removed; the specification's seven \
        examples";
    31 unmap::wrong_domain: "UNMAP in an absent domain: NOENT; in a bypass domain: INVAL";
    32 probe::unknown_endpoint: "PROBE of an unknown endpoint: NOENT; PROBE not offered: used \
        length 0";
    33 probe::lengths: "PROBE with a short buffer: INVAL and no property; the rest is zero; \
        lengths are exact";
    34 probe::regions: "at most one MSI region; reserved regions do not overlap";
    35 events::report: "a fault report has a valid endpoint and zero reserved fields, and is never \
        split";
    36 events::no_buffer: "without event buffers faults are dropped or held, counted, and stall no \
        request";
    37 requests::complete_when_published: "a request is complete before its used index is \
        published";
    38 requests::extremes: "virt_end = 2^64 - 1 and an end before the start neither panic nor wrap";
    39 unmap::outstanding: "after the reply to UNMAP no translation and no outstanding access \
        reaches the page";
    40 requests::caps: "caps on mappings and domains are enforced with NOMEM";
}
