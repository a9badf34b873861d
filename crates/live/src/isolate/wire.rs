//! What the daemon and the process say to each other. A message is one packet of 64-bit words, the first of which is its kind; either side takes what it
//! does not know, or what is not as long as it has to be, for a breach.

use ringfence_types::{Access, Iova};
use virtio_queue::QueueState;

use crate::errant::Errant;
use crate::virtio::Turn;

/// Words of the longest message.
const MAX_WORDS: usize = 96;
/// Bytes of the longest message.
pub(super) const MAX_BYTES: usize = 8 * MAX_WORDS;
/// Most classes of misbehaviour at a time.
pub(super) const MAX_ERRANT: usize = 16;

/// How far a device is in the rings of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) next_available: u16,
    pub(super) next_used: u16,
}

/// The daemon speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The first, with the descriptors of board and image.
    Setup {
        read_only: bool,
        /// Descriptors of its queue.
        queue_size: u16,
        /// Most bytes of a request.
        request_bytes: u64,
        errant: Vec<Errant>,
    },
    /// The driver begins.
    Begin { features: u64 },
    /// What the driver has put into the registers of a queue.
    Queue {
        index: u16,
        size: u16,
        event_index: bool,
        descriptors: u64,
        available: u64,
        used: u64,
        /// How far another process was in its rings.
        at: Place,
    },
    /// Work on a queue for a turn; the number comes back with what became of it.
    Kick { index: u16, round: u64 },
    /// Back to the beginning.
    Reset,
}

/// The process speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// With the descriptor of the supervisor's end.
    Ready,
    /// No thread can do any more than it may.
    Confined,
    /// The turn is over; what was counted in it.
    Turn {
        index: u16,
        round: u64,
        turn: Turn,
        at: Place,
        counted: Vec<u64>,
    },
    /// The queue cannot be used any further.
    Broken { index: u16, round: u64 },
    /// The reset is done.
    WasReset,
    /// An access was stopped.
    Stopped {
        iova: Iova,
        access: Access,
        /// The page is there, and not for that.
        permission: bool,
    },
    /// A test misbehaved.
    Tried {
        errant: Errant,
        access: Access,
        iova: Iova,
        stopped: bool,
    },
    /// A request was longer than one may be.
    TooLong { bytes: u64, most: u64 },
}

impl Order {
    pub(super) fn encode(&self) -> Vec<u8> {
        let words = match self {
            Self::Setup {
                read_only,
                queue_size,
                request_bytes,
                errant,
            } => {
                let flags = u64::from(*read_only);
                let mut words = vec![1, flags, u64::from(*queue_size), *request_bytes];
                for errant in errant.iter().take(MAX_ERRANT) {
                    let (class, address) = class(*errant);
                    words.extend([class, address]);
                }
                words
            }
            Self::Begin { features } => vec![2, *features],
            Self::Queue {
                index,
                size,
                event_index,
                descriptors,
                available,
                used,
                at,
            } => vec![
                3,
                u64::from(*index),
                u64::from(*size),
                u64::from(*event_index),
                *descriptors,
                *available,
                *used,
                u64::from(at.next_available),
                u64::from(at.next_used),
            ],
            Self::Kick { index, round } => vec![4, u64::from(*index), *round],
            Self::Reset => vec![5],
        };
        bytes(&words)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let words = words(bytes)?;
        Some(match words.as_slice() {
            [1, read_only, queue_size, request_bytes, classes @ ..] => {
                let (pairs, []) = classes.as_chunks::<2>() else {
                    return None;
                };
                let errant = pairs.iter().map(|[class, at]| errant(*class, *at));
                Self::Setup {
                    read_only: flag(*read_only)?,
                    queue_size: short(*queue_size)?,
                    request_bytes: *request_bytes,
                    errant: errant.collect::<Option<_>>()?,
                }
            }
            [2, features] => Self::Begin {
                features: *features,
            },
            [
                3,
                index,
                size,
                event_index,
                descriptors,
                available,
                used,
                next_available,
                next_used,
            ] => Self::Queue {
                index: short(*index)?,
                size: short(*size)?,
                event_index: flag(*event_index)?,
                descriptors: *descriptors,
                available: *available,
                used: *used,
                at: place(*next_available, *next_used)?,
            },
            [4, index, round] => Self::Kick {
                index: short(*index)?,
                round: *round,
            },
            [5] => Self::Reset,
            _ => return None,
        })
    }

    /// The registers of a queue, and how far the device is in it.
    pub(super) fn queue(index: u16, state: &QueueState) -> Self {
        Self::Queue {
            index,
            size: state.size,
            event_index: state.event_idx_enabled,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
            at: Place {
                next_available: state.next_avail,
                next_used: state.next_used,
            },
        }
    }
}

