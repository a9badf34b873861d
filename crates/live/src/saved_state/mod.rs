//! State of devices that a process saves for another one, and its encoding.
//!
//! Each device, link and register file has its state and [`SaveState`] next to itself. This module
//! has what they share: the codec, its errors and the trait.

mod codec;
mod error;

use std::os::fd::OwnedFd;

pub use codec::MAX_STREAM_BYTES;
pub(crate) use codec::{Reader, Writer};
pub use error::{HandOverBlocker, StateError};

/// A state that a stream can carry.
pub(crate) trait SaveState: Sized {
    /// Appends the state to `out`.
    fn encode(self, out: &mut Writer);

    /// Reads a state.
    ///
    /// # Errors
    /// The stream is truncated, or a value is out of range.
    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError>;
}

macro_rules! save_as {
    ($($type:ty: $method:ident;)+) => {
        $(impl SaveState for $type {
            fn encode(self, out: &mut Writer) {
                out.$method(self);
            }

            fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
                input.$method()
            }
        })+
    };
}

save_as! {
    OwnedFd: fd;
    bool: flag;
    u8: u8;
    u16: u16;
    u32: u32;
    u64: u64;
}

impl<const N: usize> SaveState for [u8; N] {
    fn encode(self, out: &mut Writer) {
        out.bytes.extend(self);
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        input.array()
    }
}

/// A flag, and the state if the flag is set.
impl<T: SaveState> SaveState for Option<T> {
    fn encode(self, out: &mut Writer) {
        out.flag(self.is_some());
        if let Some(state) = self {
            state.encode(out);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        input.flag()?.then(|| T::decode(input)).transpose()
    }
}

/// Implements [`SaveState`] for a struct: its fields, one after the other. A byte string (`blob`)
/// and a list have the name of their length in errors, and their maximum length.
macro_rules! save_fields {
    ($state:ident { $($field:ident $(: $kind:ident($what:literal, $most:expr))?),+ $(,)? }) => {
        impl SaveState for $state {
            fn encode(self, out: &mut Writer) {
                $(save_fields!(@encode self.$field, out $(, $kind)?);)+
            }

            fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
                Ok(Self {
                    $($field: save_fields!(@decode input $(, $kind, $what, $most)?),)+
                })
            }
        }
    };
    (@encode $value:expr, $out:ident) => { $value.encode($out) };
    (@encode $value:expr, $out:ident, $kind:ident) => { $out.$kind($value) };
    (@decode $input:ident) => { SaveState::decode($input)? };
    (@decode $input:ident, $kind:ident, $what:literal, $most:expr) => {
        $input.$kind($what, $most)?
    };
}
pub(crate) use save_fields;

/// Declares an enum of the numbers that distinguish messages or states in an encoding.
macro_rules! wire_numbers {
    ($(#[$outer:meta])* $vis:vis enum $name:ident: $repr:ident {
        $($(#[$inner:meta])* $variant:ident = $number:literal),+ $(,)?
    }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr($repr)]
        $vis enum $name {
            $($(#[$inner])* $variant = $number),+
        }

        impl $name {
            /// Returns the variant of `number`. `None` if there is no such variant.
            $vis fn from_number(number: $repr) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use wire_numbers;
