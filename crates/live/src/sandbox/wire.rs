//! Messages between the daemon and the process. A message is one packet of 64-bit words; the first
//! word is its type. Either side treats an unknown message type or a wrong length as a protocol
//! violation.

use ringfence_types::{Access, Iova};
use virtio_queue::QueueState;

use crate::dma_fault_injection::InjectedDma;
use crate::saved_state::{Reader, Writer, wire_numbers};
use crate::virtio::QuantumResult;

/// Words of the longest message.
const MAX_WORDS: usize = 96;
/// Bytes of the longest message.
pub(super) const MAX_BYTES: usize = 8 * MAX_WORDS;
/// Most classes of injected DMA in a setup message.
pub(super) const MAX_INJECTED: usize = 16;

wire_numbers! {
    enum CommandKind: u64 {
        Setup = 1,
        Begin = 2,
        Queue = 3,
        Kick = 4,
        Reset = 5,
    }
}

wire_numbers! {
    enum ResponseKind: u64 {
        Ready = 1,
        Confined = 2,
        Turn = 3,
        Broken = 4,
        ResetDone = 5,
        Fault = 6,
        Injected = 7,
        TooLong = 8,
    }
}

wire_numbers! {
    enum DmaClass: u64 {
        Stray = 1,
        AfterUnmap = 2,
        WriteReadOnly = 3,
        ReadWriteOnly = 4,
        Foreign = 5,
        AfterRevoke = 6,
        Storm = 7,
    }
}

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
        let (kind, words) = match self {
            Self::Setup {
                read_only,
                queue_size,
                request_bytes,
                injected,
            } => {
                let flags = u64::from(*read_only);
                let mut words = vec![flags, u64::from(*queue_size), *request_bytes];
                for injected in injected.iter().take(MAX_INJECTED) {
                    let (class, address) = class(*injected);
                    words.extend([class, address]);
                }
                (CommandKind::Setup, words)
            }
            Self::Begin { features } => (CommandKind::Begin, vec![*features]),
            Self::Queue {
                index,
                size,
                event_index,
                descriptors,
                available,
                used,
                at,
            } => (
                CommandKind::Queue,
                vec![
                    u64::from(*index),
                    u64::from(*size),
                    u64::from(*event_index),
                    *descriptors,
                    *available,
                    *used,
                    u64::from(at.next_available),
                    u64::from(at.next_used),
                ],
            ),
            Self::Kick { index, round } => (CommandKind::Kick, vec![u64::from(*index), *round]),
            Self::Reset => (CommandKind::Reset, vec![]),
        };
        encode(kind as u64, &words)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, words) = decode(bytes)?;
        Some(match (CommandKind::from_number(kind)?, words.as_slice()) {
            (CommandKind::Setup, [read_only, queue_size, request_bytes, classes @ ..]) => {
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
            (CommandKind::Begin, [features]) => Self::Begin {
                features: *features,
            },
            (
                CommandKind::Queue,
                [
                    index,
                    size,
                    event_index,
                    descriptors,
                    available,
                    used,
                    next_available,
                    next_used,
                ],
            ) => Self::Queue {
                index: short(*index)?,
                size: short(*size)?,
                event_index: flag(*event_index)?,
                descriptors: *descriptors,
                available: *available,
                used: *used,
                at: ring_position(*next_available, *next_used)?,
            },
            (CommandKind::Kick, [index, round]) => Self::Kick {
                index: short(*index)?,
                round: *round,
            },
            (CommandKind::Reset, []) => Self::Reset,
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
        let (kind, words) = match self {
            Self::Ready => (ResponseKind::Ready, vec![]),
            Self::Confined => (ResponseKind::Confined, vec![]),
            Self::Turn {
                index,
                round,
                turn,
                at,
                counted,
            } => {
                let flags = [turn.interrupt, turn.more].map(u64::from);
                let mut words = vec![u64::from(*index), *round, flags[0], flags[1]];
                words.extend([at.next_available, at.next_used].map(u64::from));
                words.extend(counted);
                (ResponseKind::Turn, words)
            }
            Self::Broken { index, round } => {
                (ResponseKind::Broken, vec![u64::from(*index), *round])
            }
            Self::ResetDone => (ResponseKind::ResetDone, vec![]),
            Self::Fault {
                iova,
                access,
                permission,
            } => (
                ResponseKind::Fault,
                vec![iova.get(), access_word(*access), u64::from(*permission)],
            ),
            Self::Injected {
                injected,
                access,
                iova,
                stopped,
            } => {
                let (class, address) = class(*injected);
                let stopped = u64::from(*stopped);
                (
                    ResponseKind::Injected,
                    vec![class, address, access_word(*access), iova.get(), stopped],
                )
            }
            Self::TooLong { bytes, most } => (ResponseKind::TooLong, vec![*bytes, *most]),
        };
        encode(kind as u64, &words)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, words) = decode(bytes)?;
        Some(match (ResponseKind::from_number(kind)?, words.as_slice()) {
            (ResponseKind::Ready, []) => Self::Ready,
            (ResponseKind::Confined, []) => Self::Confined,
            (
                ResponseKind::Turn,
                [
                    index,
                    round,
                    interrupt,
                    more,
                    next_available,
                    next_used,
                    counted @ ..,
                ],
            ) => Self::Turn {
                index: short(*index)?,
                round: *round,
                turn: QuantumResult {
                    interrupt: flag(*interrupt)?,
                    more: flag(*more)?,
                },
                at: ring_position(*next_available, *next_used)?,
                counted: counted.to_vec(),
            },
            (ResponseKind::Broken, [index, round]) => Self::Broken {
                index: short(*index)?,
                round: *round,
            },
            (ResponseKind::ResetDone, []) => Self::ResetDone,
            (ResponseKind::Fault, [iova, direction, permission]) => Self::Fault {
                iova: Iova::new(*iova),
                access: access(*direction)?,
                permission: flag(*permission)?,
            },
            (ResponseKind::Injected, [class, address, direction, iova, stopped]) => {
                Self::Injected {
                    injected: injected_dma(*class, *address)?,
                    access: access(*direction)?,
                    iova: Iova::new(*iova),
                    stopped: flag(*stopped)?,
                }
            }
            (ResponseKind::TooLong, [bytes, most]) => Self::TooLong {
                bytes: *bytes,
                most: *most,
            },
            _ => return None,
        })
    }
}

