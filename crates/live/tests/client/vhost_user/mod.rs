//! The disk as a vhost-user back-end, by a front-end that keeps the protocol and by one that does
//! not.

mod front;
mod hostile;
mod refused;
mod ring;
