//! A reader that returns short reads.

use std::io::{self, Read};

/// Returns its bytes in pieces of 1 to 7.
pub(crate) struct Pieces<'a>(pub(crate) &'a [u8]);

impl Read for Pieces<'_> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let count = (self.0.len() % 7 + 1).min(self.0.len()).min(space.len());
        let (now, later) = self.0.split_at(count);
        space[..count].copy_from_slice(now);
        self.0 = later;
        Ok(count)
    }
}
