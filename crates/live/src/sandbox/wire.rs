//! Messages between the daemon and the process. A message is one packet of 64-bit words; the first
//! word is its type. Either side treats an unknown message type or a wrong length as a protocol
//! violation.

use ringfence_types::{Access, Iova};
use virtio_queue::QueueState;

use crate::dma_fault_injection::InjectedDma;
use crate::virtio::QuantumResult;

/// Words of the longest message.
const MAX_WORDS: usize = 96;
/// Bytes of the longest message.
pub(super) const MAX_BYTES: usize = 8 * MAX_WORDS;
/// Most classes of injected DMA in a setup message.
pub(super) const MAX_INJECTED: usize = 16;

/// A device's position in the rings of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingPosition {
    pub(super) next_available: u16,
    pub(super) next_used: u16,
}

/// Declares a message type: the number of each message, and its fields in the order of the words.
macro_rules! messages {
    ($(#[$outer:meta])* $name:ident {
        $($(#[$inner:meta])* $message:ident = $number:literal
            $({ $($(#[$doc:meta])* $field:ident: $type:ty,)+ })?,)+
    }) => {
        $(#[$outer])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(super) enum $name {
            $($(#[$inner])* $message $({ $($(#[$doc])* $field: $type,)+ })?,)+
        }

        impl $name {
            pub(super) fn encode(&self) -> Vec<u8> {
                let mut words = Vec::new();
                match self {
                    $(Self::$message $({ $($field),+ })? => {
                        words.push($number);
                        $($($field.put(&mut words);)+)?
                    })+
                }
                words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect()
            }

            pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
                let words = words(bytes)?;
                let (number, mut rest) = words.split_first()?;
                let words = &mut rest;
                let message = match number {
                    $($number => Self::$message $({ $($field: Field::take(words)?),+ })?,)+
                    _ => return None,
                };
                words.is_empty().then_some(message)
            }
        }
    };
}

messages! {
    /// Message from the daemon to the process.
    DeviceCommand {
        /// First message, with the descriptors of the control region and the image.
        Setup = 1 {
            read_only: bool,
            /// Number of descriptors of the queue.
            queue_size: u16,
            /// Most bytes of a request.
            request_bytes: u64,
            injected: Vec<InjectedDma>,
        },
        /// Activates the device with the features that the driver accepted.
        Begin = 2 { features: u64, },
        /// Registers of a queue, as the driver set them.
        Queue = 3 {
            index: u16,
            size: u16,
            event_index: bool,
            descriptors: u64,
            available: u64,
            used: u64,
            /// Position at which to continue, for a device taken over from another process.
            at: RingPosition,
        },
        /// Process the queue for one turn. The response repeats the number `round`.
        Kick = 4 { index: u16, round: u64, },
        /// Reset the device.
        Reset = 5,
    }
}

messages! {
    /// Message from the process to the daemon.
    DeviceResponse {
        /// The mapping thread runs; carries the descriptor of the seccomp listener.
        Ready = 1,
        /// All threads are confined.
        Confined = 2,
        /// The turn has ended; `counted` holds its counter increments.
        Turn = 3 {
            index: u16,
            round: u64,
            turn: QuantumResult,
            at: RingPosition,
            counted: Vec<u64>,
        },
        /// The queue is broken and cannot be used until a reset.
        Broken = 4 { index: u16, round: u64, },
        /// The reset is done.
        ResetDone = 5,
        /// The I/O page table blocked an access.
        Fault = 6 {
            iova: Iova,
            access: Access,
            /// True if the page is mapped without the required permission.
            permission: bool,
        },
        /// Result of an injected DMA access.
        Injected = 7 { injected: InjectedDma, access: Access, iova: Iova, stopped: bool, },
        /// A request exceeded the size limit.
        TooLong = 8 { bytes: u64, most: u64, },
    }
}

impl DeviceCommand {
    /// Builds the command from the state of a queue.
    pub(super) fn queue(index: u16, state: &QueueState) -> Self {
        Self::Queue {
            index,
            size: state.size,
            event_index: state.event_idx_enabled,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
            at: RingPosition {
                next_available: state.next_avail,
                next_used: state.next_used,
            },
        }
    }
}

/// Returns the words of a message; `None` if it is too long or ends inside a word.
fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    match bytes.as_chunks() {
        (words, []) if words.len() <= MAX_WORDS => {
            Some(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
        }
        _ => None,
    }
}

/// A field of a message. A list takes all words that are left, so it is the last field.
trait Field: Sized {
    fn put(&self, words: &mut Vec<u64>);
    fn take(words: &mut &[u64]) -> Option<Self>;
}

impl Field for u64 {
    fn put(&self, words: &mut Vec<u64>) {
        words.push(*self);
    }

    fn take(words: &mut &[u64]) -> Option<Self> {
        words.split_off_first().copied()
    }
}

/// Implements [`Field`] for a type with a number for each value.
macro_rules! one_word {
    ($($type:ty: |$value:ident| $word:expr, |$number:ident| $read:expr;)+) => {
        $(impl Field for $type {
            fn put(&self, words: &mut Vec<u64>) {
                let $value = *self;
                words.push($word);
            }

            fn take(words: &mut &[u64]) -> Option<Self> {
                let $number = u64::take(words)?;
                $read
            }
        })+
    };
}

one_word! {
    u16: |value| value.into(), |word| word.try_into().ok();
    Iova: |iova| iova.get(), |word| Some(Iova::new(word));
    bool: |flag| flag.into(), |word| match word {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    };
    Access: |access| match access {
        Access::Read => 1,
        Access::Write => 2,
    }, |word| match word {
        1 => Some(Access::Read),
        2 => Some(Access::Write),
        _ => None,
    };
}

/// Implements [`Field`] for a struct: its fields, one after the other.
macro_rules! fields {
    ($($type:ident { $($field:ident),+ })+) => {
        $(impl Field for $type {
            fn put(&self, words: &mut Vec<u64>) {
                $(self.$field.put(words);)+
            }

            fn take(words: &mut &[u64]) -> Option<Self> {
                Some(Self { $($field: Field::take(words)?),+ })
            }
        })+
    };
}

fields! {
    RingPosition { next_available, next_used }
    QuantumResult { interrupt, more }
}

impl<T: Field> Field for Vec<T> {
    fn put(&self, words: &mut Vec<u64>) {
        self.iter().for_each(|item| item.put(words));
    }

    fn take(words: &mut &[u64]) -> Option<Self> {
        let mut items = Self::new();
        while !words.is_empty() {
            items.push(T::take(words)?);
        }
        Some(items)
    }
}

impl Field for InjectedDma {
    fn put(&self, words: &mut Vec<u64>) {
        words.extend(match self {
            Self::Stray(iova) => [1, iova.get()],
            Self::AfterUnmap => [2, 0],
            Self::WriteReadOnly => [3, 0],
            Self::ReadWriteOnly => [4, 0],
            Self::Foreign => [5, 0],
            Self::AfterRevoke => [6, 0],
            Self::Storm(iova) => [7, iova.get()],
            Self::KeepReading => [8, 0],
        });
    }

    fn take(words: &mut &[u64]) -> Option<Self> {
        let (class, iova) = (u64::take(words)?, Iova::take(words)?);
        Some(match class {
            1 => Self::Stray(iova),
            2 => Self::AfterUnmap,
            3 => Self::WriteReadOnly,
            4 => Self::ReadWriteOnly,
            5 => Self::Foreign,
            6 => Self::AfterRevoke,
            7 => Self::Storm(iova),
            8 => Self::KeepReading,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_round_trip() {
        let turn = QuantumResult {
            interrupt: true,
            more: false,
        };
        let at = RingPosition {
            next_available: 7,
            next_used: 6,
        };
        let injected = InjectedDma::Stray(Iova::new(0xdead_0000));
        for order in [
            DeviceCommand::Setup {
                read_only: true,
                queue_size: 128,
                request_bytes: 1 << 20,
                injected: vec![injected, InjectedDma::AfterRevoke],
            },
            DeviceCommand::Begin { features: 1 << 33 },
            DeviceCommand::Queue {
                index: 1,
                size: 256,
                event_index: true,
                descriptors: 0x1000,
                available: 0x2000,
                used: 0x3000,
                at,
            },
            DeviceCommand::Kick { index: 0, round: 9 },
            DeviceCommand::Reset,
        ] {
            assert_eq!(DeviceCommand::decode(&order.encode()), Some(order));
        }
        for report in [
            DeviceResponse::Ready,
            DeviceResponse::Confined,
            DeviceResponse::Turn {
                index: 0,
                round: 9,
                turn,
                at,
                counted: vec![1, 2, 3],
            },
            DeviceResponse::Broken { index: 0, round: 9 },
            DeviceResponse::ResetDone,
            DeviceResponse::Fault {
                iova: Iova::new(5),
                access: Access::Write,
                permission: true,
            },
            DeviceResponse::Injected {
                injected,
                access: Access::Read,
                iova: Iova::new(6),
                stopped: true,
            },
            DeviceResponse::TooLong { bytes: 9, most: 8 },
        ] {
            assert_eq!(DeviceResponse::decode(&report.encode()), Some(report));
        }
    }

    proptest! {
        /// Any input decodes to one message or to `None`, without a panic.
        #[test]
        fn nothing_else_is(
            words in prop::collection::vec(prop_oneof![0u64..9, any::<u64>()], 0..12),
            cut in 0usize..3,
        ) {
            let mut bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
            bytes.truncate(bytes.len().saturating_sub(cut));
            if let Some(report) = DeviceResponse::decode(&bytes) {
                prop_assert_eq!(DeviceResponse::decode(&report.encode()), Some(report));
            }
            if let Some(order) = DeviceCommand::decode(&bytes) {
                prop_assert_eq!(DeviceCommand::decode(&order.encode()), Some(order));
            }
        }
    }
}
