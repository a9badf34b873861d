//! SHA-256 digests in hexadecimal.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Returns the digest of `bytes` as 64 hexadecimal digits.
pub(crate) fn of_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Returns the digest of a regular file. Reads it once, in blocks.
///
/// # Errors
/// The file cannot be read, or is not regular: a device may have no end, and a FIFO no writer.
pub(crate) fn of_file(path: &Path) -> io::Result<String> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("a sweep reads regular files only"));
    }
    let mut file = File::open(path)?;
    let mut sum = Sha256::new();
    let mut block = vec![0; 1 << 16];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex(&sum.finalize())),
            read => sum.update(block.get(..read).unwrap_or_default()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
