//! The status of a request according to the PVIOMMU paper's table of statuses, over a brute-force
//! map.

use std::collections::BTreeMap;

use ringfence_pviommu::wire::{Request, Status};
use ringfence_types::{Direction, Iova};

use super::PAGE;

/// Maps device and GIOVA to GPA and direction.
pub(crate) type Model = BTreeMap<(u64, u64), (u64, Direction)>;

/// Configuration of a backend. The guest's memory begins at 0.
pub(crate) struct Rules {
    pub(crate) pages_max: u32,
    pub(crate) devices: [u64; 2],
    /// First address of the window.
    pub(crate) first: u64,
    /// Address of the last page of the window.
    pub(crate) last: u64,
    pub(crate) memory_bytes: u64,
    /// Maximum number of mappings of a device.
    pub(crate) mappings: u64,
    /// Maximum number of 2 MiB areas in which a device has mappings.
    pub(crate) stretches: u64,
}

impl Rules {
    /// Returns the status of a request on a host without failures, and the mappings after it if it
    /// is `Ok`.
    pub(crate) fn judge(&self, model: &Model, request: &[u8]) -> (Status, Model) {
        let mut after = model.clone();
        let sound =
            |giova: Iova| giova.is_aligned(PAGE) && (self.first..=self.last).contains(&giova.get());
        let status = match Request::decode(request, self.pages_max) {
            Err(_) => Status::Malformed,
            Ok(request) if !self.devices.contains(&request.device().get()) => Status::NoDevice,
            Ok(Request::Map(map)) => {
                let device = map.device.get();
                let mut repeated = false;
                for (giova, gpa) in map.pairs() {
                    let to = (gpa.get(), map.direction);
                    repeated |= after.insert((device, giova.get()), to).is_some();
                }
                if !map.giovas.iter().all(sound) {
                    Status::BadGiova
                } else if !map
                    .gpas
                    .iter()
                    .all(|g| g.is_aligned(PAGE) && g.get() < self.memory_bytes)
                {
                    Status::BadGpa
                } else if repeated {
                    Status::Mapped
                } else if !self.has_room(&after, device) {
                    Status::NoRoom
                } else {
                    Status::Ok
                }
            }
            Ok(Request::Unmap(unmap)) => {
                let device = unmap.device.get();
                let mut missing = false;
                for giova in unmap.giovas {
                    missing |= after.remove(&(device, giova.get())).is_none();
                }
                if !unmap.giovas.iter().all(sound) {
                    Status::BadGiova
                } else if missing {
                    Status::NotMapped
                } else {
                    Status::Ok
                }
            }
        };
        (status, after)
    }

    fn has_room(&self, after: &Model, device: u64) -> bool {
        let mut live = 0;
        let mut stretches = 0;
        let mut last = None;
        for ((_, giova), _) in after.range((device, 0)..=(device, u64::MAX)) {
            let stretch = giova >> 21;
            live += 1;
            stretches += u64::from(last != Some(stretch));
            last = Some(stretch);
        }
        live <= self.mappings && stretches <= self.stretches
    }
}
