//! The limit on the contents of a stream.

use std::fmt;

/// Limit on the stored bytes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpoolLimit {
    /// Maximum number of bytes.
    pub bytes: u64,
    /// The option of the command that sets the limit.
    pub option: Option<&'static str>,
}

impl SpoolLimit {
    /// Returns the advice to a user whose stream exceeds the limit.
    pub(crate) fn advice(&self) -> String {
        match self.option {
            Some(option) => format!("name a file, or raise the limit with `{option}`"),
            None => "name a file".into(),
        }
    }
}

impl fmt::Display for SpoolLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 30) => write!(f, "{} GiB", bytes >> 30),
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 20) => write!(f, "{} MiB", bytes >> 20),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}
