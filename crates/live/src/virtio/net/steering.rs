//! Automatic receive steering (virtio 1.2, section 5.1.6.5.5): a received frame goes to the queue
//! pair on which the driver last sent a frame of the same flow.

use std::hash::{Hash, Hasher};
use std::num::NonZeroU16;

use ringfence_vfio_user::fields::copy_part;

/// Number of classes into which flows are hashed.
pub const FLOWS: usize = 256;
/// Saved value of a class for which the driver has sent no frame.
pub const NO_PAIR: u8 = 0xff;

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
/// Bytes of an IPv6 address and a port.
const END_BYTES: usize = 18;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The queue pair of each of [`FLOWS`] classes of flows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Steering {
    pairs: Box<[Option<u16>; FLOWS]>,
}

impl Default for Steering {
    fn default() -> Self {
        Self {
            pairs: Box::new([None; FLOWS]),
        }
    }
}

impl Steering {
    /// Returns the table for another process.
    pub(super) fn save(&self) -> [u8; FLOWS] {
        // The conversion cannot fail: there are at most `MAX_PAIRS` pairs.
        let number = |pair: Option<u16>| pair.and_then(|pair| u8::try_from(pair).ok());
        (*self.pairs).map(|pair| number(pair).unwrap_or(NO_PAIR))
    }

    /// Restores the table of another process. `None` if it contains a pair that is not offered.
    pub(super) fn restore(saved: &[u8; FLOWS], offered: NonZeroU16) -> Option<Self> {
        let pairs = saved.map(|pair| (pair != NO_PAIR).then_some(u16::from(pair)));
        let known = pairs.iter().flatten().all(|pair| *pair < offered.get());
        known.then(|| Self {
            pairs: Box::new(pairs),
        })
    }

    /// Records that the driver sent `frame` on `pair`.
    pub(super) fn learn(&mut self, frame: &[u8], pair: u16) {
        if let Some(slot) = self.pairs.get_mut(class(frame)) {
            *slot = Some(pair);
        }
    }

    /// Returns the pair for a received frame, one of the `active` ones.
    pub(super) fn pair(&self, frame: &[u8], active: NonZeroU16) -> u16 {
        let class = class(frame);
        let learned = self.pairs.get(class).copied().flatten();
        learned
            .filter(|pair| *pair < active.get())
            .unwrap_or((class % usize::from(active.get())) as u16)
    }
}

/// Returns the class of a frame's flow; both directions have the same class.
fn class(frame: &[u8]) -> usize {
    let part = |at: usize, bytes: usize| frame.get(at..at + bytes).unwrap_or(&[]);
    let kind = part(12, 2);
    // An endpoint: its address followed by its port.
    let (mut one, mut other) = ([0; END_BYTES], [0; END_BYTES]);
    let ports = if kind == IPV4 {
        copy_part(part(26, 4), 0, &mut one);
        copy_part(part(30, 4), 0, &mut other);
        let header = usize::from(frame.get(14).copied().unwrap_or(0) & 15) * 4;
        // Only the first fragment of a packet contains ports, but all fragments must use the same
        // pair.
        let fragment = matches!(*part(20, 2), [flags, low] if flags & 0x3f != 0 || low != 0);
        frame
            .get(23)
            .filter(|protocol| matches!(**protocol, TCP | UDP) && !fragment)
            .map(|_| 14 + header)
    } else if kind == IPV6 {
        copy_part(part(22, 16), 0, &mut one);
        copy_part(part(38, 16), 0, &mut other);
        frame
            .get(20)
            .filter(|protocol| matches!(**protocol, TCP | UDP))
            .map(|_| 54)
    } else {
        copy_part(part(0, 6), 0, &mut other);
        copy_part(part(6, 6), 0, &mut one);
        None
    };
    if let Some(at) = ports {
        copy_part(part(at, 2), 0, &mut one[END_BYTES - 2..]);
        copy_part(part(at + 2, 2), 0, &mut other[END_BYTES - 2..]);
    }
    if other < one {
        std::mem::swap(&mut one, &mut other);
    }
    // The hasher's keys are fixed, so steering is the same in every run.
    let mut hasher = std::hash::DefaultHasher::new();
    (one, other).hash(&mut hasher);
    (hasher.finish() % FLOWS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: [u8; 2], protocol: u8, from: u8, to: u8, ports: (u8, u8)) -> Vec<u8> {
        let mut frame = vec![0; 80];
        frame[..12].copy_from_slice(&[to, 0, 0, 0, 0, to, from, 0, 0, 0, 0, from]);
        frame[12..14].copy_from_slice(&kind);
        let (at, one, two) = match kind {
            IPV4 => {
                (frame[14], frame[23]) = (0x45, protocol);
                (34, 29, 33)
            }
            _ => {
                frame[20] = protocol;
                (54, 37, 53)
            }
        };
        (frame[one], frame[two]) = (from, to);
        (frame[at], frame[at + 2]) = ports;
        frame
    }

    #[test]
    fn replies_use_the_queue_pair_of_the_request() {
        let four = NonZeroU16::new(4).unwrap();
        for (kind, protocol) in [(IPV4, TCP), (IPV4, UDP), (IPV6, TCP), ([8, 6], 0)] {
            for pair in 0..4 {
                let mut steering = Steering::default();
                steering.learn(&frame(kind, protocol, 1, 2, (7, 9)), pair);
                let answer = frame(kind, protocol, 2, 1, (9, 7));
                assert_eq!(steering.pair(&answer, four), pair, "{kind:?} {protocol}");
                // An inactive pair receives no frames.
                assert_eq!(steering.pair(&answer, NonZeroU16::MIN), 0);
            }
        }
    }

    #[test]
    fn flows_spread_and_fragments_stay_together() {
        let (steering, four) = (Steering::default(), NonZeroU16::new(4).unwrap());
        let pairs: std::collections::BTreeSet<u16> = (0..64)
            .map(|port| steering.pair(&frame(IPV4, TCP, 1, 2, (port, 9)), four))
            .collect();
        assert_eq!(pairs.len(), 4);
        let fragments: std::collections::BTreeSet<u16> = (0..64)
            .map(|port| {
                let mut frame = frame(IPV4, UDP, 1, 2, (port, 9));
                frame[21] = (port << 2).max(1);
                steering.pair(&frame, four)
            })
            .collect();
        assert_eq!(fragments.len(), 1);
    }

    #[test]
    fn frames_of_any_length_have_a_class() {
        let whole = frame(IPV4, TCP, 1, 2, (3, 4));
        for bytes in 0..whole.len() {
            let active = NonZeroU16::new(3).unwrap();
            assert!(Steering::default().pair(&whole[..bytes], active) < 3);
        }
    }
}
