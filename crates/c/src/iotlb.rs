//! The software IOTLB of a vhost-user back-end.

use std::sync::Mutex;

use ringfence_softiommu::Reader;
use ringfence_softiommu::iotlb::{
    IOTLB_BYTES, Iotlb as Cache, IotlbLimits, Message, MissAction, MissId, MissOutcome, Region,
    Regions,
};
use ringfence_types::{
    Access, Fault as DmaFault, FaultReason, Iova, IovaRange, PhysAddr, PhysRange, RequesterId,
};

use crate::Status;
use crate::boundary::{
    Output, boundary, enter_last, exclusive, into_handle, numbered, object, take, wait,
};
use crate::copy::{read_shared, write_shared};
use crate::slab::Slab;
use crate::table::permissions;

/// The IOTLB of one device: translations that the front-end sends, in the memory that it shares.
/// Any thread may call: a call waits for the calls of other threads. No call waits for the
/// front-end or calls back.
pub struct Iotlb(Mutex<State>);

struct State {
    cache: Cache<()>,
    misses: Slab<MissId>,
}

/// A thread's access to the memory behind an IOTLB. One thread at a time may use it.
pub struct IotlbReader(Reader<()>);

/// Memory that the front-end has shared.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct IotlbRegion {
    /// The address in the front-end's address space, which updates use.
    pub user: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// The memory in this process. It stays mapped until the region is replaced or the IOTLB is
    /// destroyed, whichever is first. Its offset in a page is that of `user`. The front-end must be
    /// unable to truncate its file, as `F_SEAL_SHRINK` ensures; otherwise an access can end the
    /// program with SIGBUS.
    pub host: *mut core::ffi::c_void,
}

/// The reason why an access was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FaultKind {
    /// No translation is cached. `ringfence_iotlb_miss` requests it.
    NotPresent = 0,
    /// The cached translation does not permit the read.
    ReadDenied = 1,
    /// The cached translation does not permit the write.
    WriteDenied = 2,
    /// The address lies beyond the width of the IOTLB.
    BeyondWidth = 3,
    /// The access is empty, or its last byte lies beyond 2^64 - 1.
    BadLength = 4,
    /// The IOTLB was destroyed.
    Blocked = 5,
}

impl TryFrom<u32> for FaultKind {
    type Error = Status;

    fn try_from(number: u32) -> Result<Self, Status> {
        let all = [
            Self::NotPresent,
            Self::ReadDenied,
            Self::WriteDenied,
            Self::BeyondWidth,
            Self::BadLength,
            Self::Blocked,
        ];
        numbered(all, |kind| kind as u32, number)
    }
}

/// An access that was stopped. No byte was copied.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Fault {
    /// The first address that is not translated.
    pub iova: u64,
    /// The access: `RINGFENCE_READ` or `RINGFENCE_WRITE`.
    pub access: u32,
    /// An `enum ringfence_fault_kind`.
    pub kind: u32,
}

/// The action that a miss requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MissKind {
    /// Send the message to the front-end with a request for a reply, wait for the reply, and pass
    /// it to `ringfence_iotlb_replied`.
    Send = 0,
    /// Wait for the reply to an earlier message.
    Wait = 1,
    /// The translation has arrived: access the memory again.
    Present = 2,
}

/// The outcome of a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MissResult {
    /// The translation is cached: access the memory again.
    Present = 0,
    /// The answer was invalidated meanwhile. Access the memory again, which may miss again.
    Invalidated = 1,
    /// The device may not access the address.
    Refused = 2,
}

/// The answer of `ringfence_iotlb_miss`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct IotlbMiss {
    /// The token of the miss; 0 if the translation has arrived.
    pub token: u64,
    /// An `enum ringfence_miss_kind`.
    pub action: u32,
    /// The library stores 0.
    pub reserved: u32,
    /// The message to send: a `struct vhost_iotlb_msg` in host byte order.
    pub message: [u8; 32],
}

/// The only device.
const DEVICE: RequesterId = RequesterId::new(0);

