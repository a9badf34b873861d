//! Agreement of the model of Linux's allocator with the addresses that a kernel recorded.
//!
//! Each device of the trace has a separate domain. The `iommu:map` and `iommu:unmap` lines give
//! the sizes, the CPUs and the order of the kernel's allocations and frees. The allocator of
//! `linux-strict` repeats them, and each address that it returns is compared with the recorded one.
//! The model keeps its own addresses: a difference is not corrected, so later ones can follow.
//!
//! The model is Linux 6.12 to 7.2 on x86 (drivers/iommu/iova.c and `iommu_dma_alloc_iova`): a
//! domain without mappings at the first line, PCI devices, addresses below 4 GiB first, page 0 and
//! the MSI window reserved.

mod domain;
mod outcome;

use std::collections::{BTreeSet, HashMap};
use std::io::Read;

use ringfence_trace::{AddressEvent, AddressKind, Chunk, Devices, Operations, Summary};
use ringfence_types::{Pfn, PfnRange};

use self::domain::Domain;
use crate::error::LabError;
use crate::limits::ReplayLimits;

pub use self::outcome::{
    Agreement, DeviceAgreement, Difference, InconclusiveReason, Stop, StopReason, Verdict,
};

/// First and last page of the MSI window of x86 (`IOMMU_RESV_MSI`), which every domain reserves.
const MSI_WINDOW: (u64, u64) = (0xf_ee00, 0xf_eeff);

/// The state of the domains when the trace begins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TraceBegin {
    /// The trace may begin later than its domains. A difference is then no evidence against the
    /// model.
    #[default]
    Unknown,
    /// The trace begins before the first mapping of each domain, for example at boot.
    BeforeMappings,
}

/// The time at which the kernel frees an unmapped range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FreeTime {
    /// At its unmap: `iommu.strict=1`.
    #[default]
    AtUnmap,
    /// At a flush of a queue, which the trace does not show: lazy mode. The addresses of a domain
    /// are then compared until a freed range could come back.
    AtFlush,
}

/// Inputs of a comparison that the trace does not hold.
#[derive(Debug, Clone, Default)]
pub struct AgreementOptions {
    /// The state of the domains when the trace begins.
    pub begin: TraceBegin,
    /// The time at which the kernel frees ranges.
    pub free_time: FreeTime,
    /// Pages that the domains reserve in addition to the MSI window: the memory windows of the PCI
    /// host bridge. If empty, addresses below the MSI window are not compared.
    pub reserved: Vec<PfnRange>,
    /// Limits on devices, CPUs and search steps.
    pub limits: ReplayLimits,
}

/// Compares the addresses of a trace, chunk by chunk.
#[derive(Debug)]
pub struct AgreementCheck {
    options: AgreementOptions,
    /// By device; `None` for devices without an allocation so far.
    domains: Vec<Option<Box<Domain>>>,
    /// Indices of the devices with an allocation, in the order of the first.
    mapping_devices: Vec<usize>,
    /// Live ranges of all domains.
    live_ranges: usize,
    /// CPUs that the lines show.
    cpus: BTreeSet<u16>,
    /// Live ranges that no line assigns to a device: first page and number of pages, with their
    /// number of users.
    unattributed_live: HashMap<(u64, u64), u64>,
    unattributed: u64,
    allocations: u64,
    steps: u64,
    first_difference: Option<Difference>,
    first_unknown_free: Option<u64>,
}

impl AgreementCheck {
    /// Begins a comparison. The reader must keep addresses
    /// ([`Addresses::Keep`](ringfence_trace::Addresses::Keep)).
    pub fn new(options: AgreementOptions) -> Self {
        Self {
            options,
            domains: Vec::new(),
            mapping_devices: Vec::new(),
            live_ranges: 0,
            cpus: BTreeSet::new(),
            unattributed_live: HashMap::new(),
            unattributed: 0,
            allocations: 0,
            steps: 0,
            first_difference: None,
            first_unknown_free: None,
        }
    }

    /// Compares the addresses of the next chunk.
    ///
    /// # Errors
    /// The trace exceeds a limit of the options, or memory is short.
    pub fn chunk(&mut self, chunk: &Chunk, devices: &Devices) -> Result<(), LabError> {
        for event in &chunk.addresses {
            self.cpus.insert(event.cpu);
            match event.kind {
                AddressKind::Allocated => self.allocated(event, devices)?,
                AddressKind::Freed => self.freed(event)?,
            }
            self.check_limits()?;
        }
        Ok(())
    }

    /// Returns the result after the last chunk; `summary` and `devices` are those of the reader.
    pub fn finish(self, summary: &Summary, devices: &Devices) -> Agreement {
        let mut result = Agreement {
            verdict: Verdict::Agrees,
            allocations: self.allocations,
            compared: 0,
            agreeing: 0,
            unattributed: self.unattributed,
            first_difference: self.first_difference,
            devices: Vec::new(),
        };
        for (index, domain) in self.domains.into_iter().enumerate() {
            let Some(domain) = domain else { continue };
            result.compared += domain.compared;
            result.agreeing += domain.agreeing;
            result.devices.push(DeviceAgreement {
                name: device_name(devices, index),
                allocations: domain.allocations,
                compared: domain.compared,
                agreeing: domain.agreeing,
                stop: domain.stop,
            });
        }
        result.verdict = result.judge(summary, self.options.begin, self.first_unknown_free);
        result
    }

