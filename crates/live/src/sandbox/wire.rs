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

/// Message from the daemon to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceCommand {
    /// First message, with the descriptors of the control region and the image.
    Setup {
        read_only: bool,
        /// Number of descriptors of the queue.
        queue_size: u16,
        /// Most bytes of a request.
        request_bytes: u64,
        injected: Vec<InjectedDma>,
    },
    /// Activates the device with the features that the driver accepted.
    Begin { features: u64 },
    /// Registers of a queue, as the driver set them.
    Queue {
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
    Kick { index: u16, round: u64 },
    /// Reset the device.
    Reset,
}

/// Message from the process to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceResponse {
    /// The mapping thread runs; carries the descriptor of the seccomp listener.
    Ready,
    /// All threads are confined.
    Confined,
    /// The turn has ended; `counted` holds its counter increments.
    Turn {
        index: u16,
        round: u64,
        turn: QuantumResult,
        at: RingPosition,
        counted: Vec<u64>,
    },
    /// The queue is broken and cannot be used until a reset.
    Broken { index: u16, round: u64 },
    /// The reset is done.
    ResetDone,
    /// The I/O page table blocked an access.
    Fault {
        iova: Iova,
        access: Access,
        /// True if the page is mapped without the required permission.
        permission: bool,
    },
    /// Result of an injected DMA access.
    Injected {
        injected: InjectedDma,
        access: Access,
        iova: Iova,
        stopped: bool,
    },
    /// A request exceeded the size limit.
    TooLong { bytes: u64, most: u64 },
}

impl DeviceCommand {
    pub(super) fn encode(&self) -> Vec<u8> {
        let words = match self {
            Self::Setup {
                read_only,
                queue_size,
                request_bytes,
                injected,
            } => {
                let flags = u64::from(*read_only);
                let mut words = vec![1, flags, u64::from(*queue_size), *request_bytes];
                for injected in injected.iter().take(MAX_INJECTED) {
                    let (class, address) = class(*injected);
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
                let injected = pairs.iter().map(|[class, at]| injected_dma(*class, *at));
                Self::Setup {
                    read_only: flag(*read_only)?,
                    queue_size: short(*queue_size)?,
                    request_bytes: *request_bytes,
                    injected: injected.collect::<Option<_>>()?,
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
                at: ring_position(*next_available, *next_used)?,
            },
            [4, index, round] => Self::Kick {
                index: short(*index)?,
                round: *round,
            },
            [5] => Self::Reset,
            _ => return None,
        })
    }

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

impl DeviceResponse {
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
            Self::ResetDone => vec![5],
            Self::Fault {
                iova,
                access,
                permission,
            } => vec![6, iova.get(), access_word(*access), u64::from(*permission)],
            Self::Injected {
                injected,
                access,
                iova,
                stopped,
            } => {
                let (class, address) = class(*injected);
                let stopped = u64::from(*stopped);
                vec![7, class, address, access_word(*access), iova.get(), stopped]
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
                turn: QuantumResult {
                    interrupt: flag(*interrupt)?,
                    more: flag(*more)?,
                },
                at: ring_position(*next_available, *next_used)?,
                counted: counted.to_vec(),
            },
            [4, index, round] => Self::Broken {
                index: short(*index)?,
                round: *round,
            },
            [5] => Self::ResetDone,
            [6, iova, way, permission] => Self::Fault {
                iova: Iova::new(*iova),
                access: access(*way)?,
                permission: flag(*permission)?,
            },
            [7, class, address, way, iova, stopped] => Self::Injected {
                injected: injected_dma(*class, *address)?,
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

fn ring_position(next_available: u64, next_used: u64) -> Option<RingPosition> {
    Some(RingPosition {
        next_available: short(next_available)?,
        next_used: short(next_used)?,
    })
}

fn access_word(access: Access) -> u64 {
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

fn class(injected: InjectedDma) -> (u64, u64) {
    match injected {
        InjectedDma::Stray(iova) => (1, iova.get()),
        InjectedDma::AfterUnmap => (2, 0),
        InjectedDma::WriteReadOnly => (3, 0),
        InjectedDma::ReadWriteOnly => (4, 0),
        InjectedDma::Foreign => (5, 0),
        InjectedDma::AfterRevoke => (6, 0),
        InjectedDma::Storm(iova) => (7, iova.get()),
    }
}

fn injected_dma(class: u64, address: u64) -> Option<InjectedDma> {
    Some(match class {
        1 => InjectedDma::Stray(Iova::new(address)),
        2 => InjectedDma::AfterUnmap,
        3 => InjectedDma::WriteReadOnly,
        4 => InjectedDma::ReadWriteOnly,
        5 => InjectedDma::Foreign,
        6 => InjectedDma::AfterRevoke,
        7 => InjectedDma::Storm(Iova::new(address)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_said_is_understood() {
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
            let mut bytes = bytes(&words);
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
