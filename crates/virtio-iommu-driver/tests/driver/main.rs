//! The driver against a model of a virtio device, which answers when a test says so.

mod events;
mod hostile;
mod model;
mod refusals;
mod requests;
mod start;
