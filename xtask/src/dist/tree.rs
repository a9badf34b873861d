//! Files of a release, and their archive.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use crate::process;

/// Files by path.
#[derive(Debug, Default)]
pub(super) struct Tree {
    files: BTreeMap<String, File>,
}

#[derive(Debug)]
struct File {
    mode: u32,
    content: Vec<u8>,
}

impl Tree {
    pub(super) fn add(&mut self, path: impl Into<String>, content: impl Into<Vec<u8>>) {
        let content = content.into();
        let mode = 0o644;
        self.files.insert(path.into(), File { mode, content });
    }

    pub(super) fn add_program(&mut self, path: &str, content: Vec<u8>) {
        let mode = 0o755;
        self.files.insert(path.to_owned(), File { mode, content });
    }

    pub(super) fn content(&self, path: &str) -> Option<&[u8]> {
        self.files.get(path).map(|file| file.content.as_slice())
    }

    /// Returns the number of bytes of all files.
    pub(super) fn size(&self) -> usize {
        self.files.values().map(|file| file.content.len()).sum()
    }

    /// Replaces each file whose path `chosen` accepts by its compressed form.
    pub(super) fn compress(
        &mut self,
        directory: &Path,
        chosen: impl Fn(&str) -> bool,
    ) -> anyhow::Result<()> {
        let paths: Vec<String> = self.files.keys().filter(|p| chosen(p)).cloned().collect();
        let scratch = directory.join("compressed");
        for path in paths {
            if let Some(file) = self.files.remove(&path) {
                fs::write(&scratch, &file.content)?;
                process::capture(process::command(directory, "gzip").args(["-9nf", "compressed"]))?;
                self.add(path + ".gz", fs::read(scratch.with_extension("gz"))?);
            }
        }
        Ok(())
    }

    /// Writes the files below `directory`, with modes that do not depend on the caller's umask.
    pub(super) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        for (path, file) in &self.files {
            let to = directory.join(path);
            if let Some(parent) = to.parent() {
                fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o755)
                    .create(parent)?;
            }
            fs::write(&to, &file.content)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(file.mode))?;
        }
        Ok(())
    }
}

/// Writes `name`, a directory in `parent`, as an archive whose bytes depend on its files and on
/// `epoch` alone.
pub(super) fn archive(parent: &Path, name: &str, to: &Path, epoch: u64) -> anyhow::Result<()> {
    let tar = to.with_extension("");
    let time = format!("--mtime=@{epoch}");
    process::capture(
        process::command(parent, "tar")
            .args(["--create", "--format=ustar", "--sort=name", &time])
            .args(["--owner=0", "--group=0", "--numeric-owner"])
            .args(["--mode=u=rwX,go=rX", "--file"])
            .arg(std::path::absolute(&tar)?)
            .arg(name),
    )?;
    process::capture(
        process::command(parent, "gzip")
            .args(["-6", "--no-name", "--force"])
            .arg(std::path::absolute(&tar)?),
    )?;
    Ok(())
}
