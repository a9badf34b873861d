//! The C interface of the IOVA allocators.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_iova::{
    AllocRequest, Bitmap, CachedTree, Capacity, Eiovar, FreeBsdTree, IovaAllocator, LinuxRcache,
    Locked, MagazineLimits, Magazines,
};
use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn, PfnRange,
    Ticket, Unmapped, WholeDomain,
};

use crate::Status;
use crate::boundary::{
    Output, SizeFirst, boundary, exclusive, into_handle, numbered, object, sized, take,
};

/// The algorithm of an allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum IovaKind {
    /// Per-CPU magazines with a shared depot: the default of Ringfence.
    Magazines = 0,
    /// The allocator of current Linux: per-CPU caches in front of a red-black tree.
    LinuxRcache = 1,
    /// The allocator of Linux 3.4: a red-black tree with a cached node.
    CachedTree = 2,
    /// EIOVAR: freelists in front of the tree of Linux 3.4.
    Eiovar = 3,
    /// FreeBSD's tree with the largest gap of each subtree.
    FreebsdTree = 4,
    /// A bitmap that reuses addresses only after a flush of the domain.
    Bitmap = 5,
}

impl TryFrom<u32> for IovaKind {
    type Error = Status;

    fn try_from(number: u32) -> Result<Self, Status> {
        let all = [
            Self::Magazines,
            Self::LinuxRcache,
            Self::CachedTree,
            Self::Eiovar,
            Self::FreebsdTree,
            Self::Bitmap,
        ];
        numbered(all, |kind| kind as u32, number)
    }
}

/// A flag of `ringfence_iova_create`: the allocator trusts the ranges that its caller frees. A free
/// of another range makes it allocate addresses that are in use. Without the flag, the allocator
/// records each allocated range, and rejects such a free.
pub const RINGFENCE_IOVA_TRUSTED: u32 = 1;

/// An allocator of I/O virtual addresses. Threads share it through handles of their own.
pub struct IovaSpace(Arc<dyn SpaceOps>);

/// The handle of one CPU or thread to an allocator.
pub struct IovaCpu(Box<dyn CpuOps>);

/// The state of an allocator.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct IovaStats {
    /// The size of this structure. The caller sets it.
    pub size: usize,
    /// Bytes of the allocator's own records, without handles.
    pub footprint: u64,
    /// Number of allocated ranges; UINT64_MAX if the allocator trusts its caller.
    pub ranges: u64,
    /// Number of allocated pages; UINT64_MAX if the allocator trusts its caller.
    pub pages: u64,
}

// SAFETY: the first field is the size.
unsafe impl SizeFirst for IovaStats {}

/// The allocated ranges: the first page of each, and its number of pages.
type AllocatedRanges = Option<Mutex<BTreeMap<u64, u64>>>;

struct SharedAllocator<A> {
    allocator: A,
    allocated: AllocatedRanges,
}

struct CpuHandle<A: IovaAllocator> {
    shared: Arc<SharedAllocator<A>>,
    cpu: A::PerCpu,
}

trait SpaceOps: Send + Sync {
    fn cpu(self: Arc<Self>) -> Box<dyn CpuOps>;
    fn footprint(&self) -> usize;
    fn allocated(&self) -> &AllocatedRanges;
}

trait CpuOps: Send {
    fn alloc(&mut self, request: &AllocRequest) -> Result<u64, Status>;
    fn free(&mut self, range: PfnRange) -> Result<(), Status>;
    fn flushed(&mut self) -> Result<(), Status>;
}

impl<A: IovaAllocator<PerCpu: Send + 'static> + Send + Sync + 'static> SpaceOps
    for SharedAllocator<A>
{
    fn cpu(self: Arc<Self>) -> Box<dyn CpuOps> {
        let cpu = self.allocator.per_cpu();
        Box::new(CpuHandle { shared: self, cpu })
    }

    fn footprint(&self) -> usize {
        self.allocator.footprint()
    }

    fn allocated(&self) -> &AllocatedRanges {
        &self.allocated
    }
}

