//! The seal of a file: a digest of all its bytes and of the name of its task.
//!
//! A Parquet file is `PAR1`, pages, footer, length of the footer (4 bytes), `PAR1`. The footer
//! gives the offset of each page, so readers ignore other bytes before it. The seal stands there:
//! a magic number, the outcome, and the digest of everything else.

use sha2::{Digest, Sha256};

/// First bytes of a seal. The digit is the version of its form.
const MAGIC: [u8; 8] = *b"RFSWEEP1";
/// Bytes of a seal: the magic number, the outcome, the digest.
const BYTES: usize = MAGIC.len() + 1 + 32;
/// Length of the footer, and the magic number at the end of a file.
const TAIL: usize = 8;

/// The content of an intact seal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sealed {
    /// True if the task failed.
    pub(crate) failed: bool,
}

fn digest(name: &str, pages: &[u8], outcome: u8, footer: &[u8]) -> [u8; 32] {
    let mut sum = Sha256::new();
    sum.update(MAGIC);
    sum.update([outcome]);
    // The length makes the division into parts unambiguous.
    sum.update((pages.len() as u64).to_le_bytes());
    sum.update(pages);
    sum.update(footer);
    sum.update(name.as_bytes());
    sum.finalize().into()
}

/// Returns the offset of the footer.
fn footer_start(bytes: &[u8]) -> Option<usize> {
    let tail = bytes.len().checked_sub(TAIL)?;
    let length = bytes.get(tail..tail + 4)?.try_into().ok()?;
    tail.checked_sub(usize::try_from(u32::from_le_bytes(length)).ok()?)
}

/// Inserts the seal into a Parquet file. `None` if the bytes are not a Parquet file.
pub(crate) fn seal(name: &str, file: &[u8], failed: bool) -> Option<Vec<u8>> {
    let (pages, footer) = file.split_at_checked(footer_start(file)?)?;
    let outcome = u8::from(failed);
    Some(
        [
            pages,
            &MAGIC,
            &[outcome],
            &digest(name, pages, outcome, footer),
            footer,
        ]
        .concat(),
    )
}

/// Returns the content of the seal if the file is intact and belongs to the task `name`.
pub(crate) fn check(name: &str, bytes: &[u8]) -> Option<Sealed> {
    let (front, footer) = bytes.split_at_checked(footer_start(bytes)?)?;
    let (pages, seal) = front.split_at_checked(front.len().checked_sub(BYTES)?)?;
    let outcome = *seal.get(MAGIC.len())?;
    let intact = seal.starts_with(&MAGIC)
        && outcome <= 1
        && seal.get(MAGIC.len() + 1..)? == digest(name, pages, outcome, footer);
    intact.then_some(Sealed {
        failed: outcome == 1,
    })
}
