//! Access control for the sockets and files of this process.
//!
//! A socket gets its mode before its name, so other users can never connect in between. The user
//! and the groups of each connection are checked as well, since the mode can be changed later.

mod directory;
mod peer_groups;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, chmod, chownat, fchmod};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use rustix::process::geteuid;

pub use self::directory::{NotPrivate, make_cache};
use self::peer_groups::peer_groups;
pub use rustix::process::{Gid, Uid};

use crate::stale_socket;

/// Most connections in the accept queue of a socket; further clients block in `connect`.
const BACKLOG: i32 = 128;

/// Users who may connect to the devices' sockets, in addition to this process's user and root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SocketAccess {
    /// No other user.
    #[default]
    OwnUser,
    /// Members of a group, for a QEMU that runs as another user.
    Group(Gid),
}

/// A refused connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("user {user} may not connect; --group names who may")]
pub struct RefusedPeer {
    /// User of the connecting process; `u32::MAX` if unknown.
    pub user: u32,
}

impl SocketAccess {
    fn group(self) -> Option<u32> {
        match self {
            Self::OwnUser => None,
            Self::Group(group) => Some(group.as_raw()),
        }
    }

    /// Returns the mode of a socket or a file.
    fn mode(self) -> Mode {
        match self {
            Self::OwnUser => Mode::RUSR | Mode::WUSR,
            Self::Group(_) => Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP,
        }
    }

    /// Lets the users who may connect use the file at `path`, which only its owner could use so
    /// far.
    ///
    /// # Errors
    /// Changing the file's group or mode failed.
    pub fn share(self, path: &Path) -> io::Result<()> {
        self.open_up(path, self.mode())
    }

