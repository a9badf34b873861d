//! The mapping layer of one IOMMU.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ringfence_dma::Teardown;
use ringfence_dma::flush::Burst;
use ringfence_types::{Direction, Iova, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId};

use crate::boundary::{
    Output, SizeFirst, boundary, enter, enter_last, into_handle, numbered, object, sized, take,
};
use crate::layer::{LayerOps, Settings, burst, strict};
use crate::ports::ReleasedPort;
use crate::table::format;
use crate::{DmaPorts, Status};

/// The mapping layer of one IOMMU: devices, their domains and mappings. One call at a time: a call
/// during another one returns `RINGFENCE_STATUS_BUSY` and changes nothing. `released` may call the
/// layer, except below a destroy.
pub struct Dma {
    layer: Mutex<Box<dyn LayerOps>>,
    released: Option<ReleasedPort>,
    /// Number of calls that pass buffers to `released`, outside the lock. Increased under the lock.
    deliveries: AtomicUsize,
    /// True while a destroy detaches the devices: other calls are busy. Set under the lock.
    closing: AtomicBool,
}

/// The flush policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DmaPolicy {
    /// Each unmap invalidates, and returns the buffer after the invalidation.
    Strict = 0,
    /// The layer withholds the buffers of a burst until one invalidation at its end.
    Burst = 1,
}

impl TryFrom<u32> for DmaPolicy {
    type Error = Status;

    fn try_from(number: u32) -> Result<Self, Status> {
        numbered([Self::Strict, Self::Burst], |policy| policy as u32, number)
    }
}

/// The directions of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DmaDirection {
    /// The device reads memory.
    ToDevice = 0,
    /// The device writes memory.
    FromDevice = 1,
    /// The device reads and writes memory.
    Bidirectional = 2,
}

impl TryFrom<u32> for DmaDirection {
    type Error = Status;

    #[inline]
    fn try_from(number: u32) -> Result<Self, Status> {
        let all = [Self::ToDevice, Self::FromDevice, Self::Bidirectional];
        numbered(all, |direction| direction as u32, number)
    }
}

/// The settings of a layer.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DmaOptions {
    /// The size of this structure. The caller sets it.
    pub size: usize,
    /// An `enum ringfence_dma_policy`.
    pub policy: u32,
    /// The levels of the tables: 3, 4 or 5.
    pub levels: u32,
    /// The first page of I/O virtual addresses, at least 1, so that no address is 0.
    pub first_page: u64,
    /// The last page of I/O virtual addresses.
    pub last_page: u64,
    /// The unmaps that one invalidation of a burst covers; 0 stands for 256.
    pub burst_longest: u32,
    /// The buffers that a burst withholds at most; 0 stands for 65536.
    pub burst_most: u32,
}

/// A device and its domain.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DmaAttachment {
    /// The token of the attachment.
    pub token: u64,
    /// The physical address of the domain's table, for the device's context entry.
    pub root: u64,
    /// The domain-id, for the context entry.
    pub domain: u16,
    /// The library stores 0.
    pub reserved: [u16; 3],
}

/// A live mapping, as `ringfence_dma_map` returns it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DmaMapping {
    /// The token of the mapping, never 0. It becomes stale when the buffer is released.
    pub token: u64,
    /// The address for the device.
    pub iova: u64,
}

fn direction(number: u32) -> Result<Direction, Status> {
    Ok(match DmaDirection::try_from(number)? {
        DmaDirection::ToDevice => Direction::ToDevice,
        DmaDirection::FromDevice => Direction::FromDevice,
        DmaDirection::Bidirectional => Direction::Bidirectional,
    })
}

// SAFETY: the first field is the size.
unsafe impl SizeFirst for DmaOptions {}

fn create(ports: &DmaPorts, options: &DmaOptions) -> Result<Dma, Status> {
    let ports = ports.check()?;
    // Before `Pfn::new`, which truncates.
    if options.first_page == 0
        || options.first_page > options.last_page
        || options.last_page > Pfn::MAX.get()
    {
        return Err(Status::InvalidArgument);
    }
    let (first, last) = (Pfn::new(options.first_page), Pfn::new(options.last_page));
    let settings = Settings {
        pages: PfnRange::inclusive(first, last).ok_or(Status::InvalidArgument)?,
        format: format(options.levels)?,
    };
    let released = ports.released;
    let layer = match DmaPolicy::try_from(options.policy)? {
        DmaPolicy::Strict => strict(ports, settings),
        DmaPolicy::Burst => {
            released.ok_or(Status::NullPointer)?;
            burst(policy(options), ports, settings)
        }
    };
    Ok(Dma {
        layer: Mutex::new(layer),
        released,
        deliveries: AtomicUsize::new(0),
        closing: AtomicBool::new(false),
    })
}

fn policy(options: &DmaOptions) -> Burst {
    let policy = match options.burst_longest {
        0 => Burst::default(),
        longest => Burst::new(longest as usize),
    };
    match options.burst_most {
        0 => policy,
        most => policy.with_most(most as usize),
    }
}

