//! The ports of the mapping layer: the caller's memory and the invalidation interface of its IOMMU.

use core::ffi::c_void;

use ringfence_dma::Platform;
use ringfence_types::{
    CachedLevels, Invalidation, InvalidationError, Invalidator, Nanos, RequesterId, Ticket,
};

use crate::boundary::{SizeFirst, sized};
use crate::memory::CallerMemory;
use crate::{Memory, Status};

/// The scope of an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum InvalidationKind {
    /// A range of one domain, only its leaf translations.
    Leaves = 0,
    /// A range of one domain, with the walk caches over it.
    Pages = 1,
    /// All entries of one domain.
    Domain = 2,
    /// All entries of all domains.
    Global = 3,
    /// The context entry of one device, and every entry cached through it.
    Context = 4,
}

/// An invalidation that the library submits.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct InvalidationRequest {
    /// An `enum ringfence_invalidation_kind`.
    pub kind: u32,
    /// The domain, for a range or a domain.
    pub domain: u16,
    /// The PCI requester ID, for a context entry.
    pub requester: u16,
    /// The first address, for a range.
    pub iova: u64,
    /// The length in bytes, for a range.
    pub bytes: u64,
}

/// The ports of one IOMMU. The callbacks must return, and run on the thread that calls the layer.
/// They must not call the layer that calls them, except that `released` may. `released` must not
/// destroy it: `ringfence_dma_destroy` then returns `RINGFENCE_STATUS_BUSY`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DmaPorts {
    /// The size of this structure. The caller sets it.
    pub size: usize,
    /// The memory of the tables.
    pub memory: Memory,
    /// The first argument of the callbacks below.
    pub context: *mut c_void,
    /// Submits an invalidation. Stores a number for `poll` in `*ticket` and returns 0, or returns
    /// another number.
    pub submit: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            request: *const InvalidationRequest,
            ticket: *mut u64,
        ) -> i32,
    >,
    /// Returns 1 if the invalidation has completed: no later access uses an entry of the request,
    /// and earlier ones have reached memory. Returns 0 if it has not, another number if it failed.
    pub poll: Option<unsafe extern "C" fn(context: *mut c_void, ticket: u64) -> i32>,
    /// Clears the context entry of a device in memory. May be NULL if the program clears it before
    /// it detaches the device. Called again when a detach is tried again.
    pub disconnect: Option<unsafe extern "C" fn(context: *mut c_void, requester: u16)>,
    /// Receives the cookie of each buffer that a burst withheld and that no device reaches any
    /// more. May be NULL if the policy is strict.
    pub released: Option<unsafe extern "C" fn(context: *mut c_void, cookie: u64)>,
    /// After this number of polls an invalidation has failed. 0 stands for no limit.
    pub poll_limit: u64,
}

type Submit = unsafe extern "C" fn(*mut c_void, *const InvalidationRequest, *mut u64) -> i32;
type Poll = unsafe extern "C" fn(*mut c_void, u64) -> i32;
type Disconnect = unsafe extern "C" fn(*mut c_void, u16);
type Released = unsafe extern "C" fn(*mut c_void, u64);

/// The ports, checked, as the layer uses them.
pub(crate) struct CallerPorts {
    memory: CallerMemory,
    unit: CallerUnit,
    disconnect: Option<Disconnect>,
    pub(crate) released: Option<ReleasedPort>,
}

/// The invalidation port.
pub(crate) struct CallerUnit {
    context: *mut c_void,
    submit: Submit,
    poll: Poll,
    limit: u64,
    polls: u64,
}

/// The receiver of released buffers.
#[derive(Clone, Copy)]
pub(crate) struct ReleasedPort {
    context: *mut c_void,
    released: Released,
}

// SAFETY: `DmaPorts` demands callbacks for the thread that uses the layer, whichever that is. The
// library passes `context` to them without using it.
unsafe impl Send for ReleasedPort {}
// SAFETY: as for `Send`. The layer's program may use a layer on several threads in turn.
unsafe impl Sync for ReleasedPort {}
// SAFETY: as for `ReleasedPort`. The lock of the layer admits one thread at a time.
unsafe impl Send for CallerUnit {}

