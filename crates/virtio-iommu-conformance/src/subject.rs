//! The interface to a device under test.

use alloc::boxed::Box;
use alloc::string::String;
use core::fmt;

/// A kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say everything")]
pub enum Access {
    Read,
    Write,
}

/// Result of an access by an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The access reached the byte at this guest-physical address.
    Reached(u64),
    /// The access reached no memory. A write to a doorbell of MSIs reaches no memory either.
    Blocked,
    /// The adapter cannot tell, for this reason.
    Unobservable(&'static str),
}

/// Reason why the device did not return a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotReturned {
    /// The device keeps the chain.
    Kept,
    /// The device set `DEVICE_NEEDS_RESET` (virtio 1.3, section 2.1).
    NeedsReset,
    /// The process of the device ended.
    Ended,
}

impl fmt::Display for NotReturned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kept => "the device keeps the chain",
            Self::NeedsReset => "the device sets DEVICE_NEEDS_RESET",
            Self::Ended => "the process of the device ends",
        })
    }
}

/// A virtio-iommu under test: the interfaces of the driver, of endpoints and of the machine.
///
/// Not every adapter can implement `reset_system`, `begin_access` and `dropped_events`. With their
/// defaults, the statements that need them are not applicable.
pub trait Subject {
    /// Returns the ids of three endpoints. The device has no other endpoint from 0x99 to 0xff.
    fn endpoints(&self) -> [u32; 3];

    /// Returns the guest-physical address of 1 MiB of memory, aligned to 64 KiB, which accesses
    /// may read and write. Statements map other addresses only if nothing accesses them.
    fn memory(&self) -> u64 {
        0
    }

    /// Returns the offered feature bits of the device type, bits 0 to 23.
    fn offered(&self) -> u64;

    /// The driver negotiates `features`, bits of the device type, and sets `DRIVER_OK`.
    fn accept(&mut self, features: u64);

    /// The driver reads the configuration. `offset` and length lie within its 40 bytes.
    fn read_config(&self, offset: usize, bytes: &mut [u8]);

    /// The driver writes the configuration. `offset` can be any number.
    fn write_config(&mut self, offset: usize, bytes: &[u8]);

    /// Sends one chain through the request queue: the device-readable part, and a buffer for the
    /// device-writable part. Returns the used length as soon as the device publishes the used
    /// index.
    ///
    /// # Errors
    /// The device does not return the chain.
    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned>;

    /// Accesses the byte at `iova` from `endpoint`, one of [`endpoints`](Self::endpoints). The
    /// device reports a blocked access.
    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome;

    /// Adds an event buffer of `bytes` bytes, which [`next_event`](Self::next_event) returns after
    /// the next fault. The default suffices for a device that keeps reports until it has buffers.
    fn add_event_buffer(&mut self, _bytes: usize) {}

    /// Returns the used length of the oldest used event buffer, and its content in `buffer`. If
    /// there is none, adds a buffer of this size, and returns `None` if the device does not use it.
    /// The adapter then takes the buffer back.
    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize>;

    /// The driver resets the device. Features are not negotiated afterwards.
    fn reset(&mut self);

    /// The machine resets the device, if the adapter can cause that. Returns true if it did.
    fn reset_system(&mut self) -> bool {
        false
    }

    /// Waits until the device has finished all deferred work.
    fn idle(&mut self) {}

    /// Begins an access of `endpoint` to the byte at `iova` that stays in flight until the device
    /// calls back or synchronises with it. Returns true if the device allows the access; `None` if
    /// the adapter has no such accesses.
    fn begin_access(&mut self, _endpoint: u32, _iova: u64, _access: Access) -> Option<bool> {
        None
    }

    /// Returns true if the access begun last is in flight: it can still reach the byte.
    fn access_is_outstanding(&self) -> bool {
        false
    }

    /// Returns the number of dropped fault reports; `None` if the device does not count them.
    fn dropped_events(&self) -> Option<u64> {
        None
    }
}

/// A reserved region of an endpoint, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Region {
    pub first: u64,
    pub last: u64,
    pub msi: bool,
}

/// Limits of one guest, which bound its use of the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct GuestLimits {
    pub mappings: usize,
    pub domains: usize,
}

/// The device that a statement requires. An adapter comes as close as it can: the statement reads
/// features, configuration and properties, and is not applicable to a device that differs. An
/// adapter that cannot set `limits` returns an error for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Initial value of `bypass`; `None` for a device without `VIRTIO_IOMMU_F_BYPASS_CONFIG`.
    pub bypass: Option<bool>,
    /// True for a device with `VIRTIO_IOMMU_F_MMIO`.
    pub mmio: bool,
    /// True for a device with `VIRTIO_IOMMU_F_PROBE`.
    pub probe: bool,
    /// Reserved regions of the second endpoint.
    pub regions: &'static [Region],
    /// Input range, both ends included; the whole space for a device without the feature.
    pub input: (u64, u64),
    /// Domain range, both ends included; all numbers for a device without the feature.
    pub domains: (u32, u32),
    /// Limits of the guest. Statements with `None` use few resources.
    pub limits: Option<GuestLimits>,
}

/// Creates a device as close to the setup as the implementation can.
///
/// # Errors
/// Text with the reason why there is no device.
pub type Make<'a> = &'a dyn Fn(&Setup) -> Result<Box<dyn Subject>, String>;