fn encode(kind: u64, words: &[u64]) -> Vec<u8> {
    let mut out = Writer::default();
    out.u64(kind);
    words.iter().for_each(|word| out.u64(*word));
    out.bytes
}

/// Returns the type of a message and its other words.
fn decode(bytes: &[u8]) -> Option<(u64, Vec<u64>)> {
    if bytes.len() > MAX_BYTES {
        return None;
    }
    let mut input = Reader::new(bytes);
    let kind = input.u64().ok()?;
    let mut words = Vec::new();
    while !input.bytes.is_empty() {
        words.push(input.u64().ok()?);
    }
    Some((kind, words))
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
    let (class, address) = match injected {
        InjectedDma::Stray(iova) => (DmaClass::Stray, iova.get()),
        InjectedDma::AfterUnmap => (DmaClass::AfterUnmap, 0),
        InjectedDma::WriteReadOnly => (DmaClass::WriteReadOnly, 0),
        InjectedDma::ReadWriteOnly => (DmaClass::ReadWriteOnly, 0),
        InjectedDma::Foreign => (DmaClass::Foreign, 0),
        InjectedDma::AfterRevoke => (DmaClass::AfterRevoke, 0),
        InjectedDma::Storm(iova) => (DmaClass::Storm, iova.get()),
    };
    (class as u64, address)
}

fn injected_dma(class: u64, address: u64) -> Option<InjectedDma> {
    Some(match DmaClass::from_number(class)? {
        DmaClass::Stray => InjectedDma::Stray(Iova::new(address)),
        DmaClass::AfterUnmap => InjectedDma::AfterUnmap,
        DmaClass::WriteReadOnly => InjectedDma::WriteReadOnly,
        DmaClass::ReadWriteOnly => InjectedDma::ReadWriteOnly,
        DmaClass::Foreign => InjectedDma::Foreign,
        DmaClass::AfterRevoke => InjectedDma::AfterRevoke,
        DmaClass::Storm => InjectedDma::Storm(Iova::new(address)),
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