impl Dma {
    /// Runs `call` in the layer, then passes on the buffers that it released. The callback runs
    /// outside the lock, so it may call the layer.
    fn enter<R>(
        &self,
        call: impl FnOnce(&mut dyn LayerOps) -> Result<R, Status>,
    ) -> Result<R, Status> {
        let (result, released) = {
            let mut layer = enter(&self.layer)?;
            if self.closing.load(Ordering::Acquire) {
                return Err(Status::Busy);
            }
            let result = call(layer.as_mut());
            let released = layer.take_released();
            if released.is_empty() {
                return result;
            }
            // A destroy finds this number under the lock, and does not free the layer below us.
            self.deliveries.fetch_add(1, Ordering::Relaxed);
            (result, released)
        };
        self.deliver(released);
        result
    }

    /// Passes the buffers on, outside the lock. The caller has increased `deliveries`.
    fn deliver(&self, released: Vec<u64>) {
        if let Some(port) = self.released {
            released.into_iter().for_each(|cookie| port.call(cookie));
        }
        self.deliveries.fetch_sub(1, Ordering::Release);
    }

    /// Detaches all devices, and makes later calls busy. If an invalidation fails, the layer
    /// accepts calls again.
    fn close(&self) -> Result<(), Status> {
        let (result, released) = {
            let mut layer = enter_last(&self.layer)?;
            if self.deliveries.load(Ordering::Acquire) != 0 {
                return Err(Status::Busy);
            }
            if self.layer.is_poisoned() {
                return Err(Status::Internal);
            }
            self.closing.store(true, Ordering::Relaxed);
            let result = layer.detach_all();
            self.deliveries.fetch_add(1, Ordering::Relaxed);
            (result, layer.take_released())
        };
        // The callback may try to attach a device. The layer is busy, so no attachment appears.
        self.deliver(released);
        if result == Err(Status::Invalidation) {
            self.closing.store(false, Ordering::Release);
        }
        result
    }
}

/// Creates the layer of one IOMMU. The library copies both structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_create(
    ports: *const DmaPorts,
    options: *const DmaOptions,
    dma: *mut *mut Dma,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (ports, options) = unsafe { (sized(ports)?, sized(options)?) };
        // SAFETY: the contract of all functions.
        let out = unsafe { Output::new(dma) }?;
        out.set(into_handle(create(ports, options)?));
        Ok(Status::Ok)
    })
}

/// Detaches all devices, as `ringfence_dma_detach` with `force` does, destroys the layer and sets
/// `*dma` to NULL. Does nothing if `*dma` is NULL. No other call on the layer may run during or
/// after destroy, and `released` must not destroy the layer.
///
/// - `RINGFENCE_STATUS_BUSY`: another call on the layer is in progress, or `released` made this
///   one. Nothing changes. Calls that `released` makes below a destroy return it too.
/// - `RINGFENCE_STATUS_INVALIDATION`: an invalidation failed. The layer and the remaining devices
///   stay: try again.
/// - `RINGFENCE_STATUS_INTERNAL`: an internal error. The layer is destroyed, but devices may remain
///   attached: their context entries and tables stay live, and the frames of those tables are not
///   returned. Reset the devices and clear their context entries before the frames are used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_destroy(dma: *mut *mut Dma) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let pointer = unsafe { object(dma) }?;
        // SAFETY: the contract of all functions.
        let detached = match unsafe { object(*pointer) } {
            Ok(layer) => boundary(|| layer.close().map(|()| Status::Ok)),
            Err(_) => Status::Ok,
        };
        if matches!(detached, Status::Busy | Status::Invalidation) {
            return Err(detached);
        }
        // SAFETY: no other call runs during or after a destroy: the contract of this function.
        // `close` found no call that passes buffers on, so none below or above this one returns.
        drop(unsafe { take(dma) }?);
        Ok(detached)
    })
}

/// Attaches a device to a new domain. `requester` is its PCI requester ID, `mask` the highest
/// address that it can issue. The program then stores the context entry.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_attach(
    dma: *const Dma,
    requester: u16,
    mask: u64,
    attachment: *mut DmaAttachment,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (dma, out) = unsafe { (object(dma)?, Output::new(attachment)?) };
        let (device, mask) = (RequesterId::new(requester), Iova::new(mask));
        let attached = dma.enter(|layer| layer.attach(device, mask))?;
        out.set(DmaAttachment {
            token: attached.token,
            root: attached.root,
            domain: attached.domain,
            reserved: [0; 3],
        });
        Ok(Status::Ok)
    })
}

/// Detaches a device and removes its domain with its tables. Without `force`, live mappings prevent
/// that. With it, they end: the unmap of each then returns its buffer. Buffers that bursts withhold
/// go to `released`.
///
/// After `RINGFENCE_STATUS_INVALIDATION` the device is still attached: try again. The call may have
/// called `disconnect`, and `released` with the buffers of bursts that were invalidated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_detach(
    dma: *const Dma,
    attachment: u64,
    force: bool,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let dma = unsafe { object(dma) }?;
        let teardown = if force {
            Teardown::Forced
        } else {
            Teardown::IfUnused
        };
        dma.enter(|layer| layer.detach(attachment, teardown))?;
        Ok(Status::Ok)
    })
}

