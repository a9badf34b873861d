//! What a process that takes devices over was told itself: nothing of it is in the stream.

use std::path::Path;

use super::Log;
use super::options::{NOTHING_TO_LOCK, NOTHING_TO_SERVE};
use super::way::is_apart;
use crate::access::Access;
use crate::caps::Caps;
use crate::handover::{HandedDevice, Own, StateError};
use crate::host::HostOptimisations;
use crate::isolate::Program;
use crate::memory::{Locked, MemoryRules};

/// What a process that takes devices over has itself.
#[derive(Clone, Copy)]
pub struct Here<'a> {
    /// Where their sockets are.
    pub dir: &'a Path,
    /// Who may connect to them.
    pub access: Access,
    /// What the guest can make this process keep. Devices that keep more, or whose queues are larger, are not taken over.
    pub caps: &'a Caps,
    /// What this host does in advance for devices behind the para-virtual IOMMU.
    pub optimisations: HostOptimisations,
    /// What the guest's memory has to be like, and what of it stays. A file goes with the devices, from now on with these.
    pub memory: &'a MemoryRules,
    /// What runs as the process of a disk that is one. It lives as long as the thread that takes the devices over.
    pub isolate: Option<&'a Program>,
    /// Hears of them.
    pub log: &'a Log,
}

/// Sealed memory, and nothing locked.
static USUAL: MemoryRules = MemoryRules {
    file: None,
    locked: Locked::Nothing,
};

impl std::fmt::Debug for Here<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            dir,
            access,
            caps,
            optimisations,
            memory,
            isolate,
            log: _,
        } = self;
        let dir = dir.display();
        let told = (access, optimisations, memory, isolate);
        write!(f, "Here({dir}, {caps:?}, {told:?})")
    }
}

impl<'a> Here<'a> {
    /// A process that was told nothing else.
    pub fn new(dir: &'a Path, caps: &'a Caps, log: &'a Log) -> Self {
        Self {
            dir,
            access: Access::OwnUser,
            caps,
            optimisations: HostOptimisations::Off,
            memory: &USUAL,
            isolate: None,
            log,
        }
    }

    /// Whether what this process was told is about devices that are handed over.
    ///
    /// # Errors
    /// [`StateError::Unfit`].
    pub(super) fn check(&self, devices: &[HandedDevice]) -> Result<(), StateError> {
        let is_para = |device: &HandedDevice| matches!(device.own, Own::PvIommu(_));
        let para = devices.iter().any(is_para);
        let sessions = devices.iter().filter_map(|device| device.session.as_ref());
        let ranges = sessions.flat_map(|session| &session.ranges);
        let mut files = ranges.filter_map(|range| range.file.as_ref());
        let rules = [
            (
                self.optimisations == HostOptimisations::On && !para,
                NOTHING_TO_SERVE,
            ),
            (
                self.memory.locked == Locked::Mapped && !para,
                NOTHING_TO_LOCK,
            ),
            (
                devices.iter().any(|device| is_apart(&device.own)) && self.isolate.is_none(),
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
