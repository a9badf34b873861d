//! Rules for the memory that a client shares: which files are accepted and which pages are locked.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::fstat;

/// Rules for a guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryRules {
    /// A file that is accepted without a seal. The host can reclaim its pages under memory
    /// pressure; from a sealed file it can do so only with swap. A process that can write the file
    /// can kill this process by truncating it.
    pub file: Option<PathBuf>,
    /// Pages to lock in the host's memory.
    pub locked: Locked,
}

/// Pages that the host must not reclaim.
///
/// A device whose accesses cannot fault, such as one assigned to a guest, needs resident pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locked {
    /// No pages: software devices wait for a page fault as CPUs do.
    #[default]
    Nothing,
    /// Pages that the driver of the para-virtual IOMMU has mapped, until it unmaps them (the
    /// PVIOMMU paper, sections 4.1 to 4.3).
    Mapped,
    /// All pages, from the time when they are mapped. A host must do so if its guest has no IOMMU
    /// (the baseline of the PVIOMMU paper).
    All,
}

impl MemoryRules {
    /// Returns true if `file` is accepted without a seal.
    pub(crate) fn takes(&self, file: impl AsFd) -> bool {
        // The client may create the file later than these rules, so resolve the path at each call.
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
