//! Devices that go from one process to another while a client uses them.

mod guest;
mod refused;
mod stream;
mod taken;
