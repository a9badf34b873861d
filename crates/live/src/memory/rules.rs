//! What a client's memory has to be like, and what of it stays.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::fstat;

/// What is taken for a guest's memory, and whether all of it is kept in the host's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryRules {
    /// This file is taken although it could be cut off: the host takes pages of it back when it
    /// needs room, which it cannot do with a sealed file unless it has swap. Whoever may write the
    /// file can end this process by cutting it off.
    pub file: Option<PathBuf>,
    /// What is locked into the host's memory.
    pub locked: Locked,
}

/// What the host must not take back.
///
/// A device that a host cannot interrupt, as one assigned to a guest, reaches its memory without
/// asking: the page has to be there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locked {
    /// Nothing: devices that are programs wait for a page as processors do.
    #[default]
    Nothing,
    /// What the para-virtual IOMMU's driver has mapped, for as long as it has (PVIOMMU sections 4.1
    /// to 4.3).
    Mapped,
    /// All, from the beginning: what a host without an IOMMU for its guest has to do (the
    /// document's baseline).
    All,
}

impl MemoryRules {
    /// Whether `file` is the one that may be cut off.
    pub(crate) fn takes(&self, file: impl AsFd) -> bool {
        // The client makes the file, so it is looked for now.
        let named = self
            .file
            .as_deref()
            .and_then(|path| fs::metadata(path).ok());
        let same = |named: fs::Metadata| {
            fstat(file).is_ok_and(|file| (named.dev(), named.ino()) == (file.st_dev, file.st_ino))
        };
        named.is_some_and(same)
    }
}