/// Returns the table of the caller's regions. The physical address of memory is its address in
/// this process.
///
/// # Safety
/// `regions` is NULL or points to `count` structures, whose memory exists.
unsafe fn regions(regions: *const IotlbRegion, count: usize) -> Result<Regions, Status> {
    if regions.is_null() && count != 0 {
        return Err(Status::NullPointer);
    }
    let given = if count == 0 {
        &[]
    } else {
        // SAFETY: the caller guarantees `count` structures.
        unsafe { core::slice::from_raw_parts(regions, count) }
    };
    let mut table = Vec::with_capacity(count);
    for region in given {
        if region.host.is_null() {
            return Err(Status::NullPointer);
        }
        table.push(Region {
            user: region.user,
            bytes: region.bytes,
            memory: PhysAddr::new(region.host.expose_provenance() as u64),
        });
    }
    Ok(Regions::new(&table)?)
}

/// Creates an empty IOTLB of at most 8192 pages. `count` regions are shared, at most 512.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_create(
    regions: *const IotlbRegion,
    count: usize,
    iotlb: *mut *mut Iotlb,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let out = unsafe { Output::new(iotlb) }?;
        // SAFETY: the contract of all functions.
        let regions = unsafe { self::regions(regions, count) }?;
        let cache = Cache::new(IotlbLimits::default(), DEVICE, (), regions)?;
        let misses = Slab::default();
        out.set(into_handle(Iotlb(Mutex::new(State { cache, misses }))));
        Ok(Status::Ok)
    })
}

/// Destroys an IOTLB and sets `*iotlb` to NULL. On return, its readers reach no memory. Does
/// nothing if `*iotlb` is NULL. No other call on the IOTLB may run during or after destroy; calls
/// on its readers may. `RINGFENCE_STATUS_BUSY` reports another call on the IOTLB, if it has begun,
/// and nothing changes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_destroy(iotlb: *mut *mut Iotlb) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let pointer = unsafe { object(iotlb) }?;
        // SAFETY: the contract of all functions.
        if let Ok(iotlb) = unsafe { object(*pointer) } {
            drop(enter_last(&iotlb.0)?);
        }
        // SAFETY: no other call runs during or after a destroy: the contract of this function.
        drop(unsafe { take(iotlb) }?);
        Ok(Status::Ok)
    })
}

/// Replaces the shared memory. On return, no reader accesses the old memory, and no translation is
/// cached. Answers to pending misses are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_set_regions(
    iotlb: *const Iotlb,
    regions: *const IotlbRegion,
    count: usize,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let iotlb = unsafe { object(iotlb) }?;
        // SAFETY: the contract of all functions.
        let regions = unsafe { self::regions(regions, count) }?;
        wait(&iotlb.0)?.cache.set_memory((), regions)?;
        Ok(Status::Ok)
    })
}

/// Executes an update or an invalidation of the front-end: the 32 bytes of a `struct
/// vhost_iotlb_msg` in host byte order. After success the program can acknowledge the message:
/// after an invalidation, no reader holds a translation of the range. The call waits for other
/// threads and is never busy. After an error the program acknowledges the message as failed: an
/// invalidation then had no effect, and an update may have evicted pages. After
/// `RINGFENCE_STATUS_INTERNAL`, stop the device and destroy the IOTLB: readers may still hold old
/// translations.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_receive(
    iotlb: *const Iotlb,
    message: *const u8,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (iotlb, message) =
            unsafe { (object(iotlb)?, object(message.cast::<[u8; IOTLB_BYTES]>())?) };
        let message = Message::decode(message)?;
        wait(&iotlb.0)?.cache.receive(&message)?;
        Ok(Status::Ok)
    })
}

