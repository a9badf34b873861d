//! A scripted client against the protocol, the devices and the sockets, without QEMU; most of it lies.
#![allow(missing_docs)]

mod assigned;
mod disk;
mod guest;
mod handover;
mod hostile;
mod interrupts;
mod links;
mod master;
mod memory;
mod net;
mod options;
mod para;
mod para_rings;
mod private;
mod pviommu;
mod rig;
mod rings;
mod sockets;
mod translated;
mod vhost_user;