impl Report {
    pub(super) fn encode(&self) -> Vec<u8> {
        let words = match self {
            Self::Ready => vec![1],
            Self::Confined => vec![2],
            Self::Turn {
                index,
                round,
                turn,
                at,
                counted,
            } => {
                let flags = [turn.interrupt, turn.more].map(u64::from);
                let mut words = vec![3, u64::from(*index), *round, flags[0], flags[1]];
                words.extend([at.next_available, at.next_used].map(u64::from));
                words.extend(counted);
                words
            }
            Self::Broken { index, round } => vec![4, u64::from(*index), *round],
            Self::WasReset => vec![5],
            Self::Stopped {
                iova,
                access,
                permission,
            } => vec![6, iova.get(), way(*access), u64::from(*permission)],
            Self::Tried {
                errant,
                access,
                iova,
                stopped,
            } => {
                let (class, address) = class(*errant);
                let stopped = u64::from(*stopped);
                vec![7, class, address, way(*access), iova.get(), stopped]
            }
            Self::TooLong { bytes, most } => vec![8, *bytes, *most],
        };
        bytes(&words)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let words = words(bytes)?;
        Some(match words.as_slice() {
            [1] => Self::Ready,
            [2] => Self::Confined,
            [
                3,
                index,
                round,
                interrupt,
                more,
                next_available,
                next_used,
                counted @ ..,
            ] => Self::Turn {
                index: short(*index)?,
                round: *round,
                turn: Turn {
                    interrupt: flag(*interrupt)?,
                    more: flag(*more)?,
                },
                at: place(*next_available, *next_used)?,
                counted: counted.to_vec(),
            },
            [4, index, round] => Self::Broken {
                index: short(*index)?,
                round: *round,
            },
            [5] => Self::WasReset,
            [6, iova, way, permission] => Self::Stopped {
                iova: Iova::new(*iova),
                access: access(*way)?,
                permission: flag(*permission)?,
            },
            [7, class, address, way, iova, stopped] => Self::Tried {
                errant: errant(*class, *address)?,
                access: access(*way)?,
                iova: Iova::new(*iova),
                stopped: flag(*stopped)?,
            },
            [8, bytes, most] => Self::TooLong {
                bytes: *bytes,
                most: *most,
            },
            _ => return None,
        })
    }
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, []) = bytes.as_chunks::<8>() else {
        return None;
    };
    let fits = words.len() <= MAX_WORDS;
    fits.then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

fn flag(word: u64) -> Option<bool> {
    match word {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

fn short(word: u64) -> Option<u16> {
    u16::try_from(word).ok()
}

fn place(next_available: u64, next_used: u64) -> Option<Place> {
    Some(Place {
        next_available: short(next_available)?,
        next_used: short(next_used)?,
    })
}

fn way(access: Access) -> u64 {
    match access {
        Access::Read => 1,
        Access::Write => 2,
    }
}

fn access(word: u64) -> Option<Access> {
    match word {
        1 => Some(Access::Read),
        2 => Some(Access::Write),
        _ => None,
    }
}

fn class(errant: Errant) -> (u64, u64) {
    match errant {
        Errant::Stray(iova) => (1, iova.get()),
        Errant::AfterUnmap => (2, 0),
        Errant::WriteReadOnly => (3, 0),
        Errant::ReadWriteOnly => (4, 0),
        Errant::Foreign => (5, 0),
        Errant::AfterRevoke => (6, 0),
        Errant::Storm(iova) => (7, iova.get()),
    }
}

fn errant(class: u64, address: u64) -> Option<Errant> {
    Some(match class {
        1 => Errant::Stray(Iova::new(address)),
        2 => Errant::AfterUnmap,
        3 => Errant::WriteReadOnly,
        4 => Errant::ReadWriteOnly,
        5 => Errant::Foreign,
        6 => Errant::AfterRevoke,
        7 => Errant::Storm(Iova::new(address)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let turn = Turn {
            interrupt: true,
            more: false,
        };
        let at = Place {
            next_available: 7,
            next_used: 6,
        };
        let errant = Errant::Stray(Iova::new(0xdead_0000));
        for order in [
            Order::Setup {
                read_only: true,
                queue_size: 128,
                request_bytes: 1 << 20,
                errant: vec![errant, Errant::AfterRevoke],
            },
            Order::Begin { features: 1 << 33 },
            Order::Queue {
                index: 1,
                size: 256,
                event_index: true,
                descriptors: 0x1000,
                available: 0x2000,
                used: 0x3000,
                at,
            },
            Order::Kick { index: 0, round: 9 },
            Order::Reset,
        ] {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        for report in [
            Report::Ready,
            Report::Confined,
            Report::Turn {
                index: 0,
                round: 9,
                turn,
                at,
                counted: vec![1, 2, 3],
            },
            Report::Broken { index: 0, round: 9 },
            Report::WasReset,
            Report::Stopped {
                iova: Iova::new(5),
                access: Access::Write,
                permission: true,
            },
            Report::Tried {
                errant,
                access: Access::Read,
                iova: Iova::new(6),
                stopped: true,
            },
            Report::TooLong { bytes: 9, most: 8 },
        ] {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
    }

    proptest! {
        /// Whatever comes is one message or none, and never a panic.
        #[test]
        fn nothing_else_is(words in prop::collection::vec(prop_oneof![0u64..9, any::<u64>()], 0..12), cut in 0usize..3) {
            let mut bytes = bytes(&words);
            bytes.truncate(bytes.len().saturating_sub(cut));
            if let Some(report) = Report::decode(&bytes) {
                prop_assert_eq!(Report::decode(&report.encode()), Some(report));
            }
            if let Some(order) = Order::decode(&bytes) {
                prop_assert_eq!(Order::decode(&order.encode()), Some(order));
            }
        }
    }
}
