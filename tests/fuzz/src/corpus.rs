//! The committed corpora: `fuzz/corpus/<target>/`, one input per file.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Returns the directory of a target's corpus.
pub fn directory(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target)
}

/// Reads the inputs and their names, sorted by name.
pub fn read(target: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut inputs = Vec::new();
    for entry in fs::read_dir(directory(target))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        inputs.push((name.into_owned(), fs::read(&path)?));
    }
    inputs.sort();
    Ok(inputs)
}
