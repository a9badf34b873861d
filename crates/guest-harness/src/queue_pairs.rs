//! Sets the number of queue pairs of a network device, as `ethtool -L` does. Linux enables one pair
//! per CPU; with this call one CPU serves several.

#![allow(unsafe_code)]

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// `SIOCETHTOOL` of `linux/sockios.h`.
const SIOCETHTOOL: libc::c_ulong = 0x8946;
/// `ETHTOOL_SCHANNELS` of `linux/ethtool.h`.
const SET_CHANNELS: u32 = 0x3d;
/// Bytes of an interface's name, with the 0 at its end (`IFNAMSIZ`).
const NAME_BYTES: usize = 16;

/// `struct ethtool_channels` of `linux/ethtool.h`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    maxima: [u32; 4],
    receive: u32,
    transmit: u32,
    other: u32,
    combined: u32,
}

/// `struct ifreq` with its pointer.
#[repr(C)]
struct Request {
    name: [u8; NAME_BYTES],
    data: *mut Channels,
    padding: [u8; 16],
}

/// Sets the number of queue pairs of `interface`.
///
/// # Errors
/// No such interface exists, or its device has fewer pairs.
pub fn set_queue_pairs(interface: &str, pairs: u32) -> io::Result<()> {
    let mut name = [0; NAME_BYTES];
    let room = name.get_mut(..interface.len().min(NAME_BYTES - 1));
    let fits = room.filter(|room| room.len() == interface.len());
    fits.ok_or(io::ErrorKind::InvalidInput)?
        .copy_from_slice(interface.as_bytes());
    let mut channels = Channels {
        command: SET_CHANNELS,
        combined: pairs,
        ..Channels::default()
    };
    let mut request = Request {
        name,
        data: &raw mut channels,
        padding: [0; 16],
    };
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: both structures have the kernel's layout, and outlive the call that reads them.
    let code = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernel() {
        assert_eq!(size_of::<Channels>(), 36);
        assert_eq!(size_of::<Request>(), 40);
        assert_eq!(std::mem::offset_of!(Channels, combined), 32);
        assert_eq!(std::mem::offset_of!(Request, data), 16);
    }

    #[test]
    fn unknown_interfaces_and_long_names_are_errors() {
        assert!(set_queue_pairs("none0", 4).is_err());
        let long = set_queue_pairs("a-name-of-16-chr", 4).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidInput);
    }
}
