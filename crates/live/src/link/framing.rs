//! Frames in a byte stream: each follows its length, a big-endian 32-bit number (QEMU's `-netdev
//! stream`).

use std::io::IoSlice;

use super::{MAX_FRAME_BYTES, MIN_FRAME_BYTES};

/// Bytes of a length prefix.
pub const FRAME_PREFIX_BYTES: usize = 4;
/// Longest frame, with any offload: QEMU's own limit of 64 KiB and a page. A larger length means
/// that the stream is corrupt.
pub const MAX_FRAMED_BYTES: usize = (1 << 16) + 4096;

/// The stream is corrupt and no frame boundary can be found again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid frame length: {bytes}")]
pub struct FramesLost {
    /// Invalid length in the stream.
    pub bytes: u32,
}

/// Result of parsing a piece of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deframed {
    /// A complete frame of this many bytes.
    Frame(usize),
    /// A complete frame of invalid length, which was dropped.
    Dropped,
    /// The piece ended inside a frame.
    Part,
}

/// Reassembles frames from a stream. Buffers at most one frame, and nothing of a frame that is too
/// long.
#[derive(Debug, Default)]
pub struct Deframer {
    prefix: [u8; FRAME_PREFIX_BYTES],
    /// Bytes of the length prefix received so far.
    known: usize,
    /// Bytes of the frame still to come, once its length is known.
    missing: usize,
    frame: Vec<u8>,
}

impl Deframer {
    /// Returns the partial frame: the received part of its prefix, its bytes unless it is being
    /// dropped, and the number of bytes still to come.
    pub(super) fn part(&self) -> (Vec<u8>, usize) {
        let known = self.prefix.get(..self.known).unwrap_or(&[]);
        ([known, &self.frame].concat(), self.missing)
    }

    /// Restores a deframer that received this partial frame. `None` if no stream could have left
    /// it.
    pub(super) fn with_part(mut part: &[u8], missing: usize) -> Option<Self> {
        let mut deframer = Self::default();
        let taken = deframer.feed(&mut part, &mut []);
        if taken != Ok(Deframed::Part) || !part.is_empty() {
            return None;
        }
        let whole = u32::from_be_bytes(deframer.prefix) as usize;
        // A dropped frame has no buffered bytes, so `missing` alone tells how much has come.
        if deframer.missing > 0 && !is_wanted(whole) {
            let possible = deframer.missing == whole && (1..=whole).contains(&missing);
            deframer.missing = missing;
            return possible.then_some(deframer);
        }
        (deframer.missing == missing).then_some(deframer)
    }

    /// Consumes bytes of `piece` up to the end of a frame, and copies a complete frame to `to`.
    /// Drops a frame for which `to` has no room.
    ///
    /// # Errors
    /// [`FramesLost`]; the deframer must not be used again.
    pub fn feed(&mut self, piece: &mut &[u8], to: &mut [u8]) -> Result<Deframed, FramesLost> {
        while let Some(slot) = self.prefix.get_mut(self.known) {
            let Some((first, rest)) = piece.split_first() else {
                return Ok(Deframed::Part);
            };
            *slot = *first;
            *piece = rest;
            self.known += 1;
            if self.known == FRAME_PREFIX_BYTES {
                let bytes = u32::from_be_bytes(self.prefix);
                self.missing = usize::try_from(bytes)
                    .ok()
                    .filter(|bytes| *bytes <= MAX_FRAMED_BYTES)
                    .ok_or(FramesLost { bytes })?;
            }
        }
        let whole = u32::from_be_bytes(self.prefix) as usize;
        let (part, rest) = piece.split_at(self.missing.min(piece.len()));
        *piece = rest;
        self.missing -= part.len();
        let wanted = is_wanted(whole);
        if wanted {
            self.frame.extend(part);
        }
        if self.missing > 0 {
            return Ok(Deframed::Part);
        }
        self.known = 0;
        let frame = std::mem::take(&mut self.frame);
        match to.get_mut(..frame.len()) {
            Some(to) if wanted => {
                to.copy_from_slice(&frame);
                // Reuse the allocation for the next frame.
                self.frame = frame;
                self.frame.clear();
                Ok(Deframed::Frame(whole))
            }
            _ => Ok(Deframed::Dropped),
        }
    }
}

/// Returns true if a frame of this length is valid for the device.
fn is_wanted(bytes: usize) -> bool {
    (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes)
}

/// Sends frames as a stream. Buffers the unsent rest of at most one frame.
#[derive(Debug, Default)]
pub struct Framer {
    unsent: Vec<u8>,
}

impl Framer {
    /// Returns the unsent rest of a partially sent frame.
    pub(super) fn unsent(&self) -> &[u8] {
        &self.unsent
    }

    /// Restores a framer with this unsent rest. `None` if the rest is too long for a partially sent
    /// frame.
    pub(super) fn with_unsent(unsent: Vec<u8>) -> Option<Self> {
        (unsent.len() < FRAME_PREFIX_BYTES + MAX_FRAME_BYTES).then_some(Self { unsent })
    }

