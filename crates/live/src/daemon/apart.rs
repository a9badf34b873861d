//! The disk in a process of its own.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringfence_types::DeviceId;

use super::{BLK, Log};
use crate::caps::Caps;
use crate::counters::DeviceCounters;
use crate::errant::Errant;
use crate::iommu::Behind;
use crate::isolate::{self, Front, Grants, Image, Program, Said};
use crate::server::Event;
use crate::virtio::blk::Blk;

/// What the process is told of the disk.
pub(super) struct Told<'a> {
    pub(super) read_only: bool,
    pub(super) caps: &'a Caps,
    pub(super) errant: &'a [Errant],
}

/// The front of a process that is started for `disk`, and is granted nothing yet.
pub(super) fn front(
    program: &Program,
    disk: Blk,
    told: &Told<'_>,
    iommu: &Behind,
    counters: &Arc<DeviceCounters>,
    log: &Log,
) -> io::Result<Front> {
    let image = Image {
        file: disk.file().as_fd(),
        read_only: told.read_only,
        caps: *told.caps,
        errant: told.errant,
    };
    let (grants, link) = isolate::start(program, &image, counters).map_err(io::Error::other)?;
    let device = DeviceId::new(BLK.0.address());
    iommu.set_apart(device, grants).map_err(io::Error::other)?;
    let (log, watched) = (Arc::clone(log), iommu.clone());
    let tell = move |said: &Said<'_>| match said {
        Said::Ended(breach) => {
            // The one who had to wait for it knows better why it has gone.
            let cause = watched.with_grants(device, Grants::take_breach);
            log(
                BLK.1,
                &Event::Ended(cause.flatten().as_ref().unwrap_or(breach)),
            );
        }
        Said::Errant(tried) => log(BLK.1, &Event::Errant(tried)),
    };
    let counters = Arc::clone(counters);
    Ok(Front::new(
        disk,
        link,
        iommu.clone(),
        device,
        counters,
        Box::new(tell),
    ))
}
