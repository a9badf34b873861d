//! A disk in a sandboxed process.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringfence_types::RequesterId;

use super::{BLK, Log};
use crate::counters::DeviceCounters;
use crate::dma_fault_injection::InjectedDma;
use crate::iommu::GuestIommu;
use crate::limits::GuestLimits;
use crate::sandbox::{self, DiskProxy, Grants, ProxyEvent, SandboxDisk, SandboxProgram};
use crate::server::ServeEvent;
use crate::virtio::blk::Blk;

/// Settings of the disk for the process.
pub(super) struct SandboxArgs<'a> {
    pub(super) read_only: bool,
    pub(super) limits: &'a GuestLimits,
    pub(super) injected: &'a [InjectedDma],
}

/// Starts a process for `disk`, without any grants, and returns its proxy.
pub(super) fn start_sandboxed_disk(
    program: &SandboxProgram,
    disk: Blk,
    args: &SandboxArgs<'_>,
    iommu: &GuestIommu,
    counters: &Arc<DeviceCounters>,
    log: &Log,
) -> io::Result<DiskProxy> {
    let image = SandboxDisk {
        file: disk.file().as_fd(),
        read_only: args.read_only,
        limits: *args.limits,
        injected: args.injected,
    };
    let (grants, link) = sandbox::start(program, &image, counters).map_err(io::Error::other)?;
    let device = RequesterId::new(BLK.0.address());
    iommu
        .set_sandboxed(device, grants)
        .map_err(io::Error::other)?;
    let (log, watched) = (Arc::clone(log), iommu.clone());
    let report = move |event: &ProxyEvent<'_>| match event {
        ProxyEvent::Ended(violation) => {
            // The thread that waited for the process knows a more exact reason.
            let cause = watched.with_grants(device, Grants::take_violation);
            log(
                BLK.1,
                &ServeEvent::Ended(cause.flatten().as_ref().unwrap_or(violation)),
            );
        }
        ProxyEvent::InjectedDma(result) => log(BLK.1, &ServeEvent::InjectedDma(result)),
    };
    let counters = Arc::clone(counters);
    Ok(DiskProxy::new(
        disk,
        link,
        iommu.clone(),
        device,
        counters,
        Box::new(report),
    ))
}