/// Handles a fault of a reader, and stores the action that it requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_miss(
    iotlb: *const Iotlb,
    fault: *const Fault,
    miss: *mut IotlbMiss,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (iotlb, fault) = unsafe { (object(iotlb)?, object(fault)?) };
        // SAFETY: the contract of all functions.
        let out = unsafe { Output::new(miss) }?;
        let fault = fault.as_miss()?;
        let state = &mut *wait(&iotlb.0)?;
        let (kind, id, message) = match state.cache.miss(&fault)? {
            MissAction::Send(id, message) => (MissKind::Send, Some(id), message.encode()),
            MissAction::Wait(id) => (MissKind::Wait, Some(id), [0; IOTLB_BYTES]),
            MissAction::Present => (MissKind::Present, None, [0; IOTLB_BYTES]),
        };
        let token = match id {
            None => 0,
            Some(id) => {
                let known = state.misses.find(|known| *known == id);
                let token = known.or_else(|| state.misses.insert(id));
                token.ok_or(Status::TooMany)?
            }
        };
        out.set(IotlbMiss {
            token,
            action: kind as u32,
            reserved: 0,
            message,
        });
        Ok(Status::Ok)
    })
}

/// Completes a miss after the reply of the front-end. `accepted` is false if the front-end answered
/// with an error. Stores an `enum ringfence_miss_result` in `*result`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_replied(
    iotlb: *const Iotlb,
    miss: u64,
    accepted: bool,
    result: *mut u32,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (iotlb, out) = unsafe { (object(iotlb)?, Output::new(result)?) };
        let state = &mut *wait(&iotlb.0)?;
        let id = state.misses.remove(miss).ok_or(Status::StaleToken)?;
        out.set(match state.cache.replied(id, accepted)? {
            MissOutcome::Present => MissResult::Present,
            MissOutcome::Invalidated => MissResult::Invalidated,
            MissOutcome::Refused => MissResult::Refused,
        } as u32);
        Ok(Status::Ok)
    })
}

/// Creates a reader for one thread of the device. An IOTLB has at most 32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_reader_create(
    iotlb: *const Iotlb,
    reader: *mut *mut IotlbReader,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (iotlb, out) = unsafe { (object(iotlb)?, Output::new(reader)?) };
        let reader = wait(&iotlb.0)?.cache.reader()?;
        out.set(into_handle(IotlbReader(reader)));
        Ok(Status::Ok)
    })
}

/// Destroys a reader and sets `*reader` to NULL. Does nothing if `*reader` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_reader_destroy(reader: *mut *mut IotlbReader) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        drop(unsafe { take(reader) }?);
        Ok(Status::Ok)
    })
}

/// Checks that the device may access `bytes` bytes at `iova`. `access` is `RINGFENCE_READ` or
/// `RINGFENCE_WRITE`. After `RINGFENCE_STATUS_FAULT`, `*fault`, which may be NULL, has the reason.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_check(
    reader: *mut IotlbReader,
    iova: u64,
    bytes: u64,
    access: u32,
    fault: *mut Fault,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (reader, fault) = unsafe { (exclusive(reader)?, Output::optional(fault)) };
        let access = match permissions(access)? {
            both if both == ringfence_types::Permissions::READ_WRITE => {
                return Err(Status::InvalidArgument);
            }
            one if one.allows(Access::Read) => Access::Read,
            _ => Access::Write,
        };
        reader.each(iova, bytes, access, fault, |_| {})?;
        Ok(Status::Ok)
    })
}

/// Copies `bytes` bytes from `iova` to `to`. All bytes, or none after an error. `to` does not
/// overlap the shared memory.
///
/// The front-end and the guest may write the memory meanwhile. The copy is atomic only for each
/// naturally aligned unit of 1, 2, 4 or 8 bytes, and orders no other access. A program that reads a
/// ring index needs an acquire fence after the read, before it reads the entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_read(
    reader: *mut IotlbReader,
    iova: u64,
    to: *mut core::ffi::c_void,
    bytes: usize,
    fault: *mut Fault,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (reader, fault) = unsafe { (exclusive(reader)?, Output::optional(fault)) };
        if to.is_null() {
            return Err(Status::NullPointer);
        }
        let mut to = to.cast::<u8>();
        reader.each(iova, bytes as u64, Access::Read, fault, |part| {
            let count = part.bytes() as usize;
            // SAFETY: `to` has `bytes` bytes, and the parts have as many together. The part lies in
            // a shared region, which stays mapped while the guard in `each` lives. Others write it
            // meanwhile, which `read_shared` permits.
            unsafe {
                read_shared(host(&part), to, count);
                to = to.add(count);
            }
        })?;
        Ok(Status::Ok)
    })
}

