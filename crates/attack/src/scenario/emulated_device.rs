//! A31: the code of an emulated device reads guest memory that it has no grant of.

use std::collections::BTreeMap;

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Owner};
use ringfence_pgtable::{Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, GrantError, Grants, Hva, Resident, SimulatedTables,
};
use ringfence_pviommu::wire::Status;
use ringfence_types::{Direction, PhysAddr};

use super::ScenarioResult;
use crate::evidence::{Evidence, Executed, Found};
use crate::guest_host::{
    ATTACKER, GUEST_BYTES, PAGE, WINDOW, config, guest_memory, host_memory, map_request,
    unmap_request,
};

const THREAD: &str = "thread of the VMM";
const PROCESS: &str = "process with grants";
/// First address at which a process maps a page.
const FIRST: u64 = 0x7f00_0000_0000;

/// The address space of the simulator, modelled. Addresses are never reused.
#[derive(Default)]
struct Process {
    mapped: BTreeMap<u64, PhysAddr>,
    revoked: Vec<u64>,
    next: u64,
}

impl Grants for Process {
    fn grant(&mut self, _: DeviceSlot, frame: PhysAddr, _: Direction) -> Result<Hva, GrantError> {
        let at = FIRST + self.next * PAGE;
        self.next += 1;
        self.mapped.insert(at, frame);
        Ok(Hva::new(at))
    }

    fn revoke(&mut self, _: DeviceSlot, at: Hva) -> Result<(), GrantError> {
        self.revoked.push(at.get());
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), GrantError> {
        for at in self.revoked.drain(..) {
            self.mapped.remove(&at);
        }
        Ok(())
    }
}

/// The simulator of a device reads every page of the guest. A thread of the VMM has all of the
/// guest's memory; a process has the pages of live mappings. The processes are modelled;
/// `crates/live/tests/isolate` does this with real ones.
pub(crate) fn outside_the_grant(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    match mode.owner {
        // The whole guest is mapped in advance, for the simulator as for assigned devices.
        Owner::Host => executed.trial(THREAD, read_all(true)?),
        Owner::Pviommu | Owner::PviommuHopt => {
            executed.trial(PROCESS, read_all(false)?);
            executed.comparison(THREAD, read_all(true)?);
        }
        _ => {
            return Ok(Found::NotApplicable(
                "no host of the mode runs emulated devices",
            ));
        }
    }
    Ok(Found::Executed(executed))
}

fn read_all(whole: bool) -> Result<Evidence, LabError> {
    let (arena, frames, _) = host_memory()?;
    let mut process = Process::default();
    let slot = DeviceSlot::new(0);
    if whole {
        for page in (0..GUEST_BYTES).step_by(PAGE as usize) {
            let all = Direction::Bidirectional;
            let granted = process.grant(slot, PhysAddr::new(page), all);
            granted.map_err(|_| LabError::Internal("a page that cannot be granted"))?;
        }
    }
    let format = SecondStage::new(Levels::Four);
    let tables = SimulatedTables::new(arena, frames, process, format, 2)?;
    let memory = Resident::new(vec![guest_memory()?]);
    let mut backend = Backend::new(config()?, BackendLimits::default(), memory, tables);
    // One page is granted, another one was.
    let requests = [
        map_request(
            ATTACKER,
            Direction::ToDevice,
            &[(WINDOW, 0), (WINDOW + PAGE, PAGE)],
        )?,
        unmap_request(ATTACKER, &[WINDOW + PAGE])?,
    ];
    if requests
        .iter()
        .any(|request| backend.handle(request) != Status::Ok)
    {
        return Err(LabError::Internal("a request that the host refuses"));
    }
    let process = backend.tables().grants();
    let readable = |page: u64| process.mapped.values().any(|frame| frame.get() == page);
    let mut evidence = Evidence::default();
    for page in (PAGE..GUEST_BYTES).step_by(PAGE as usize) {
        evidence.count_if(readable(page), PAGE);
    }
    evidence.false_faults += u64::from(!readable(0));
    Ok(evidence)
}
