//! Addresses of network links, as written on the command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::tap::MAX_NAME_BYTES;

/// Address of a network device's peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A tap interface of the host: `tap=NAME`.
    Tap(String),
    /// A stream socket: `socket=PATH`. The side that opens it first listens.
    Stream(PathBuf),
    /// A pair of datagram sockets: `datagram=PATH:PATH`, local path first.
    Datagram {
        /// Path of the local socket.
        local: PathBuf,
        /// Path of the peer's socket.
        remote: PathBuf,
    },
}

impl Address {
    /// Returns the path or interface name to report in an error.
    pub fn path(&self) -> &Path {
        match self {
            Self::Tap(name) => name.as_ref(),
            Self::Stream(path) => path,
            Self::Datagram { local, .. } => local,
        }
    }
}

/// Reason why a string is not an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The prefix is no known kind.
    #[error("expected tap=NAME, socket=PATH or datagram=PATH:PATH")]
    Kind,
    /// Invalid interface name: it must have 1 to 15 bytes, no `/` and no space.
    #[error("an interface name has 1 to 15 bytes, no '/' and no space")]
    Name,
    /// A path is missing.
    #[error("expected a path")]
    Path,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let path = |text: &str| match text {
            "" => Err(AddressError::Path),
            text => Ok(PathBuf::from(text)),
        };
        match text.split_once('=') {
            Some(("tap", name)) => {
                let odd = |c: char| c == '/' || c == '\0' || c.is_whitespace();
                if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(odd) {
                    return Err(AddressError::Name);
                }
                Ok(Self::Tap(name.to_owned()))
            }
            Some(("socket", text)) => path(text).map(Self::Stream),
            Some(("datagram", text)) => {
                let (local, remote) = text.split_once(':').ok_or(AddressError::Path)?;
                Ok(Self::Datagram {
                    local: path(local)?,
                    remote: path(remote)?,
                })
            }
            _ => Err(AddressError::Kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds() {
        let cases: [(&str, Result<Address, AddressError>); 9] = [
            ("tap=tap0", Ok(Address::Tap("tap0".into()))),
            ("tap=", Err(AddressError::Name)),
            ("tap=sixteen-letters!", Err(AddressError::Name)),
            ("tap=a/b", Err(AddressError::Name)),
            ("socket=/run/a", Ok(Address::Stream("/run/a".into()))),
            ("socket=", Err(AddressError::Path)),
            (
                "datagram=a:b",
                Ok(Address::Datagram {
                    local: "a".into(),
                    remote: "b".into(),
                }),
            ),
            ("datagram=a", Err(AddressError::Path)),
            ("bridge=br0", Err(AddressError::Kind)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse::<Address>(), expected, "{text}");
        }
    }
}
