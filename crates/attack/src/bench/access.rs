//! Accesses of the devices and the attackers of a bench, and the verdicts of the oracle.

use std::sync::atomic::Ordering;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::LabError;
use ringfence_lab::layer::{ContextTarget, MappingToken};
use ringfence_lab::oracle::ByteVerdict;
use ringfence_types::{
    Access, Direction, DomainId, Fault, Iova, IovaRange, PhysAddr, PhysMemory, PhysRange,
    RequesterId,
};

use super::{Bench, Held, MapId};
use crate::evidence::Evidence;

/// An access that the hardware let through.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reached {
    /// Physical ranges, in the order of the addresses.
    pub(crate) ranges: Vec<PhysRange>,
    pub(crate) verdict: ByteVerdict,
}

const OUTSIDE: LabError = LabError::Internal("a word outside the memory of the bench");

/// Collects the physical ranges of an access.
#[derive(Default)]
struct Ranges(Vec<PhysRange>);

impl Observer for Ranges {
    fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
        self.0.extend_from_slice(ranges);
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

impl Bench {
    /// Makes an access with any requester ID. `None` if the hardware stops it.
    pub(crate) fn access(
        &mut self,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Option<Reached> {
        let request = DmaRequest {
            device,
            iova,
            bytes,
            access,
        };
        let mut ranges = Ranges::default();
        if self.machine.probe(&request, &mut ranges).is_err() {
            let is_false = self.held.iter().any(|held| self.grants(held, &request));
            self.false_faults += u64::from(is_false);
            return None;
        }
        let mut reached = Reached::default();
        for range in &ranges.0 {
            let verdict = self.oracle.judge(device, range, access, self.now);
            reached.verdict.granted += verdict.granted;
            reached.verdict.pool += verdict.pool;
            reached.verdict.mutable += verdict.mutable;
            for (reason, bytes) in verdict.violations {
                *reached.verdict.violations.entry(reason).or_default() += bytes;
            }
            let since = [reached.verdict.since_end, verdict.since_end];
            reached.verdict.since_end = since.into_iter().flatten().min();
        }
        reached.ranges = ranges.0;
        Some(reached)
    }

    /// Returns true if the mapping is live, belongs to the requester and permits the whole access.
    fn grants(&self, held: &Held, request: &DmaRequest) -> bool {
        let range = IovaRange::new(request.iova, request.bytes);
        !held.back
            && !matches!(held.token, MappingToken::None)
            && range.is_some_and(|range| held.range.contains(&range))
            && self.requester(held.key.device.0).ok() == Some(request.device)
            && held.key.direction.permissions().allows(request.access)
    }

    /// Makes an access of an attached device and counts it. Returns true if it succeeded.
    pub(crate) fn attack(
        &mut self,
        evidence: &mut Evidence,
        device: u16,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<bool, LabError> {
        let device = self.requester(device)?;
        let reached = self.access(device, iova, bytes, access);
        Ok(evidence.count(reached.as_ref().map(|reached| &reached.verdict)))
    }

    /// Makes the device access the first and the last byte of a live mapping, in its direction. A
    /// stopped access counts as a false fault.
    pub(crate) fn use_buffer(&mut self, id: MapId) -> Result<(), LabError> {
        let (range, key) = (self.held(id)?.range, self.held(id)?.key);
        let device = self.requester(key.device.0)?;
        for iova in [range.start(), range.last()] {
            let _ = self.access(device, iova, 1, access_of(key.direction));
        }
        Ok(())
    }

    /// Returns the memory that a device reaches at the first byte of a mapping, in its direction.
    /// `None` if the hardware stops it.
    pub(crate) fn reached_by(&mut self, id: MapId) -> Result<Option<PhysAddr>, LabError> {
        let (range, key) = (self.held(id)?.range, self.held(id)?.key);
        let device = self.requester(key.device.0)?;
        let reached = self.access(device, range.start(), 1, access_of(key.direction));
        Ok(reached.and_then(|reached| reached.ranges.first().map(PhysRange::start)))
    }

    /// Returns the physical address that a device reads at `iova`; `None` if the hardware stops it.
    pub(crate) fn reached_at(
        &mut self,
        device: u16,
        iova: Iova,
    ) -> Result<Option<PhysAddr>, LabError> {
        let device = self.requester(device)?;
        let reached = self.access(device, iova, 8, Access::Read);
        Ok(reached.and_then(|reached| reached.ranges.first().map(PhysRange::start)))
    }

    /// Writes a word by DMA. Returns the memory that the device reached; `None` if the hardware
    /// stopped the write.
    pub(crate) fn device_write(
        &mut self,
        device: u16,
        iova: Iova,
        word: u64,
    ) -> Result<Option<Reached>, LabError> {
        let device = self.requester(device)?;
        let Some(reached) = self.access(device, iova, 8, Access::Write) else {
            return Ok(None);
        };
        if let Some(range) = reached.ranges.first() {
            self.store(range.start(), word)?;
        }
        Ok(Some(reached))
    }

    /// Returns the domain and the root of a device's table; `None` if the device has no table.
    pub(crate) fn table(&self, device: u16) -> Option<(DomainId, PhysAddr)> {
        match self.targets.get(usize::from(device)) {
            Some(&(domain, ContextTarget::Table(root))) => Some((domain, root)),
            _ => None,
        }
    }

    /// Permits `device` to use a device TLB, before its first access: the unit then reads the new
    /// context entry. Returns false if the mode's context entry has no such permission.
    pub(crate) fn permit_ats(&mut self, device: u16) -> Result<bool, LabError> {
        let Some((domain, root)) = self.table(device) else {
            return Ok(false);
        };
        let requester = self.requester(device)?;
        let target = ContextTarget::DeviceTlb(root);
        match self.machine.attach(requester, domain, target) {
            Ok(()) => Ok(true),
            Err(LabError::NoDeviceTlb) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes an access to a host address with the AT field 10b, and counts it.
    pub(crate) fn translated_attack(
        &mut self,
        evidence: &mut Evidence,
        device: u16,
        target: PhysRange,
        access: Access,
    ) -> Result<(), LabError> {
        let device = self.requester(device)?;
        let permitted = self.machine.translated_request(device, target, access);
        let verdict = self.oracle.judge(device, &target, access, self.now);
        evidence.count(permitted.then_some(&verdict));
        Ok(())
    }

    /// Stores a word as the CPU does.
    pub(crate) fn store(&mut self, at: PhysAddr, word: u64) -> Result<(), LabError> {
        let memory = self.machine.memory();
        let cell = memory.word(at).map_err(|_| OUTSIDE)?;
        cell.store(word, Ordering::Relaxed);
        Ok(())
    }

    /// Loads a word as the CPU does.
    pub(crate) fn load(&mut self, at: PhysAddr) -> Result<u64, LabError> {
        let memory = self.machine.memory();
        let cell = memory.word(at).map_err(|_| OUTSIDE)?;
        Ok(cell.load(Ordering::Relaxed))
    }
}

/// Returns the access that a mapping of this direction is for.
pub(crate) fn access_of(direction: Direction) -> Access {
    match direction {
        Direction::ToDevice => Access::Read,
        Direction::FromDevice | Direction::Bidirectional => Access::Write,
    }
}
