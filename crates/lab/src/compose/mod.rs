//! Modes that a user composes: `alloc=magazine,table=radix,flush=burst`.

mod axes;
mod suggest;

pub use axes::{Axis, ParseAxisError};
pub use suggest::hint;

use ringfence_types::PageSize;

use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};

/// The reason why a composition is not a mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ComposeError {
    /// A part has no `axis=choice` form.
    #[error(
        "{0:?} has no AXIS=CHOICE form; write alloc=...,table=...,flush=...{hint}",
        hint = named_mode_hint(.0)
    )]
    NotKeyValue(String),
    /// The key is not one of the four axes.
    #[error("no axis is named {0:?}; the axes are alloc, table, flush, owner")]
    NoSuchAxis(String),
    /// The composition gives an axis twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// The composition lacks an axis.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// The axis has no such choice.
    #[error(transparent)]
    NoSuchValue(#[from] ParseAxisError),
    /// The choices do not fit together.
    #[error("{mode} is not possible: {reason}")]
    Unsupported {
        /// The composition, as the user wrote it.
        mode: String,
        /// The reason, as a sentence.
        reason: &'static str,
    },
}

/// Returns the advice for a part that is the name of a mode.
fn named_mode_hint(part: &str) -> String {
    match Mode::find(part) {
        Some(_) => format!(", or --modes {part} for the mode of that name"),
        None => String::new(),
    }
}

fn set<T: Axis>(slot: &mut Option<T>, text: &str) -> Result<(), ComposeError> {
    if slot.is_some() {
        return Err(ComposeError::Twice(T::KEY));
    }
    *slot = Some(T::parse(text)?);
    Ok(())
}

/// Returns the mode that `row` composes. If a named mode has the same choices, the result is that
/// mode, with its name.
///
/// # Errors
/// See [`ComposeError`].
pub fn compose(row: &str) -> Result<Mode, ComposeError> {
    let (mut alloc, mut table, mut flush, mut owner) = (None, None, None, None);
    for part in row.split(',') {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| ComposeError::NotKeyValue(part.to_owned()))?;
        match key.trim() {
            Alloc::KEY => set::<Alloc>(&mut alloc, value.trim())?,
            TableKind::KEY => set::<TableKind>(&mut table, value.trim())?,
            FlushKind::KEY => set::<FlushKind>(&mut flush, value.trim())?,
            Owner::KEY => set::<Owner>(&mut owner, value.trim())?,
            other => return Err(ComposeError::NoSuchAxis(other.to_owned())),
        }
    }
    let alloc = alloc.ok_or(ComposeError::Missing(Alloc::KEY))?;
    let table = table.ok_or(ComposeError::Missing(TableKind::KEY))?;
    let flush = flush.ok_or(ComposeError::Missing(FlushKind::KEY))?;
    let owner = owner.unwrap_or(Owner::Kernel);
    if let Some(reason) =
        incompatible(alloc, table, flush).or(unsupported_owner(alloc, table, flush, owner))
    {
        return Err(ComposeError::Unsupported {
            mode: row.to_owned(),
            reason,
        });
    }
    let named = Mode::named().into_iter().find(|mode| {
        (mode.alloc, mode.table, mode.flush, mode.owner) == (alloc, table, flush, owner)
    });
    Ok(named.unwrap_or_else(|| Mode {
        name: match owner {
            Owner::Kernel => format!("{}/{}/{}", alloc.name(), table.name(), flush.name()),
            owner => {
                let (alloc, table) = (alloc.name(), table.name());
                format!("{alloc}/{table}/{}/{}", flush.name(), owner.name())
            }
        },
        alloc,
        table,
        flush,
        owner,
        page_size: PageSize::Size4K,
        about: "composed on the command line",
    }))
}