/// Copies `bytes` bytes from `from` to `iova`. All bytes, or none after an error. `from` does not
/// overlap the shared memory. The copy is atomic as that of `ringfence_iotlb_read`. A program that
/// writes a ring index needs a release fence before the write, after it writes the entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iotlb_write(
    reader: *mut IotlbReader,
    iova: u64,
    from: *const core::ffi::c_void,
    bytes: usize,
    fault: *mut Fault,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (reader, fault) = unsafe { (exclusive(reader)?, Output::optional(fault)) };
        if from.is_null() {
            return Err(Status::NullPointer);
        }
        let mut from = from.cast::<u8>();
        reader.each(iova, bytes as u64, Access::Write, fault, |part| {
            let count = part.bytes() as usize;
            // SAFETY: as in `ringfence_iotlb_read`, with the directions exchanged.
            unsafe {
                write_shared(from, host(&part), count);
                from = from.add(count);
            }
        })?;
        Ok(Status::Ok)
    })
}

/// Returns the address in this process of a translated range.
fn host(part: &PhysRange) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(part.start().get() as usize)
}

impl IotlbReader {
    /// Translates an access and passes its parts to `each` in order. On a fault, stores it.
    fn each(
        &mut self,
        iova: u64,
        bytes: u64,
        access: Access,
        fault: Option<Output<Fault>>,
        each: impl FnMut(PhysRange),
    ) -> Result<(), Status> {
        let mut section = self.0.online();
        let guard = section.guard();
        let iova = Iova::new(iova);
        let translated = match IovaRange::new(iova, bytes) {
            Some(range) => guard.translate(range, access),
            None => Err(DmaFault {
                device: DEVICE,
                iova,
                access,
                reason: FaultReason::BadLength,
            }),
        };
        match translated {
            Ok(parts) => {
                parts.iter().for_each(each);
                Ok(())
            }
            Err(stopped) => {
                if let Some(out) = fault {
                    out.set(Fault::new(&stopped));
                }
                Err(Status::Fault)
            }
        }
    }
}

impl Fault {
    fn new(fault: &DmaFault) -> Self {
        let kind = match fault.reason {
            FaultReason::NotPresent => FaultKind::NotPresent,
            FaultReason::ReadDenied => FaultKind::ReadDenied,
            FaultReason::WriteDenied => FaultKind::WriteDenied,
            FaultReason::AddressBeyondWidth => FaultKind::BeyondWidth,
            FaultReason::BadLength => FaultKind::BadLength,
            _ => FaultKind::Blocked,
        };
        Self {
            iova: fault.iova.get(),
            access: match fault.access {
                Access::Read => crate::RINGFENCE_READ,
                Access::Write => crate::RINGFENCE_WRITE,
            },
            kind: kind as u32,
        }
    }

    /// Returns the fault as the cache expects it. The program may have changed any field.
    fn as_miss(&self) -> Result<DmaFault, Status> {
        let access = match self.access {
            crate::RINGFENCE_READ => Access::Read,
            crate::RINGFENCE_WRITE => Access::Write,
            _ => return Err(Status::InvalidArgument),
        };
        let reason = match FaultKind::try_from(self.kind)? {
            FaultKind::NotPresent => FaultReason::NotPresent,
            FaultKind::ReadDenied => FaultReason::ReadDenied,
            FaultKind::WriteDenied => FaultReason::WriteDenied,
            FaultKind::BeyondWidth | FaultKind::BadLength | FaultKind::Blocked => {
                return Err(Status::NotAMiss);
            }
        };
        Ok(DmaFault {
            device: DEVICE,
            iova: Iova::new(self.iova),
            access,
            reason,
        })
    }
}