impl<A: IovaAllocator<PerCpu: Send> + Send + Sync> CpuOps for CpuHandle<A> {
    #[inline]
    fn alloc(&mut self, request: &AllocRequest) -> Result<u64, Status> {
        let found = self.shared.allocator.alloc(&mut self.cpu, request)?;
        let first = found.range.lo().get();
        if let Some(allocated) = &self.shared.allocated {
            let mut allocated = allocated.lock().unwrap_or_else(PoisonError::into_inner);
            allocated.insert(first, request.pages);
        }
        Ok(first)
    }

    #[inline]
    fn free(&mut self, range: PfnRange) -> Result<(), Status> {
        if let Some(allocated) = &self.shared.allocated {
            let (first, pages) = (range.lo().get(), range.pages());
            let mut allocated = allocated.lock().unwrap_or_else(PoisonError::into_inner);
            if allocated.get(&first) != Some(&pages) {
                return Err(Status::NotAllocated);
            }
            allocated.remove(&first);
        }
        let flushed = attested(Unmapped::attest_cleared(DOMAIN, range))?;
        if self
            .shared
            .allocator
            .free(&mut self.cpu, A::FreeProof::from(flushed))
        {
            Ok(())
        } else {
            Err(Status::NotAllocated)
        }
    }

    fn flushed(&mut self) -> Result<(), Status> {
        let proof = attested(WholeDomain(DOMAIN))?;
        self.shared.allocator.flushed(&mut self.cpu, proof);
        Ok(())
    }
}

impl<A: IovaAllocator> Drop for CpuHandle<A> {
    fn drop(&mut self) {
        self.shared.allocator.drain(&mut self.cpu);
    }
}

/// The domain of all proofs: an allocator serves one domain, and its C functions do not name it.
const DOMAIN: DomainId = DomainId::new(0);

/// Stands for an invalidation that the C caller has completed before its call.
struct CallerInvalidation;

impl Invalidator for CallerInvalidation {
    #[inline]
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    #[inline]
    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// Returns the proof that the contract of the calling C function attests.
#[inline]
pub(crate) fn attested<B: ringfence_types::Batch>(batch: B) -> Result<Flushed<B>, Status> {
    let unit = &mut CallerInvalidation;
    let pending = Pending::submit(unit, Invalidation::Global, batch);
    let pending = pending.map_err(|_| Status::Internal)?;
    pending.wait(unit).map_err(|_| Status::Internal)
}

/// Returns the range of `pages` pages from `first`.
#[inline]
fn range(first: u64, pages: u64) -> Result<PfnRange, Status> {
    if first > Pfn::MAX.get() {
        return Err(Status::InvalidArgument);
    }
    PfnRange::new(Pfn::new(first), pages).ok_or(Status::InvalidArgument)
}

fn create(kind: u32, space: PfnRange, flags: u32) -> Result<IovaSpace, Status> {
    fn shared<A>(allocator: A, flags: u32) -> IovaSpace
    where
        A: IovaAllocator<PerCpu: Send + 'static> + Send + Sync + 'static,
    {
        let checked = flags & RINGFENCE_IOVA_TRUSTED == 0;
        let allocated = checked.then(|| Mutex::new(BTreeMap::new()));
        IovaSpace(Arc::new(SharedAllocator {
            allocator,
            allocated,
        }))
    }
    let tree = || CachedTree::new(space);
    Ok(match IovaKind::try_from(kind)? {
        IovaKind::Magazines => shared(
            Magazines::new(space, MagazineLimits::DEFAULT, Mutex::new)?,
            flags,
        ),
        IovaKind::LinuxRcache => shared(LinuxRcache::new(tree(), Mutex::new), flags),
        IovaKind::CachedTree => shared(Locked::new(tree(), Mutex::new), flags),
        IovaKind::Eiovar => shared(
            Locked::new(Eiovar::new(tree(), Capacity::Unbounded), Mutex::new),
            flags,
        ),
        IovaKind::FreebsdTree => shared(Locked::new(FreeBsdTree::new(space), Mutex::new), flags),
        IovaKind::Bitmap => shared(Bitmap::new(space, Mutex::new)?, flags),
    })
}

/// Creates an allocator of the pages from `first_page` to `last_page`, both included. A page has 4
/// KiB. `kind` is an `enum ringfence_iova_kind`, `flags` is 0 or `RINGFENCE_IOVA_TRUSTED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_create(
    kind: u32,
    first_page: u64,
    last_page: u64,
    flags: u32,
    space: *mut *mut IovaSpace,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let out = unsafe { Output::new(space) }?;
        if flags & !RINGFENCE_IOVA_TRUSTED != 0 || last_page > Pfn::MAX.get() {
            return Err(Status::InvalidArgument);
        }
        let pages = last_page.checked_sub(first_page);
        let pages = pages.ok_or(Status::InvalidArgument)?.saturating_add(1);
        let space = create(kind, range(first_page, pages)?, flags)?;
        out.set(into_handle(space));
        Ok(Status::Ok)
    })
}