    /// Sends a frame by `write`, which returns the number of bytes it accepted, possibly zero.
    /// Returns true if the frame was sent, or begun and its rest buffered. Returns false if nothing
    /// of it was sent.
    ///
    /// # Errors
    /// Errors of `write`.
    pub fn send<E>(
        &mut self,
        frame: &[u8],
        mut write: impl FnMut(&[IoSlice<'_>]) -> Result<usize, E>,
    ) -> Result<bool, E> {
        self.flush(&mut write)?;
        if self.is_in_frame() {
            return Ok(false);
        }
        let prefix = u32::try_from(frame.len()).unwrap_or(0).to_be_bytes();
        let sent = write(&[IoSlice::new(&prefix), IoSlice::new(frame)])?;
        if sent == 0 {
            return Ok(false);
        }
        self.unsent.extend(prefix.iter().chain(frame).skip(sent));
        Ok(true)
    }

    /// Sends the rest of a partially sent frame, as far as `write` accepts it.
    ///
    /// # Errors
    /// Errors of `write`.
    pub fn flush<E>(
        &mut self,
        mut write: impl FnMut(&[IoSlice<'_>]) -> Result<usize, E>,
    ) -> Result<(), E> {
        if self.is_in_frame() {
            let sent = write(&[IoSlice::new(&self.unsent)])?;
            self.unsent.drain(..sent.min(self.unsent.len()));
        }
        Ok(())
    }

    /// Returns true if a frame is partially sent.
    pub fn is_in_frame(&self) -> bool {
        !self.unsent.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the frames of a stream cut into these pieces, and the number of dropped frames.
    fn frames(stream: &[u8], cuts: &[usize]) -> Result<(Vec<Vec<u8>>, usize), FramesLost> {
        let mut deframer = Deframer::default();
        let (mut whole, mut dropped) = (Vec::new(), 0);
        let mut rest = stream;
        let mut cuts = cuts.iter().cycle();
        while !rest.is_empty() {
            let cut = cuts.next().map_or(rest.len(), |cut| 1 + cut % rest.len());
            let (mut piece, after) = rest.split_at(cut);
            rest = after;
            let mut to = [0; MAX_FRAME_BYTES];
            loop {
                match deframer.feed(&mut piece, &mut to)? {
                    Deframed::Frame(bytes) => whole.push(to[..bytes].to_vec()),
                    Deframed::Dropped => dropped += 1,
                    Deframed::Part => break,
                }
            }
            assert!(piece.is_empty() && deframer.frame.len() <= MAX_FRAME_BYTES);
        }
        Ok((whole, dropped))
    }

    #[test]
    fn lengths() {
        for (bytes, expected) in [
            (0, Ok((0, 1))),
            (13, Ok((0, 1))),
            (14, Ok((1, 0))),
            (1518, Ok((1, 0))),
            (1519, Ok((0, 1))),
            (MAX_FRAMED_BYTES, Ok((0, 1))),
            (MAX_FRAMED_BYTES + 1, Err(())),
            (u32::MAX as usize, Err(())),
        ] {
            let mut stream = (bytes as u32).to_be_bytes().to_vec();
            stream.extend(vec![7; bytes.min(1 << 17)]);
            let got = frames(&stream, &[100]);
            let got = got.map(|(frames, dropped)| (frames.len(), dropped));
            assert_eq!(got.map_err(|_| ()), expected, "{bytes}");
        }
    }

    proptest! {
        /// The frames do not depend on the pieces into which the stream is cut.
        #[test]
        fn frames_survive_the_stream_unchanged(
            sent in prop::collection::vec(
                (
                    prop_oneof![0usize..40, 1500usize..1540, 60_000usize..69_000],
                    any::<u8>(),
                ),
                0..12,
            ),
            cuts in prop::collection::vec(any::<usize>(), 1..20),
        ) {
            let mut stream = Vec::new();
            for (bytes, fill) in &sent {
                stream.extend((*bytes as u32).to_be_bytes());
                stream.extend(vec![*fill; *bytes]);
            }
            let fits = |bytes: usize| (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes);
            let expected: Vec<Vec<u8>> = sent
                .iter()
                .filter(|(bytes, _)| fits(*bytes))
                .map(|(bytes, fill)| vec![*fill; *bytes])
                .collect();
            let (whole, dropped) = frames(&stream, &cuts).unwrap();
            prop_assert_eq!(dropped, sent.len() - expected.len());
            prop_assert!(whole == expected);
        }

        /// Frames leave whole and in order, however little `write` accepts at a time. A refused
        /// frame sends nothing.
        #[test]
        fn frames_leave_whole(
            frames in prop::collection::vec((14usize..200, any::<u8>()), 1..10),
            room in prop::collection::vec(prop_oneof![Just(0usize), 1usize..250], 1..200),
        ) {
            let mut framer = Framer::default();
            let (mut out, mut expected) = (Vec::new(), Vec::new());
            let mut frames = frames.into_iter().map(|(bytes, fill)| vec![fill; bytes]);
            let mut present = frames.next();
            for room in room {
                let mut room = room;
                let mut write = |parts: &[IoSlice<'_>]| {
                    let before = out.len();
                    out.extend(parts.iter().flat_map(|part| part.iter()).take(room));
                    room -= out.len() - before;
                    Ok::<usize, ()>(out.len() - before)
                };
                match &present {
                    Some(frame) => {
                        if framer.send(frame, &mut write) == Ok(true) {
                            expected.extend((frame.len() as u32).to_be_bytes());
                            expected.extend(frame);
                            present = frames.next();
                        }
                    }
                    None => framer.flush(&mut write).unwrap(),
                }
                prop_assert!(expected.starts_with(&out));
                prop_assert_eq!(framer.is_in_frame(), out.len() < expected.len());
            }
        }

        #[test]
        fn any_stream_is_followed_or_refused(
            stream in prop::collection::vec(any::<u8>(), 0..300),
            cuts in prop::collection::vec(any::<usize>(), 1..5),
        ) {
            let _ = frames(&stream, &cuts);
        }
    }
}
