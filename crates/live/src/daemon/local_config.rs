//! What a process that takes devices over was told itself: nothing of it is in the stream.

use std::path::Path;

use super::Log;
use super::dma_path::is_sandboxed;
use super::options::{LOCK_NEEDS_PVIOMMU, POOL_NEEDS_PVIOMMU};
use crate::access::SocketAccess;
use crate::handover::{DeviceState, SavedDevice, StateError};
use crate::host::HostPagePool;
use crate::limits::GuestLimits;
use crate::memory::{Locked, MemoryRules};
use crate::sandbox::SandboxProgram;

/// What a process that takes devices over has itself.
#[derive(Clone, Copy)]
pub struct LocalConfig<'a> {
    /// Where their sockets are.
    pub dir: &'a Path,
    /// Who may connect to them.
    pub access: SocketAccess,
    /// What the guest can make this process keep. Devices that keep more, or whose queues are
    /// larger, are not taken over.
    pub limits: &'a GuestLimits,
    /// What this host does in advance for devices behind the para-virtual IOMMU.
    pub host_page_pool: HostPagePool,
    /// What the guest's memory has to be like, and what of it stays. A file goes with the devices,
    /// from now on with these.
    pub memory: &'a MemoryRules,
    /// What runs as the process of a disk that is one. It lives as long as the thread that takes
    /// the devices over.
    pub sandbox: Option<&'a SandboxProgram>,
    /// Hears of them.
    pub log: &'a Log,
}

/// Sealed memory, and nothing locked.
static DEFAULT_MEMORY_RULES: MemoryRules = MemoryRules {
    file: None,
    locked: Locked::Nothing,
};

impl std::fmt::Debug for LocalConfig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            dir,
            access,
            limits: caps,
            host_page_pool: optimisations,
            memory,
            sandbox: isolate,
            log: _,
        } = self;
        let dir = dir.display();
        let told = (access, optimisations, memory, isolate);
        write!(f, "LocalConfig({dir}, {caps:?}, {told:?})")
    }
}

impl<'a> LocalConfig<'a> {
    /// A process that was told nothing else.
    pub fn new(dir: &'a Path, limits: &'a GuestLimits, log: &'a Log) -> Self {
        Self {
            dir,
            access: SocketAccess::OwnUser,
            limits,
            host_page_pool: HostPagePool::Off,
            memory: &DEFAULT_MEMORY_RULES,
            sandbox: None,
            log,
        }
    }

    /// Whether what this process was told is about devices that are handed over.
    ///
    /// # Errors
    /// [`StateError::Unfit`].
    pub(super) fn check(&self, devices: &[SavedDevice]) -> Result<(), StateError> {
        let is_para = |device: &SavedDevice| matches!(device.state, DeviceState::PvIommu(_));
        let para = devices.iter().any(is_para);
        let sessions = devices.iter().filter_map(|device| device.session.as_ref());
        let ranges = sessions.flat_map(|session| &session.ranges);
        let mut files = ranges.filter_map(|range| range.file.as_ref());
        let rules = [
            (
                self.host_page_pool == HostPagePool::On && !para,
                POOL_NEEDS_PVIOMMU,
            ),
            (
                self.memory.locked == Locked::Mapped && !para,
                LOCK_NEEDS_PVIOMMU,
            ),
            (
                devices.iter().any(|device| is_sandboxed(&device.state)) && self.sandbox.is_none(),
                "there is no program to be the process of a disk",
            ),
            // It is removed at the end: another one is somebody else's.
            (
                self.memory.file.is_some() && !files.any(|file| self.memory.takes(file)),
                "nothing of the guest's memory lies in the file that was named",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map_or(Ok(()), |(_, why)| Err(StateError::Unfit(why)))
    }
}
