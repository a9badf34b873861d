//! The licence texts of the crates that the command links.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::ensure;

use super::graph::Package;

/// Beginnings of the names of files with licence texts, in lower case.
const NAMES: &[&str] = &[
    "license",
    "licence",
    "copying",
    "notice",
    "unlicense",
    "copyright",
];

/// Returns the texts of all packages from a registry. A package without a licence is an error.
pub(super) fn write(packages: &[Package]) -> anyhow::Result<String> {
    let mut text = String::from(
        "Licences of the crates that the command links, and of the standard library of Rust \
         (MIT OR Apache-2.0).\n",
    );
    for package in packages.iter().filter(|package| package.checksum.is_some()) {
        let Package { name, version, .. } = package;
        let licence = package.licence.as_deref().unwrap_or_default();
        ensure!(!licence.is_empty(), "{name} {version} names no licence");
        write!(text, "\n==== {name} {version}: {licence} ====\n")?;
        let mut files = texts(&package.directory)?;
        // The C library that the crate compiles has texts of its own.
        if name == "zstd-sys" {
            files.extend(texts(&package.directory.join("zstd"))?);
        }
        if files.is_empty() {
            text.push_str("\nThe crate contains no text of its licence.\n");
        }
        for file in files {
            let content = String::from_utf8_lossy(&fs::read(&file)?).replace("\r\n", "\n");
            write!(text, "\n{}\n", content.trim_end())?;
        }
    }
    Ok(text)
}

/// Returns the files with licence texts in `directory`, sorted.
fn texts(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_lowercase();
        if path.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