/// Maps the `bytes` bytes at `phys` for a device. `direction` is an `enum ringfence_dma_direction`.
/// `cookie` is the program's name of the buffer, which the program must not touch or free until
/// the layer releases it.
///
/// The device reaches whole pages of 4 KiB: all bytes of the first and of the last page of the
/// buffer, too. To protect what lies beside a buffer, allocate buffers in whole pages.
///
/// After a map the program owes a unit in caching mode an invalidation of the range, and a unit
/// with a write buffer a flush.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_map(
    dma: *const Dma,
    attachment: u64,
    phys: u64,
    bytes: u64,
    direction: u32,
    cookie: u64,
    mapping: *mut DmaMapping,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (dma, out) = unsafe { (object(dma)?, Output::new(mapping)?) };
        let memory = PhysRange::new(PhysAddr::new(phys), bytes).ok_or(Status::InvalidArgument)?;
        let direction = self::direction(direction)?;
        let (token, iova) = dma.enter(|layer| layer.map(attachment, memory, direction, cookie))?;
        let iova = iova.get();
        out.set(DmaMapping { token, iova });
        Ok(Status::Ok)
    })
}

/// Unmaps a mapping.
///
/// - `RINGFENCE_STATUS_OK`: the buffer is released, and its cookie is in `*cookie`, which may be
///   NULL. The token is stale.
/// - `RINGFENCE_STATUS_WITHHELD`: the buffer goes to `released` when its burst ends.
/// - `RINGFENCE_STATUS_INVALIDATION`: the device may still reach the buffer. Call again with the
///   same token.
/// - `RINGFENCE_STATUS_STALE_TOKEN`: the token was used up. Nothing changed.
/// - `RINGFENCE_STATUS_ALREADY_UNMAPPED`: a burst withholds the buffer. Nothing changed.
/// - Other results: the buffer is still mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_unmap(
    dma: *const Dma,
    mapping: u64,
    cookie: *mut u64,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (dma, out) = unsafe { (object(dma)?, Output::optional(cookie)) };
        let Some(released) = dma.enter(|layer| layer.unmap(mapping))? else {
            return Ok(Status::Withheld);
        };
        if let Some(out) = out {
            out.set(released);
        }
        Ok(Status::Ok)
    })
}

/// Ends the burst of unmaps of one device and direction: one invalidation, then `released` receives
/// each buffer. A long burst has several invalidations. If one fails, `released` has received the
/// buffers of those that completed before, and the other buffers stay withheld: try again. Does
/// nothing under the strict policy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_dma_end_burst(
    dma: *const Dma,
    attachment: u64,
    direction: u32,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let dma = unsafe { object(dma) }?;
        let direction = self::direction(direction)?;
        dma.enter(|layer| layer.end_burst(attachment, direction))?;
        Ok(Status::Ok)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::NewAttachment;

    /// A layer whose calls panic. After a call, `detach_all` would succeed.
    #[derive(Default)]
    struct Defective {
        was_called: bool,
    }

    impl LayerOps for Defective {
        fn attach(&mut self, _: RequesterId, _: Iova) -> Result<NewAttachment, Status> {
            panic!("inside")
        }
        fn detach(&mut self, _: u64, _: Teardown) -> Result<(), Status> {
            panic!("inside")
        }
        fn detach_all(&mut self) -> Result<(), Status> {
            assert!(self.was_called, "inside");
            Ok(())
        }
        fn map(
            &mut self,
            _: u64,
            _: PhysRange,
            _: Direction,
            _: u64,
        ) -> Result<(u64, Iova), Status> {
            panic!("inside")
        }
        fn unmap(&mut self, _: u64) -> Result<Option<u64>, Status> {
            panic!("inside")
        }
        fn end_burst(&mut self, _: u64, _: Direction) -> Result<(), Status> {
            self.was_called = true;
            panic!("inside")
        }
        fn take_released(&mut self) -> Vec<u64> {
            Vec::new()
        }
    }

    #[test]
    fn destroy_frees_a_layer_after_an_internal_error() {
        for earlier_calls in [0, 2] {
            let mut dma = into_handle(Dma {
                layer: Mutex::new(Box::new(Defective::default())),
                released: None,
                deliveries: AtomicUsize::new(0),
                closing: AtomicBool::new(false),
            });
            // SAFETY: the pointer is live until the destroy, which sets it to NULL.
            unsafe {
                for _ in 0..earlier_calls {
                    assert_eq!(ringfence_dma_end_burst(dma, 1, 0), Status::Internal);
                }
                assert_eq!(ringfence_dma_destroy(&raw mut dma), Status::Internal);
                assert!(dma.is_null());
                assert_eq!(ringfence_dma_destroy(&raw mut dma), Status::Ok);
            }
        }
    }
}
