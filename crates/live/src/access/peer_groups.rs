//! Groups of the process at the other end of a socket (`SO_PEERGROUPS`), which rustix does not
//! offer.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Most supplementary groups of a process (`NGROUPS_MAX`).
const MOST: usize = 65536;

/// Returns the supplementary groups that the peer had when it connected.
///
/// # Errors
/// The kernel does not know them.
pub(super) fn peer_groups(stream: &UnixStream) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let room = size_of_val(groups.as_slice());
        let mut bytes = libc::socklen_t::try_from(room).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes to `groups`, which has as many, and their
        // number to `bytes`.
        let result = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // `bytes` is the required length now.
        let fits = count > groups.len() && count <= MOST;
        if error.raw_os_error() != Some(libc::ERANGE) || !fits {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}