/// Destroys an allocator and sets `*space` to NULL. Handles keep the allocator alive until they are
/// destroyed too. Does nothing if `*space` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_destroy(space: *mut *mut IovaSpace) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        drop(unsafe { take(space) }?);
        Ok(Status::Ok)
    })
}

/// Stores the state of an allocator in `*stats`, whose field `size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_stats(
    space: *const IovaSpace,
    stats: *mut IovaStats,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let space = unsafe { object(space) }?;
        // SAFETY: the contract of all functions. The reference to the checked size ends here.
        unsafe { sized(stats.cast_const()) }?;
        // SAFETY: the contract of all functions.
        let stats = unsafe { exclusive(stats) }?;
        stats.footprint = space.0.footprint() as u64;
        (stats.ranges, stats.pages) = match space.0.allocated() {
            Some(allocated) => {
                let allocated = allocated.lock().unwrap_or_else(PoisonError::into_inner);
                (allocated.len() as u64, allocated.values().sum())
            }
            None => (u64::MAX, u64::MAX),
        };
        Ok(Status::Ok)
    })
}

/// Creates the handle of one CPU or thread. One thread at a time may use a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_cpu_create(
    space: *const IovaSpace,
    cpu: *mut *mut IovaCpu,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (space, out) = unsafe { (object(space)?, Output::new(cpu)?) };
        out.set(into_handle(IovaCpu(Arc::clone(&space.0).cpu())));
        Ok(Status::Ok)
    })
}

/// Destroys a handle and sets `*cpu` to NULL. The addresses in its caches become free for the other
/// handles; allocated ranges stay allocated. Does nothing if `*cpu` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_cpu_destroy(cpu: *mut *mut IovaCpu) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        drop(unsafe { take(cpu) }?);
        Ok(Status::Ok)
    })
}

/// Allocates `pages` pages, none above `limit_page`, and stores the first in `*first_page`. It is a
/// multiple of 2^`align_order`. Returns `RINGFENCE_STATUS_NEEDS_FLUSH` if the domain must be
/// flushed first: see `ringfence_iova_flushed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_alloc(
    cpu: *mut IovaCpu,
    pages: u64,
    align_order: u32,
    limit_page: u64,
    first_page: *mut u64,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions. One thread at a time uses a handle.
        let (cpu, out) = unsafe { (exclusive(cpu)?, Output::new(first_page)?) };
        let limit = Pfn::new(limit_page.min(Pfn::MAX.get()));
        let order = u8::try_from(align_order).map_err(|_| Status::InvalidArgument)?;
        let request = AllocRequest {
            align_order: order,
            ..AllocRequest::new(pages, limit)
        };
        out.set(cpu.0.alloc(&request)?);
        Ok(Status::Ok)
    })
}

/// Frees a range exactly as it was allocated. The caller attests that no table maps the range and
/// that no translation cache holds an entry of it: its invalidation has completed. For the bitmap,
/// the invalidation may follow: see `ringfence_iova_flushed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_free(
    cpu: *mut IovaCpu,
    first_page: u64,
    pages: u64,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions. One thread at a time uses a handle.
        let cpu = unsafe { exclusive(cpu) }?;
        cpu.0.free(range(first_page, pages)?)?;
        Ok(Status::Ok)
    })
}

/// Permits the reuse of the pages that were freed before the last `RINGFENCE_STATUS_NEEDS_FLUSH` of
/// this handle. The caller attests that it has flushed the whole domain after that result. The call
/// has no effect if the handle had no such result, or if another handle began a later flush. Pages
/// freed while another flush is pending wait for the next one. Allocators other than the bitmap
/// ignore the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_iova_flushed(cpu: *mut IovaCpu) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions. One thread at a time uses a handle.
        unsafe { exclusive(cpu) }?.0.flushed()?;
        Ok(Status::Ok)
    })
}