/// Returns the reason why these choices do not fit together; `None` if they do.
fn incompatible(alloc: Alloc, table: TableKind, flush: FlushKind) -> Option<&'static str> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    let fixed = matches!(
        table,
        T::None | T::PassThrough | T::StaticRadix | T::StaticFlat
    );
    let ring_alloc = matches!(alloc, A::RingTail | A::RingFree | A::RingTailAsPublished);
    let as_published_table = matches!(table, T::RingAsPublished | T::RingNonCoherentAsPublished);
    let ring_table = as_published_table || matches!(table, T::Ring | T::RingNonCoherent);
    if ring_alloc || ring_table || flush == F::BurstAsPublished {
        let as_published = [
            alloc == A::RingTailAsPublished,
            as_published_table,
            flush == F::BurstAsPublished,
        ];
        return match (ring_alloc && ring_table, as_published, flush) {
            (false, ..) => Some(
                "an address in a ring is the number of its slot; a ring alloc needs a ring table, \
                and a ring table a ring alloc",
            ),
            (_, [true, true, true], _) | (_, [false, false, false], F::PerUnmap | F::Burst) => None,
            (_, [false, false, false], _) => Some(
                "the ring would run out of slots before the flush; use flush=burst or per-unmap",
            ),
            _ => Some(
                "the as-published choices of rIOMMU belong together; use -paper for alloc, table \
                and flush, or for none of them",
            ),
        };
    }
    match (alloc, flush) {
        (_, F::DescriptorAsPublished) if (alloc, table) == (A::Contiguous, T::Radix) => None,
        (_, F::DescriptorAsPublished) => Some(
            "the policy as published unmaps whole descriptors; use alloc=contiguous,table=radix",
        ),
        (A::ShadowHybrid | A::ShadowOrMap, F::PerUnmap | F::Burst | F::TransmitBatch)
            if table == T::CachedRadix =>
        {
            None
        }
        (A::ShadowHybrid | A::ShadowOrMap, _) => Some(
            "the pages of large buffers must be out of reach before the driver has them back, in \
            one kind of table; use table=cached-radix,flush=burst, transmit-batch or per-unmap",
        ),
        (A::Shadow | A::Pool, F::PerUnmap) if table == T::Radix => None,
        (A::Shadow | A::Pool, _) => Some(
            "the buffers of a pool stay mapped, so nothing is left to flush, in one kind of table; \
            use table=radix,flush=per-unmap",
        ),
        (A::Identity, _) if !fixed => Some(
            "two buffers on one page would share a table entry, because the address is the \
            physical one; use table=none, pass-through or static-radix",
        ),
        (A::Identity, F::Never) => None,
        (A::Identity, _) => {
            Some("nothing is unmapped, so there is nothing to invalidate; use flush=never")
        }
        _ if fixed => Some(
            "the table never changes, so it has no entry for an allocated address; use \
            alloc=identity",
        ),
        (_, F::Never) => {
            Some("no address could be reused, because its old translation stays valid")
        }
        (_, flush)
            if flush != F::PerUnmap
                && matches!(table, T::RadixReclaim | T::RadixReclaimAsPublished) =>
        {
            Some(
                "a table page would be freed while the walk caches still point to it; use \
                flush=per-unmap",
            )
        }
        (A::TableBitmap, _) if table != T::Flat => {
            Some("its bits are the entries of a flat table; use table=flat, or alloc=bitmap")
        }
        (A::Bitmap | A::BitmapAsPublished | A::TableBitmap, F::PerWrap) => None,
        (_, F::PerWrap) => Some(
            "only a bitmap allocates every address once before it reuses one; use alloc=bitmap",
        ),
        (A::BitmapAsPublished, _) => {
            Some("bitmap-paper differs from bitmap only with flush=per-wrap; use alloc=bitmap")
        }
        _ => None,
    }
}