    /// Gives the group access to the file at `path`, which only its owner could use so far.
    fn open_up(self, path: &Path, mode: Mode) -> io::Result<()> {
        if let Self::Group(group) = self {
            chownat(CWD, path, None, Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
            chmod(path, mode)?;
        }
        Ok(())
    }

    /// Listens at `path` and replaces a stale socket there.
    ///
    /// # Errors
    /// The socket cannot be created, or `path` belongs to another file or a live socket.
    pub fn listen(self, path: &Path) -> io::Result<UnixListener> {
        stale_socket::clear(path)?;
        let socket = named(SocketType::STREAM, path)?;
        listen(&socket, BACKLOG)?;
        self.open_up(path, self.mode())?;
        Ok(socket.into())
    }

    /// Checks that the process at the other end of `stream` may use it.
    ///
    /// # Errors
    /// [`RefusedPeer`].
    pub fn admit(self, stream: &UnixStream) -> Result<(), RefusedPeer> {
        let peer = socket_peercred(stream).map_err(|_| RefusedPeer { user: u32::MAX })?;
        let is_member = |group: u32| {
            group == peer.gid.as_raw()
                || peer_groups(stream).is_ok_and(|groups| groups.contains(&group))
        };
        if is_own(peer.uid) || self.group().is_some_and(is_member) {
            return Ok(());
        }
        Err(RefusedPeer {
            user: peer.uid.as_raw(),
        })
    }

    /// Writes `bytes` to a new file at `path` and replaces an existing file.
    ///
    /// # Errors
    /// Removing the old file or writing the new one failed.
    pub fn write(self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = File::options();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(bytes)?;
        self.open_up(path, self.mode())
    }
}

/// Binds a datagram socket at `path` that only this user can send to.
pub(crate) fn bind_datagram(path: &Path) -> io::Result<UnixDatagram> {
    stale_socket::clear(path)?;
    named(SocketType::DGRAM, path).map(Into::into)
}

/// Binds a socket that only this user can use: Linux gives the file the mode of the socket's inode.
fn named(kind: SocketType, path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns the user of the process at the other end: for a client, of the listener; for a listener,
/// of the client.
pub(crate) fn peer(stream: &UnixStream) -> io::Result<Uid> {
    Ok(socket_peercred(stream)?.uid)
}

/// Returns true if this process trusts `user` like its own user.
pub(crate) fn is_own(user: Uid) -> bool {
    user == geteuid() || user.is_root()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::PathBuf;
    use std::thread;

    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

    use super::*;

    struct Dir(PathBuf, #[allow(dead_code)] tempfile::TempDir);

    impl Dir {
        fn new(name: &str) -> Self {
            let parent = tempfile::tempdir().unwrap();
            // Lets other users reach files below, as in a public directory.
            fs::set_permissions(parent.path(), fs::Permissions::from_mode(0o711)).unwrap();
            let path = parent.path().join(name);
            SocketAccess::OwnUser.make_directory(&path).unwrap();
            Self(path, parent)
        }

        fn mode(&self, name: &str) -> u32 {
            fs::metadata(self.0.join(name)).unwrap().mode() & 0o777
        }
    }

    /// Connects to `path` from a thread of another user. `None` if this test may not change its
    /// user.
    fn connect_as_another_user(path: &Path) -> Option<io::Result<UnixStream>> {
        connect_with_groups(path, 65534, &[])
    }

    /// Like [`connect_as_another_user`], with this group and these supplementary groups.
    fn connect_with_groups(
        path: &Path,
        group: u32,
        groups: &[u32],
    ) -> Option<io::Result<UnixStream>> {
        let path = path.to_owned();
        let group = Gid::from_raw(group);
        let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
        let connect = move || {
            let nobody = Uid::from_raw(65534);
            set_thread_groups(&groups).ok()?;
            set_thread_res_gid(group, group, group).ok()?;
            set_thread_res_uid(nobody, nobody, nobody).ok()?;
            Some(UnixStream::connect(path))
        };
        thread::spawn(connect).join().unwrap()
    }

    #[test]
    fn created_files_are_private_to_the_user() {
        let dir = Dir::new("alone");
        let (socket, file) = (dir.0.join("socket"), dir.0.join("file"));
        let _listener = SocketAccess::OwnUser.listen(&socket).unwrap();
        let _datagrams = bind_datagram(&dir.0.join("datagrams")).unwrap();
        // An existing link is replaced, not followed.
        fs::write(dir.0.join("precious"), "precious").unwrap();
        std::os::unix::fs::symlink(dir.0.join("precious"), &file).unwrap();
        SocketAccess::OwnUser.write(&file, b"new").unwrap();
        assert_eq!(fs::read(dir.0.join("precious")).unwrap(), b"precious");
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(dir.mode(""), 0o700);
        for name in ["socket", "datagrams", "file"] {
            assert_eq!(dir.mode(name), 0o600, "{name}");
        }
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755)).unwrap();
        if let Some(connected) = connect_as_another_user(&socket) {
            let error = connected.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        }
    }

    /// The kernel queues connections that the daemon has not accepted.
    #[test]
    fn pending_connections_are_bounded() {
        let dir = Dir::new("pending");
        let socket = dir.0.join("socket");
        let _listener = SocketAccess::OwnUser.listen(&socket).unwrap();
        let address = SocketAddrUnix::new(&socket).unwrap();
        let connect = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&stream, &address).map(|()| stream)
        };
        let mut pending = Vec::new();
        let refused = loop {
            match connect() {
                Ok(stream) => pending.push(stream),
                Err(error) => break error,
            }
            assert!(pending.len() < 1000, "without a bound");
        };
        assert_eq!(refused, rustix::io::Errno::AGAIN);
        // Linux queues one connection more than the backlog (`sk_acceptq_is_full`).
        assert_eq!(pending.len(), 129);
    }

    #[test]
    fn peers_are_checked_in_every_file_mode() {
        let dir = Dir::new("asked");
        let socket = dir.0.join("socket");
        let listener = SocketAccess::OwnUser.listen(&socket).unwrap();
        let own = UnixStream::connect(&socket).unwrap();
        assert_eq!(
            SocketAccess::OwnUser.admit(&listener.accept().unwrap().0),
            Ok(())
        );
        drop(own);
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        let Some(connected) = connect_as_another_user(&socket) else {
            return;
        };
        let _theirs = connected.unwrap();
        let (stream, _) = listener.accept().unwrap();
        let refused = Err(RefusedPeer { user: 65534 });
        assert_eq!(SocketAccess::OwnUser.admit(&stream), refused);
    }

    /// The socket's mode lets everyone connect; only members of the group are admitted.
    #[test]
    fn only_members_of_the_group_are_admitted_whatever_the_mode() {
        const GROUP: u32 = 4321;
        let dir = Dir::new("members");
        let socket = dir.0.join("socket");
        let listener = SocketAccess::OwnUser.listen(&socket).unwrap();
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
        // More groups than the first buffer of `peer_groups` has room for.
        let many: Vec<u32> = (GROUP - 200..=GROUP).collect();
        let (last, others) = many.split_last().unwrap();
        for (group, groups, admitted) in [
            (GROUP, &[][..], true),
            (1, &[2, GROUP], true),
            (1, &many, true),
            (1, &[], false),
            (*last + 1, others, false),
        ] {
            let Some(connected) = connect_with_groups(&socket, group, groups) else {
                return;
            };
            let _theirs = connected.unwrap();
            let (stream, _) = listener.accept().unwrap();
            let result = SocketAccess::Group(Gid::from_raw(GROUP)).admit(&stream);
            assert_eq!(
                result.is_ok(),
                admitted,
                "group {group} of {}",
                groups.len()
            );
        }
        // This process's user needs no group.
        let _own = UnixStream::connect(&socket).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let access = SocketAccess::Group(Gid::from_raw(GROUP));
        assert_eq!(access.admit(&stream), Ok(()));
    }

    #[test]
    fn a_group_gets_only_the_needed_permissions() {
        let dir = Dir::new("group");
        let own = rustix::process::getegid();
        let shared = SocketAccess::Group(own);
        shared.make_directory(&dir.0.join("shared")).unwrap();
        let _listener = shared.listen(&dir.0.join("shared/socket")).unwrap();
        shared.write(&dir.0.join("shared/file"), b"").unwrap();
        assert_eq!(dir.mode("shared"), 0o710);
        assert_eq!(dir.mode("shared/socket"), 0o660);
        assert_eq!(dir.mode("shared/file"), 0o660);
    }
}
