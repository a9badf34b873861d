//! Status byte of a request.

use core::fmt;

/// Result of a request ("Requests"). If several statuses apply, the host reports the lowest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Status {
    /// The host executed the whole request.
    Ok = 0,
    /// The request is malformed.
    Malformed = 1,
    /// The backend serves no such device.
    NoDevice = 2,
    /// A GIOVA is misaligned or outside the window.
    BadGiova = 3,
    /// A GPA is misaligned or outside the guest's memory.
    BadGpa = 4,
    /// A GIOVA is mapped already, or occurs twice in the request.
    Mapped = 5,
    /// A GIOVA is not mapped, or occurs twice in the request.
    NotMapped = 6,
    /// The request exceeds a limit of the host.
    NoRoom = 7,
    /// The host failed to execute the request; the mappings are unchanged.
    Failed = 8,
}

impl Status {
    /// All statuses, in the order of their values.
    pub const ALL: [Self; 9] = [
        Self::Ok,
        Self::Malformed,
        Self::NoDevice,
        Self::BadGiova,
        Self::BadGpa,
        Self::Mapped,
        Self::NotMapped,
        Self::NoRoom,
        Self::Failed,
    ];

    /// Returns the byte on the wire.
    #[inline]
    pub const fn raw(self) -> u8 {
        self as u8
    }

    /// Decodes a status as a driver does: reserved values are [`Status::Failed`].
    #[inline]
    pub const fn from_raw(raw: u8) -> Self {
        match raw {
            0 => Self::Ok,
            1 => Self::Malformed,
            2 => Self::NoDevice,
            3 => Self::BadGiova,
            4 => Self::BadGpa,
            5 => Self::Mapped,
            6 => Self::NotMapped,
            7 => Self::NoRoom,
            _ => Self::Failed,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "done",
            Self::Malformed => "malformed request",
            Self::NoDevice => "no such device",
            Self::BadGiova => "address outside the device's window",
            Self::BadGpa => "not the guest's memory",
            Self::Mapped => "mapped already",
            Self::NotMapped => "not mapped",
            Self::NoRoom => "a limit of the host",
            Self::Failed => "the host failed",
        })
    }
}
