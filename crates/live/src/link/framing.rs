//! Frames in a stream of bytes: each behind its length, four bytes, the highest first (QEMU's
//! `-netdev stream`).

use std::io::IoSlice;

use super::{MAX_FRAME_BYTES, MIN_FRAME_BYTES};

/// Bytes of a length.
pub const FRAME_PREFIX_BYTES: usize = 4;
/// Longest frame that an honest peer sends, whatever its offloads: QEMU's own limit, 64 KiB and a
/// page. A greater length says that the stream is no such stream.
pub const MAX_FRAMED_BYTES: usize = (1 << 16) + 4096;

/// The stream cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramesLost {
    /// The length that nobody sends.
    pub bytes: u32,
}

impl std::fmt::Display for FramesLost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a frame of {} bytes", self.bytes)
    }
}

impl std::error::Error for FramesLost {}

/// What came out of a piece of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deframed {
    /// A frame of this many bytes.
    Frame(usize),
    /// A frame that is too short or too long for the device; it was not kept.
    Dropped,
    /// The piece ended in the middle of one.
    Part,
}

/// Puts frames together. It keeps no more than one, and of a frame that is too long nothing.
#[derive(Debug, Default)]
pub struct Deframer {
    prefix: [u8; FRAME_PREFIX_BYTES],
    /// Bytes of the length that have come.
    known: usize,
    /// Bytes of the frame that are to come, once its length is known.
    missing: usize,
    frame: Vec<u8>,
}

impl Deframer {
    /// The frame that has come in part: as much as is known of its length, and its bytes unless
    /// they are dropped; how many bytes are to come.
    pub(super) fn part(&self) -> (Vec<u8>, usize) {
        let known = self.prefix.get(..self.known).unwrap_or(&[]);
        ([known, &self.frame].concat(), self.missing)
    }

    /// One that has taken that part. None if no stream could have left it.
    pub(super) fn with_part(mut part: &[u8], missing: usize) -> Option<Self> {
        let mut deframer = Self::default();
        let taken = deframer.feed(&mut part, &mut []);
        if taken != Ok(Deframed::Part) || !part.is_empty() {
            return None;
        }
        let whole = u32::from_be_bytes(deframer.prefix) as usize;
        // Of what is dropped nothing is kept that would tell how much has come.
        if deframer.missing > 0 && !is_wanted(whole) {
            let possible = deframer.missing == whole && (1..=whole).contains(&missing);
            deframer.missing = missing;
            return possible.then_some(deframer);
        }
        (deframer.missing == missing).then_some(deframer)
    }

    /// Takes bytes off the front of `piece` up to the end of a frame, which is copied to `to`, as
    /// far as there is room.
    ///
    /// # Errors
    /// [`FramesLost`]; then it is of no further use.
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
                // Its space is for the next.
                self.frame = frame;
                self.frame.clear();
                Ok(Deframed::Frame(whole))
            }
            _ => Ok(Deframed::Dropped),
        }
    }
}

/// Whether a frame of so many bytes is for the device.
fn is_wanted(bytes: usize) -> bool {
    (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes)
}

/// Takes frames apart into what goes out. Of a frame that was begun it keeps the rest, at most one.
#[derive(Debug, Default)]
pub struct Framer {
    rest: Vec<u8>,
}

impl Framer {
    /// What is left of a frame that was sent in part.
    pub(super) fn unsent(&self) -> &[u8] {
        &self.rest
    }

    /// One that has this left. None if that is too much for a frame of which something was sent.
    pub(super) fn with_unsent(rest: Vec<u8>) -> Option<Self> {
        (rest.len() < FRAME_PREFIX_BYTES + MAX_FRAME_BYTES).then_some(Self { rest })
    }

    /// Sends a frame by `write`, which says how many bytes it took, perhaps none. Whether the frame
    /// was taken: sent, or begun and its rest kept; else nothing of it was sent.
    ///
    /// # Errors
    /// What `write` says.
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
        self.rest.extend(prefix.iter().chain(frame).skip(sent));
        Ok(true)
    }

    /// Sends what is left of a frame, as far as `write` takes it.
    ///
    /// # Errors
    /// What `write` says.
    pub fn flush<E>(
        &mut self,
        mut write: impl FnMut(&[IoSlice<'_>]) -> Result<usize, E>,
    ) -> Result<(), E> {
        if self.is_in_frame() {
            let sent = write(&[IoSlice::new(&self.rest)])?;
            self.rest.drain(..sent.min(self.rest.len()));
        }
        Ok(())
    }

    /// Whether a frame was sent in part.
    pub fn is_in_frame(&self) -> bool {
        !self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What comes out of the stream, cut into these pieces: frames, and how many were dropped.
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
        /// However the stream is cut, the frames are the same.
        #[test]
        fn frames_come_out_as_they_went_in(
            sent in prop::collection::vec((prop_oneof![0usize..40, 1500usize..1540, 60_000usize..69_000], any::<u8>()), 0..12),
            cuts in prop::collection::vec(any::<usize>(), 1..20),
        ) {
            let mut stream = Vec::new();
            for (bytes, fill) in &sent {
                stream.extend((*bytes as u32).to_be_bytes());
                stream.extend(vec![*fill; *bytes]);
            }
            let fits = |bytes: usize| (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes);
            let expected: Vec<Vec<u8>> = sent.iter().filter(|(bytes, _)| fits(*bytes)).map(|(bytes, fill)| vec![*fill; *bytes]).collect();
            let (whole, dropped) = frames(&stream, &cuts).unwrap();
            prop_assert_eq!(dropped, sent.len() - expected.len());
            prop_assert!(whole == expected);
        }

        /// However little is taken at a time, frames leave whole and in order, and one that was not
        /// taken leaves nothing.
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
        fn any_stream_is_followed_or_refused(stream in prop::collection::vec(any::<u8>(), 0..300), cuts in prop::collection::vec(any::<usize>(), 1..5)) {
            let _ = frames(&stream, &cuts);
        }
    }
}
