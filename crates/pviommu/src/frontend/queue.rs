//! The port to a virtqueue.

use core::fmt;

/// What a queue calls a request on its way, for instance the head of its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A used entry: an answer, as the device gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Which request, if the device does not lie.
    pub id: RequestId,
    /// Its status byte.
    pub status: u8,
}

/// No chain is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueFull;

impl fmt::Display for QueueFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("queue full")
    }
}

impl core::error::Error for QueueFull {}

/// A virtqueue as its driver uses it: requests and their status bytes, interrupts suppressed.
pub trait Queue {
    /// Makes a request available, with a status byte of 0xff behind it; the device is not told. The
    /// bytes are copied.
    ///
    /// # Errors
    /// No chain is free until an answer is polled.
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull>;

    /// Tells the device that there are requests: an exit from the guest.
    fn kick(&mut self);

    /// The next used entry, if there is one. Its chain is free from then on, if it names one.
    fn poll(&mut self) -> Option<Used>;
}
