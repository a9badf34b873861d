//! I/O page tables: the second stage of VT-d.

use ringfence_pgtable::{Levels, MapRequest, SecondStage, Table as FormatTable, WalkErrorKind};
use ringfence_types::{
    DomainId, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, WholeDomain,
};

use crate::boundary::{Output, boundary, into_handle, object, sized, take};
use crate::iova::attested;
use crate::memory::CallerMemory;
use crate::{Memory, Status};

/// A VT-d second-stage table in the caller's memory. Threads may map, unmap and walk at once, but
/// no two on the same range.
pub struct Table {
    memory: CallerMemory,
    table: FormatTable<SecondStage>,
}

/// The result of a walk.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Translation {
    /// The physical address of the byte.
    pub phys: u64,
    /// The size of the page that maps it, in bytes.
    pub page_bytes: u64,
    /// The permissions of the device: `RINGFENCE_READ`, `RINGFENCE_WRITE`, or both.
    pub permissions: u32,
    /// The library stores 0.
    pub reserved: u32,
}

/// The domain of all proofs: a table serves one domain, and its C functions do not name it.
const DOMAIN: DomainId = DomainId::new(0);

/// Returns the format with `levels` levels.
pub(crate) fn format(levels: u32) -> Result<SecondStage, Status> {
    Ok(SecondStage::new(match levels {
        3 => Levels::Three,
        4 => Levels::Four,
        5 => Levels::Five,
        _ => return Err(Status::InvalidArgument),
    }))
}

/// Returns the whole pages of a range of bytes.
fn whole_pages(iova: u64, bytes: u64) -> Result<PfnRange, Status> {
    let page = PageSize::Size4K;
    if (iova | bytes) & (page.bytes() - 1) != 0 {
        return Err(Status::Misaligned);
    }
    let pages = PfnRange::new(Pfn::containing(Iova::new(iova)), bytes >> page.shift());
    pages.ok_or(Status::InvalidArgument)
}

/// Returns the permissions of exactly the bits in `bits`.
pub(crate) fn permissions(bits: u32) -> Result<Permissions, Status> {
    let known = Permissions::from_bits(bits.into()).filter(|set| set.bits() == u64::from(bits));
    known.ok_or(Status::InvalidArgument)
}

/// Creates an empty table of 3, 4 or 5 levels, which translate 39, 48 or 57 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_create(
    memory: *const Memory,
    levels: u32,
    table: *mut *mut Table,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (memory, out) = unsafe { (sized(memory)?, Output::new(table)?) };
        let memory = memory.check()?;
        let format = format(levels)?;
        let table = FormatTable::new(format, DOMAIN, memory.coherency(), &memory, &memory)?;
        out.set(into_handle(Table { memory, table }));
        Ok(Status::Ok)
    })
}

/// Destroys a table, returns its frames, and sets `*table` to NULL. The caller attests that no
/// device walks the table and that no cache holds an entry of it: the context entries are cleared
/// and the domain was flushed. Does nothing if `*table` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_destroy(table: *mut *mut Table) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let Some(taken) = unsafe { take(table) }? else {
            return Ok(Status::Ok);
        };
        let Table { memory, table } = *taken;
        let proof = attested(WholeDomain(DOMAIN))?;
        match table.destroy(&memory, &memory, &proof) {
            Ok(()) => Ok(Status::Ok),
            Err(_) => Err(Status::Internal),
        }
    })
}

/// Stores the physical address of the root in `*root`, for a context entry.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_root(table: *const Table, root: *mut u64) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (table, out) = unsafe { (object(table)?, Output::new(root)?) };
        out.set(table.table.root().get());
        Ok(Status::Ok)
    })
}

/// Maps `bytes` bytes from `iova` on to `phys`, in whole pages of 4 KiB. `permissions` is
/// `RINGFENCE_READ`, `RINGFENCE_WRITE`, or both. After an error the table is unchanged.
///
/// After a map the program owes a unit in caching mode an invalidation of the range, and a unit
/// with a write buffer a flush.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_map(
    table: *const Table,
    iova: u64,
    phys: u64,
    bytes: u64,
    permissions: u32,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let table = unsafe { object(table) }?;
        let request = MapRequest {
            iova: Iova::new(iova),
            pa: PhysAddr::new(phys),
            pages: whole_pages(iova, bytes)?.pages(),
            permissions: self::permissions(permissions)?,
        };
        table.table.map(&table.memory, &table.memory, request)?;
        Ok(Status::Ok)
    })
}

/// Clears the entries of `bytes` bytes from `iova` on. All pages must be mapped. The device still
/// reaches the memory through the IOTLB: the caller invalidates the range before it uses the
/// memory or the addresses again. No table page is freed, so an invalidation of leaves is enough.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_unmap(
    table: *const Table,
    iova: u64,
    bytes: u64,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let table = unsafe { object(table) }?;
        // The caller takes over the obligation to invalidate.
        let (_unmapped, _levels) = table
            .table
            .unmap(&table.memory, whole_pages(iova, bytes)?)?;
        Ok(Status::Ok)
    })
}

/// Walks the table as the hardware does, and stores the translation of `iova`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_walk(
    table: *const Table,
    iova: u64,
    translation: *mut Translation,
) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (table, out) = unsafe { (object(table)?, Output::new(translation)?) };
        let iova = Iova::new(iova);
        let leaf = table.table.walk(&table.memory, iova);
        let leaf = leaf.map_err(|error| match error.kind {
            WalkErrorKind::BeyondWidth => Status::BeyondWidth,
            WalkErrorKind::NotPresent => Status::NotMapped,
            WalkErrorKind::NoPermission => Status::Fault,
            WalkErrorKind::ReservedBit => Status::Corrupt,
            WalkErrorKind::TableAccess => Status::TableMemory,
        })?;
        out.set(Translation {
            phys: leaf.translate(iova).get(),
            page_bytes: leaf.page.bytes(),
            permissions: leaf.permissions.bits() as u32,
            reserved: 0,
        });
        Ok(Status::Ok)
    })
}

/// Stores the bytes of all table pages in `*bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringfence_table_bytes(table: *const Table, bytes: *mut u64) -> Status {
    boundary(|| {
        // SAFETY: the contract of all functions.
        let (table, out) = unsafe { (object(table)?, Output::new(bytes)?) };
        out.set(table.table.table_bytes());
        Ok(Status::Ok)
    })
}