/// Returns the reason why the owner does not fit the other choices; `None` if it does.
fn unsupported_owner(
    alloc: Alloc,
    table: TableKind,
    flush: FlushKind,
    owner: Owner,
) -> Option<&'static str> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    match (owner, alloc, table, flush) {
        (_, _, _, F::PerCycleAsPublished) if !owner.is_pviommu() => Some(
            "only the para-virtual IOMMU has the cache as published; use owner=pviommu or \
            pviommu-hopt",
        ),
        (_, alloc, ..) if flush.has_cache() && alloc != A::LinuxRcache => {
            Some("a cache of mappings works only with Linux's allocator; use alloc=linux-rcache")
        }
        (_, _, table, _) if flush.has_cache() && !matches!(table, T::Radix | T::Flat) => {
            Some("a cache of mappings works only with these tables; use table=radix or flat")
        }
        (_, _, _, F::Descriptor | F::DescriptorAsPublished | F::TransmitBatch)
            if owner != Owner::Kernel =>
        {
            Some("the kernel that owns the descriptors maps them; use owner=kernel")
        }
        (
            Owner::Kernel | Owner::VirtioIommu | Owner::Pviommu | Owner::PviommuHopt,
            A::Shadow,
            ..,
        )
        | (Owner::Kernel, A::Pool | A::ShadowHybrid | A::ShadowOrMap, ..) => None,
        (_, A::Pool | A::ShadowHybrid | A::ShadowOrMap, ..) => {
            Some("the kernel that owns the driver's buffers has the pool; use owner=kernel")
        }
        (_, A::Shadow, ..) => Some(
            "no pool of shadow buffers is built in with this owner; use owner=kernel, \
            virtio-iommu or pviommu",
        ),
        (Owner::VirtioIommuLazy, _, _, flush) if !matches!(flush, F::PerCpuQueue | F::Deferred) => {
            Some(
                "a domain in lazy mode invalidates at the flushes of a queue; use \
                flush=per-cpu-queue or deferred, or owner=virtio-iommu",
            )
        }
        (Owner::Sidecore, _, T::Radix | T::CachedRadix | T::Flat, F::PerUnmap | F::Async) => None,
        (Owner::Sidecore, _, _, F::PerUnmap | F::Async) => {
            Some("the sidecore needs a table to change; use table=radix, cached-radix or flat")
        }
        (Owner::Sidecore, ..) => Some(
            "the sidecore executes single unmaps in order; use flush=per-unmap, which waits for \
            them, or flush=async",
        ),
        (_, _, _, F::Async) => {
            Some("flush=async needs another core, which executes unmaps; use owner=sidecore")
        }
        _ if owner.is_xen() => unsupported_by_xen(alloc, table, flush, owner),
        (_, _, T::StaticFlat, _) => Some(
            "only Xen fills Calgary's table with all of a guest; use owner=xen, or \
            table=static-radix",
        ),
        (Owner::Kernel, ..) | (Owner::Host, A::Identity, T::StaticRadix, _) => None,
        (Owner::Host, ..) => Some(
            "a host that receives no requests can only map all memory once; use \
            alloc=identity,table=static-radix",
        ),
        (Owner::Pviommu | Owner::PviommuHopt, _, _, F::Deferred | F::PerCpuQueue) => Some(
            "the guest waits for its unmaps at every map and unmap, so a deferred flush would \
            defer nothing; use flush=per-unmap or burst",
        ),
        (_, _, T::Radix, F::PerWrap) => Some(
            "the host invalidates at each unmap request, so nothing is left to flush at a wrap; \
            use flush=per-unmap or per-cpu-queue",
        ),
        (_, _, T::Radix, _) => None,
        (_, A::Identity, ..) => Some(
            "nothing is mapped, so the guest has nothing to request; use an allocator and \
            table=radix",
        ),
        _ => Some("the host owns the table, and it is a radix table; use table=radix"),
    }
}

