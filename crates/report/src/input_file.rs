//! Small files that are read completely: profiles and reports.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// The file cannot be read, is longer, or is not UTF-8.
pub fn read_file(path: &Path, limit: u64) -> io::Result<String> {
    read_open_file(File::open(path)?, limit)
}

/// Reads an open file of at most `limit` bytes to its end.
///
/// # Errors
/// As [`read_file`].
pub fn read_open_file(file: File, limit: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_long(limit));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn too_long(limit: u64) -> io::Error {
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("longer than the limit of {limit} bytes"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let limit = |text: &[u8], limit| {
            std::fs::write(&path, text).unwrap();
            read_file(&path, limit).map_err(|error| error.kind())
        };
        assert_eq!(limit(b"four", 4).unwrap(), "four");
        assert_eq!(limit(b"fours", 4), Err(io::ErrorKind::FileTooLarge));
        assert_eq!(limit(b"\xff", 4), Err(io::ErrorKind::InvalidData));
        let endless = read_file(Path::new("/dev/zero"), 1 << 20);
        assert_eq!(endless.unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(read_file(&dir.path().join("none"), 4).is_err());
    }
}
