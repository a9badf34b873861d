//! Tests of the controller: a host in memory drives it through its registers.

mod commands;
mod events;
mod hostile;
mod queues;
mod registers;
mod rig;
mod transfers;
