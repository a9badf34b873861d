//! Sockets left in the file system by a killed process. Nothing can bind to their path until they
//! are removed.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;

/// Removes the socket at `path` if no process has it open. Other files and sockets in use remain.
///
/// # Errors
/// [`AddrInUse`](io::ErrorKind::AddrInUse) if another file or a live socket has this path. Other
/// errors come from reading or removing the file.
pub(crate) fn clear(path: &Path) -> io::Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(about) => about.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let in_use = |what| Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    if !kind.is_socket() {
        return in_use("the file exists and is not a socket");
    }
    // Connecting to a socket of the other type fails with another error.
    let refuses = |tried: io::Result<()>| {
        tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    let datagram = UnixDatagram::unbound()?;
    if refuses(UnixStream::connect(path).map(drop)) || refuses(datagram.connect(path)) {
        return fs::remove_file(path);
    }
    in_use("another process listens on the socket")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_unused_sockets_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        clear(&at("nothing")).unwrap();

        fs::write(at("file"), "precious").unwrap();
        let error = clear(&at("file")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read(at("file")).unwrap(), b"precious");

        let stream = UnixListener::bind(at("stream")).unwrap();
        let datagram = UnixDatagram::bind(at("datagram")).unwrap();
        for name in ["stream", "datagram"] {
            let error = clear(&at(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{name}");
            assert!(at(name).exists(), "{name}");
        }
        drop((stream, datagram));
        for name in ["stream", "datagram"] {
            clear(&at(name)).unwrap();
            assert!(!at(name).exists(), "{name}");
        }
    }
}