    /// Checks the limits that an event can exceed. A free also creates the state of a CPU.
    fn check_limits(&self) -> Result<(), LabError> {
        let limit = self.options.limits.device_cpus;
        if self.mapping_devices.len().saturating_mul(self.cpus.len()) > limit {
            return Err(LabError::DeviceCpus { limit });
        }
        let limit = self.options.limits.live_ranges;
        if self
            .live_ranges
            .saturating_add(self.unattributed_live.len())
            > limit
        {
            return Err(LabError::LiveRanges { limit });
        }
        Ok(())
    }

    fn allocated(&mut self, event: &AddressEvent, devices: &Devices) -> Result<(), LabError> {
        let Some(device) = event.device else {
            self.unattributed += 1;
            *self.unattributed_live.entry(key(event.range)).or_default() += 1;
            return Ok(());
        };
        let index = device.index();
        if self.domains.len() <= index {
            self.domains.resize_with(index + 1, || None);
        }
        let Some(slot) = self.domains.get_mut(index) else {
            return Err(LabError::Internal("a device's domain"));
        };
        let domain = match slot {
            Some(domain) => domain,
            None => {
                let limit = self.options.limits.devices;
                self.mapping_devices.push(index);
                if self.mapping_devices.len() > limit {
                    return Err(LabError::DeviceLimit { limit });
                }
                slot.insert(Box::new(Domain::new(&self.options)?))
            }
        };
        self.allocations += 1;
        let allocation = self.allocations;
        let before = domain.live_ranges();
        let compared = domain.allocate(event, self.cpus.len())?;
        self.live_ranges = self.live_ranges.saturating_sub(before) + domain.live_ranges();
        self.steps = self.steps.saturating_add(compared.steps);
        if let Some(model) = compared.differs
            && self.first_difference.is_none()
        {
            self.first_difference = Some(Difference {
                line: event.line,
                allocation,
                device: device_name(devices, index),
                cpu: event.cpu,
                pages: event.range.pages(),
                recorded: address(event.range),
                model: model.map(address),
            });
        }
        let limit = self.options.limits.search_of(self.allocations);
        if self.steps > limit {
            return Err(LabError::LongSearch { limit });
        }
        Ok(())
    }

    fn freed(&mut self, event: &AddressEvent) -> Result<(), LabError> {
        let key = key(event.range);
        let index = match event.device {
            Some(device) => Some(device.index()),
            None => {
                if let Some(users) = self.unattributed_live.get_mut(&key) {
                    *users -= 1;
                    if *users == 0 {
                        self.unattributed_live.remove(&key);
                    }
                    return Ok(());
                }
                let domain = |index: &usize| self.domains.get(*index)?.as_deref();
                let devices = self.mapping_devices.iter().copied();
                let mut holders = devices.filter(|index| {
                    domain(index).is_some_and(|domain| domain.may_hold(event.range))
                });
                match (holders.next(), holders.next()) {
                    (only, None) => only,
                    // The trace does not show which of them frees the range.
                    (_, Some(_)) => return Ok(()),
                }
            }
        };
        let domain = index.and_then(|index| self.domains.get_mut(index)?.as_mut());
        let known = match domain {
            Some(domain) => {
                let before = domain.live_ranges();
                let known = domain.free(event)?;
                self.live_ranges = self.live_ranges.saturating_sub(before) + domain.live_ranges();
                known
            }
            None => false,
        };
        if !known && self.first_unknown_free.is_none() {
            self.first_unknown_free = Some(event.line);
        }
        Ok(())
    }
}

/// Compares all addresses of a trace. The options of `operations` must keep addresses.
///
/// # Errors
/// The trace is malformed or exceeds a limit.
pub fn verify<R: Read>(
    operations: &mut Operations<R>,
    options: AgreementOptions,
) -> Result<Agreement, LabError> {
    let mut check = AgreementCheck::new(options);
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk)? {
        check.chunk(&chunk, operations.devices())?;
    }
    Ok(check.finish(operations.summary(), operations.devices()))
}

fn device_name(devices: &Devices, index: usize) -> String {
    let found = devices.iter().nth(index);
    found.map_or_else(String::new, |(_, device)| device.name.clone())
}

fn key(range: PfnRange) -> (u64, u64) {
    (range.lo().get(), range.pages())
}

/// Returns the first address of a range.
fn address(range: PfnRange) -> u64 {
    range.lo().get() << 12
}

/// Returns the pages from `lo` to `hi`.
fn pages(lo: u64, hi: u64) -> Result<PfnRange, LabError> {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).ok_or(LabError::Internal("pages"))
}
