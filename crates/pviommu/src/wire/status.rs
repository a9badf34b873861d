//! The byte that answers a request.

use core::fmt;

/// What became of a request ("Requests"). In the order of the values: where several apply, the
/// lowest is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done as a whole.
    Ok = 0,
    /// The bytes are no request.
    Malformed = 1,
    /// No mappings are kept for that device.
    NoDevice = 2,
    /// A GIOVA is misaligned or outside the window.
    BadGiova = 3,
    /// A GPA is misaligned or no memory of this machine.
    BadGpa = 4,
    /// A GIOVA is mapped already, or stands in the request twice.
    Mapped = 5,
    /// A GIOVA is not mapped, or stands in the request twice.
    NotMapped = 6,
    /// A limit of the host.
    NoRoom = 7,
    /// The host could not carry it out; the mappings are as before.
    Failed = 8,
}

impl Status {
    /// All of them.
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

    /// The byte on the wire.
    #[inline]
    pub const fn raw(self) -> u8 {
        self as u8
    }

    /// As a driver reads it: reserved values are [`Status::Failed`].
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
