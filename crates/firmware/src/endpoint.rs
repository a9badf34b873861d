//! The answer to a lookup: a unit, and the device's number there.

/// A unit that translates a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint<U> {
    /// The unit that translates the device.
    pub unit: U,
    /// The number by which the unit knows the device: stream ID, `device_id` or endpoint ID.
    pub id: u32,
}