/// Like [`unsupported_owner`], for owners that are Xen.
fn unsupported_by_xen(
    alloc: Alloc,
    table: TableKind,
    flush: FlushKind,
    owner: Owner,
) -> Option<&'static str> {
    use {Alloc as A, FlushKind as F, Owner as O, TableKind as T};
    match (alloc, table, flush, owner) {
        (A::Identity, T::StaticFlat, F::Never, O::Xen) => None,
        (A::Identity, T::StaticFlat, ..) => {
            Some("Xen fills the table once, so it needs no multicalls or grants; use owner=xen")
        }
        (A::TableBitmap, ..) => {
            Some("the guest cannot read the table, which Xen owns; use alloc=bitmap")
        }
        (_, T::Flat, F::PerUnmap | F::Burst, _) => None,
        (_, T::Flat, _, O::XenGrant) => Some(
            "the hypercall that unmaps a grant flushes, so no flush can be deferred; use \
            flush=per-unmap or burst",
        ),
        (_, T::Flat, ..) => None,
        _ => Some("Xen owns a Calgary unit, which looks up a flat table; use table=flat"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_named_modes_keep_their_names() {
        for mode in Mode::named() {
            let row = format!(
                "alloc={},table={},flush={},owner={}",
                mode.alloc.name(),
                mode.table.name(),
                mode.flush.name(),
                mode.owner.name()
            );
            assert_eq!(compose(&row).as_ref(), Ok(&mode), "{row}");
        }
    }

    #[test]
    fn other_rows_are_named_after_their_answers() {
        let mode = compose("flush=burst, alloc=eiovar-8 ,table=radix").unwrap();
        assert_eq!(mode.name, "eiovar-8/radix/burst");
        let mode = compose("flush=burst,alloc=eiovar-8,table=radix,owner=virtio-iommu").unwrap();
        assert_eq!(mode.name, "eiovar-8/radix/burst/virtio-iommu");
    }

    #[test]
    fn invalid_combinations_are_rejected_with_a_reason() {
        use ComposeError as E;
        let incompatible = [
            "alloc=identity,table=radix,flush=never",
            "alloc=identity,table=none,flush=per-unmap",
            "alloc=magazine,table=none,flush=per-unmap",
            "alloc=magazine,table=radix,flush=never",
            "alloc=magazine,table=radix,flush=per-wrap",
            "alloc=bitmap-paper,table=radix,flush=deferred",
            "alloc=bitmap,table=radix-reclaim,flush=per-wrap",
            "alloc=magazine,table=radix-reclaim-paper,flush=burst",
            "alloc=table-bitmap,table=radix,flush=per-unmap",
            "alloc=identity,table=flat,flush=never",
            "alloc=bitmap-paper,table=flat,flush=burst",
            "alloc=shadow,table=radix,flush=burst",
            "alloc=pool,table=radix,flush=never",
            "alloc=pool,table=radix,flush=per-unmap,owner=xen",
            "alloc=shadow,table=flat,flush=per-unmap",
            "alloc=shadow,table=radix,flush=per-unmap,owner=emulated",
            "alloc=shadow-hybrid,table=cached-radix,flush=per-cpu-queue",
            "alloc=shadow-hybrid,table=radix,flush=burst",
            "alloc=shadow-or-map,table=radix,flush=transmit-batch",
            "alloc=shadow-or-map,table=cached-radix,flush=descriptor",
            "alloc=magazine,table=radix,flush=transmit-batch,owner=virtio-iommu",
            "alloc=shadow-hybrid,table=cached-radix,flush=burst,owner=sidecore",
            "alloc=ring-tail,table=radix,flush=burst",
            "alloc=magazine,table=ring,flush=burst",
            "alloc=identity,table=ring,flush=never",
            "alloc=ring-free,table=ring,flush=deferred",
            "alloc=ring-tail-paper,table=ring,flush=burst",
            "alloc=ring-tail,table=ring,flush=burst-paper",
            "alloc=ring-tail,table=ring-paper,flush=burst",
            "alloc=magazine,table=radix,flush=burst-paper",
            "alloc=magazine,table=radix,flush=descriptor-paper",
            "alloc=contiguous,table=radix,flush=descriptor,owner=virtio-iommu",
            "alloc=magazine,table=radix,flush=burst,owner=host",
            "alloc=identity,table=none,flush=never,owner=host",
            "alloc=identity,table=static-radix,flush=never,owner=virtio-iommu",
            "alloc=bitmap,table=radix,flush=per-wrap,owner=virtio-iommu",
            "alloc=magazine,table=cached-radix,flush=per-unmap,owner=virtio-iommu",
            "alloc=ring-tail,table=ring,flush=burst,owner=virtio-iommu",
            "alloc=magazine,table=radix,flush=per-cpu-queue,owner=pviommu",
            "alloc=identity,table=none,flush=never,owner=pviommu",
            "alloc=linux-rcache,table=radix,flush=deferred,owner=pviommu-hopt",
            "alloc=linux-rcache,table=radix,flush=per-cycle-paper",
            "alloc=magazine,table=radix,flush=optimistic",
            "alloc=magazine,table=radix,flush=async",
            "alloc=magazine,table=radix,flush=deferred,owner=sidecore",
            "alloc=linux-rcache,table=radix,flush=last-user,owner=sidecore",
            "alloc=linux-rcache,table=cached-radix,flush=last-user",
            "alloc=identity,table=none,flush=never-free",
            "alloc=linux-rcache,table=flat,flush=map-cache,owner=pviommu",
            "alloc=identity,table=static-flat,flush=never",
            "alloc=identity,table=static-flat,flush=never,owner=xen-grant",
            "alloc=bitmap,table=radix,flush=per-unmap,owner=xen",
            "alloc=table-bitmap,table=flat,flush=per-unmap,owner=xen",
            "alloc=bitmap,table=flat,flush=per-wrap,owner=xen-grant",
            "alloc=linux-rcache,table=radix,flush=per-cycle-paper,owner=virtio-iommu",
            "alloc=linux-rcache,table=radix,flush=per-unmap,owner=virtio-iommu-lazy",
            "alloc=linux-rcache,table=radix,flush=map-cache,owner=virtio-iommu-lazy",
            "alloc=shadow,table=radix,flush=per-unmap,owner=virtio-iommu-lazy",
        ];
        for row in incompatible {
            assert!(matches!(compose(row), Err(E::Unsupported { .. })), "{row}");
        }
        let cases = [
            ("", E::NotKeyValue(String::new())),
            ("alloc", E::NotKeyValue("alloc".into())),
            ("speed=high", E::NoSuchAxis("speed".into())),
            ("alloc=bitmap,alloc=bitmap", E::Twice("alloc")),
            ("alloc=bitmap,table=radix", E::Missing("flush")),
        ];
        for (row, expected) in cases {
            assert_eq!(compose(row), Err(expected), "{row}");
        }
        assert!(matches!(compose("flush=often"), Err(E::NoSuchValue(_))));
    }
}
