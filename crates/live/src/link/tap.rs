//! A tap interface of the host.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{FileType, fstat, major, minor};
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::LinkState;
use super::{NetLink, ReceiveOutcome, SendOutcome, never_waits, received};
use crate::event::PollSource;
use crate::saved_state::{HandOverBlocker, StateError};

/// Longest interface name in bytes, without the terminating zero.
pub(super) const MAX_NAME_BYTES: usize = 15;

/// `struct ifreq` of these requests: a name, flags, and an unused rest (Linux,
/// include/uapi/linux/if.h).
#[repr(C)]
struct IfReq {
    name: [u8; MAX_NAME_BYTES + 1],
    flags: u16,
    unused: [u8; 22],
}

/// `TUNSETIFF`. Its number encodes `int` although it takes a `struct ifreq` (Linux,
/// include/uapi/linux/if_tun.h).
const SET_INTERFACE: Opcode = opcode::write::<i32>(b'T', 202);
/// `TUNGETIFF`. Its number encodes `unsigned int` although it fills a `struct ifreq`.
const GET_INTERFACE: Opcode = opcode::read::<u32>(b'T', 210);
/// Major and minor number of `/dev/net/tun` (Linux, Documentation/admin-guide/devices.txt).
const DEVICE: (u32, u32) = (10, 200);
const TUN: u16 = 1;
const TAP: u16 = 2;
/// `IFF_NO_PI`: frames carry no packet information header.
const NO_INFORMATION: u16 = 0x1000;
/// `IFF_VNET_HDR`: frames carry a virtio-net header for offloads.
const OFFLOADS: u16 = 0x4000;

/// A tap interface.
#[derive(Debug)]
pub struct TapLink {
    file: File,
    /// True if the host removed the interface. Its descriptor then polls ready forever.
    removed: bool,
}

impl TapLink {
    /// Opens the interface `name`, or creates one that exists until this descriptor closes. Needs
    /// `CAP_NET_ADMIN` unless the interface belongs to this user.
    ///
    /// # Errors
    /// The host refused, or the name is too long.
    pub fn open(name: &str) -> io::Result<Self> {
        let mut request = IfReq {
            name: [0; MAX_NAME_BYTES + 1],
            flags: TAP | NO_INFORMATION,
            unused: [0; 22],
        };
        let destination = request.name.get_mut(..name.len().min(MAX_NAME_BYTES));
        match destination {
            Some(field) if field.len() == name.len() => field.copy_from_slice(name.as_bytes()),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(nonblocking)
            .open("/dev/net/tun")?;
        // SAFETY: TUNSETIFF reads and writes one `struct ifreq` where its argument points and keeps
        // no pointer. `IfReq` has its size and layout (40 bytes: a name of 16, then a union that
        // begins with 16 bits of flags), and lives longer than the call. Any bytes are a valid
        // `IfReq`, so what the kernel writes is one.
        unsafe { ioctl(&file, Updater::<SET_INTERFACE, IfReq>::new(&mut request)) }?;
        Ok(Self {
            file,
            removed: false,
        })
    }

    pub(super) fn restore(fd: OwnedFd) -> Result<Self, StateError> {
        let not = StateError::NotA {
            what: "tap interface",
        };
        let about = fstat(&fd).map_err(io::Error::from)?;
        let device = (major(about.st_rdev), minor(about.st_rdev));
        let is_character = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
        if !is_character || device != DEVICE || !never_waits(&fd) {
            return Err(not);
        }
        let mut request = IfReq {
            name: [0; MAX_NAME_BYTES + 1],
            flags: 0,
            unused: [0; 22],
        };
        // SAFETY: the descriptor is one of /dev/net/tun, where TUNGETIFF writes one `struct ifreq`
        // where its argument points and keeps no pointer. `IfReq` is as above.
        let got = unsafe { ioctl(&fd, Updater::<GET_INTERFACE, IfReq>::new(&mut request)) };
        let kind = request.flags & (TUN | TAP | NO_INFORMATION | OFFLOADS);
        if got.is_err() || kind != TAP | NO_INFORMATION {
            return Err(not);
        }
        Ok(Self {
            file: File::from(fd),
            removed: false,
        })
    }
}

impl NetLink for TapLink {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        match (&self.file).write(frame) {
            Ok(_) => SendOutcome::Taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => SendOutcome::Full,
            // The interface is down or removed.
            Err(_) => SendOutcome::Lost,
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        match (&self.file).read(buffer) {
            Ok(got) => received(got),
            Err(error) => {
                let later = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
                self.removed |= !later.contains(&error.kind());
                ReceiveOutcome::Nothing
            }
        }
    }

    fn waits_for(&self, input: bool, output: bool) -> Option<PollSource<'_>> {
        (!self.removed).then_some(PollSource {
            fd: self.file.as_fd(),
            input,
            output,
        })
    }

    /// The interface exists until its last descriptor closes.
    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        if self.removed {
            return Err(HandOverBlocker::Unsupported(
                "a link whose interface was removed",
            ));
        }
        Ok(LinkState::Tap {
            file: self.file.try_clone()?.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Models a removed interface: the descriptor is always ready, and a read fails.
    #[test]
    fn an_interface_that_has_gone_is_not_waited_for() {
        let file = File::open("/").unwrap();
        let mut tap = TapLink {
            file,
            removed: false,
        };
        assert!(tap.waits_for(true, false).is_some());
        assert_eq!(tap.receive(&mut [0; 2000]), ReceiveOutcome::Nothing);
        assert!(tap.waits_for(true, true).is_none());
        assert_eq!(tap.send(&[0; 60]), SendOutcome::Lost);
    }
}