impl ReleasedPort {
    /// Passes a buffer to the caller.
    pub(crate) fn call(self, cookie: u64) {
        // SAFETY: the callback accepts any cookie: its contract.
        unsafe { (self.released)(self.context, cookie) };
    }
}

// SAFETY: the first field is the size.
unsafe impl SizeFirst for DmaPorts {}

impl DmaPorts {
    /// Checks the memory and the callbacks.
    pub(crate) fn check(&self) -> Result<CallerPorts, Status> {
        // SAFETY: the memory is a part of this structure.
        let memory = unsafe { sized(&raw const self.memory) }?;
        let context = self.context;
        Ok(CallerPorts {
            memory: memory.check()?,
            unit: CallerUnit {
                context,
                submit: self.submit.ok_or(Status::NullPointer)?,
                poll: self.poll.ok_or(Status::NullPointer)?,
                limit: self.poll_limit,
                polls: 0,
            },
            disconnect: self.disconnect,
            released: self
                .released
                .map(|released| ReleasedPort { context, released }),
        })
    }
}

impl CallerPorts {
    /// Clears the context entry of a device.
    pub(crate) fn disconnect(&mut self, device: RequesterId) {
        if let Some(disconnect) = self.disconnect {
            // SAFETY: the callback accepts any device that was attached: its contract.
            unsafe { disconnect(self.unit.context, device.get()) };
        }
    }
}

impl Platform for CallerPorts {
    type Memory = CallerMemory;
    type Frames = CallerMemory;
    type Invalidator = CallerUnit;

    #[inline]
    fn memory(&self) -> &CallerMemory {
        &self.memory
    }

    #[inline]
    fn frames(&self) -> &CallerMemory {
        &self.memory
    }

    #[inline]
    fn invalidator(&mut self) -> &mut CallerUnit {
        &mut self.unit
    }

    /// The policies of this interface have no timers.
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl InvalidationRequest {
    /// Describes `request`; `None` for a ring, which no table of this interface has.
    fn new(request: Invalidation) -> Option<Self> {
        let mut described = Self {
            kind: InvalidationKind::Global as u32,
            domain: 0,
            requester: 0,
            iova: 0,
            bytes: 0,
        };
        match request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => {
                described.kind = match levels {
                    CachedLevels::Leaves => InvalidationKind::Leaves as u32,
                    CachedLevels::All => InvalidationKind::Pages as u32,
                };
                described.domain = domain.get();
                described.iova = range.iovas().start().get();
                described.bytes = range.iovas().bytes();
            }
            Invalidation::Domain(domain) => {
                described.kind = InvalidationKind::Domain as u32;
                described.domain = domain.get();
            }
            Invalidation::Global => {}
            Invalidation::Context(device) => {
                described.kind = InvalidationKind::Context as u32;
                described.requester = device.get();
            }
            Invalidation::Ring { .. } => return None,
        }
        Some(described)
    }
}

impl Invalidator for CallerUnit {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let request = InvalidationRequest::new(request).ok_or(InvalidationError::Unsupported)?;
        let mut ticket = 0;
        self.polls = 0;
        // SAFETY: both pointers are valid during the call.
        match unsafe { (self.submit)(self.context, &raw const request, &raw mut ticket) } {
            0 => Ok(Ticket::new(ticket)),
            _ => Err(InvalidationError::Failed),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.polls = self.polls.saturating_add(1);
        // SAFETY: the ticket came from `submit`.
        match unsafe { (self.poll)(self.context, ticket.get()) } {
            1 => Ok(true),
            0 if self.limit != 0 && self.polls >= self.limit => Err(InvalidationError::TimedOut),
            0 => Ok(false),
            _ => Err(InvalidationError::Failed),
        }
    }
}
