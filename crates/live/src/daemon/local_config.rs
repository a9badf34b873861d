//! Configuration of a process that takes over devices. The hand-over stream contains none of it.

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

/// The local configuration of a process that takes over devices.
#[derive(Clone, Copy)]
pub struct LocalConfig<'a> {
    /// Directory of the sockets.
    pub dir: &'a Path,
    /// Users who may connect.
    pub access: SocketAccess,
    /// Limits of the guest. Devices that exceed them, or have larger queues, are not taken over.
    pub limits: &'a GuestLimits,
    /// Host optimisations for devices behind the para-virtual IOMMU.
    pub host_page_pool: HostPagePool,
    /// Rules for the guest's memory, and for the pages to lock. This process now owns the memory
    /// file and removes it at its end.
    pub memory: &'a MemoryRules,
    /// Program of a sandboxed disk's process. The process lives as long as the thread that takes
    /// over the devices.
    pub sandbox: Option<&'a SandboxProgram>,
    /// Receives the devices' events.
    pub log: &'a Log,
}

/// Sealed memory, nothing locked.
static DEFAULT_MEMORY_RULES: MemoryRules = MemoryRules {
    file: None,
    locked: Locked::Nothing,
};

impl std::fmt::Debug for LocalConfig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            dir,
            access,
            limits,
            host_page_pool: optimisations,
            memory,
            sandbox: isolate,
            log: _,
        } = self;
        let dir = dir.display();
        let args = (access, optimisations, memory, isolate);
        write!(f, "LocalConfig({dir}, {limits:?}, {args:?})")
    }
}

impl<'a> LocalConfig<'a> {
    /// A configuration with defaults for all other settings.
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

    /// Checks that this configuration fits the handed-over devices.
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
                "no program for the sandbox process",
            ),
            // The daemon removes the file at its end, so it must be the guest's own.
            (
                self.memory.file.is_some() && !files.any(|file| self.memory.takes(file)),
                "the guest's memory is not in the file of --memory-file",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map_or(Ok(()), |(_, why)| Err(StateError::Unfit(why)))
    }
}
