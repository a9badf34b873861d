//! The interface of a virtqueue.

use core::fmt;

/// The queue's id of a request in flight, for instance the head of its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

/// A used entry: the device's answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Id of the request; not validated.
    pub id: RequestId,
    /// Status byte of the answer; 0xff if the device has written none.
    pub status: u8,
}

/// Error: no chain is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueFull;

impl fmt::Display for QueueFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the queue is full")
    }
}

impl core::error::Error for QueueFull {}

/// The driver's side of a virtqueue of requests and status bytes, with interrupts suppressed.
pub trait Queue {
    /// Makes a request available, followed by a status byte of 0xff. Copies the bytes and does not
    /// notify the device.
    ///
    /// # Errors
    /// No chain is free. Polling an answer frees one.
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull>;

    /// Notifies the device of new requests, which causes a VM exit.
    fn kick(&mut self);

    /// Returns the next used entry, if any, and frees its chain if its id is valid.
    fn poll(&mut self) -> Option<Used>;
}
