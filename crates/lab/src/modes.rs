//! The table of named modes: each mode is one choice for each of the four axes.

use std::fmt;

use ringfence_types::PageSize;

/// Axis 1: the source of the I/O virtual address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alloc {
    /// The IOVA equals the physical address.
    Identity,
    /// Linux 3.4: red-black tree with a cached node.
    CachedRbTree,
    /// EIOVAR: freelists in front of the tree; `None` is unbounded.
    Eiovar(Option<usize>),
    /// Fujita and Moriai: next-fit bitmap.
    Bitmap,
    /// The bitmap as published: addresses freed ahead of the pointer are reused before the flush.
    BitmapAsPublished,
    /// The bitmap whose bits are the entries of the flat table.
    TableBitmap,
    /// FreeBSD: augmented tree.
    FreeBsd,
    /// FreeBSD 14: the augmented tree with an unused page between ranges.
    FreeBsd14,
    /// Linux 6.12: per-CPU magazines for up to 32 pages, in front of the tree.
    LinuxRcache,
    /// [`LinuxRcache`](Self::LinuxRcache) in front of the maple tree of June 2026.
    LinuxMaple,
    /// Ringfence: per-CPU magazines for every size.
    Magazine,
    /// Blocks of 64 contiguous pages for each CPU and direction, in front of
    /// [`Magazine`](Self::Magazine) (F&S).
    Contiguous,
    /// A pool of shadow buffers that stay mapped, in front of [`Magazine`](Self::Magazine): a
    /// mapping is a copy (Markuze et al.).
    Shadow,
    /// [`Shadow`](Self::Shadow), whose slots the driver uses itself: its buffers come from a pool
    /// that stays mapped (Markuze et al.).
    Pool,
    /// [`Shadow`](Self::Shadow) for small buffers. Large ones are mapped, except for the parts of
    /// their first and last page, which are copied (Markuze et al.).
    ShadowHybrid,
    /// [`Shadow`](Self::Shadow) for small buffers. Large ones are mapped with all of their pages.
    ShadowOrMap,
    /// rIOMMU: the slot at the tail of the ring; the map waits until that slot is free.
    RingTail,
    /// Ringfence: the next free slot of the ring, searched from the tail.
    RingFree,
    /// The tail as published: the map overwrites a live entry.
    RingTailAsPublished,
}

impl Alloc {
    /// Returns true if the allocator looks ranges up in a separate index.
    pub fn has_lookup(self) -> bool {
        matches!(
            self,
            Self::CachedRbTree | Self::Eiovar(_) | Self::FreeBsd | Self::FreeBsd14
        )
    }

    /// Returns true if the allocator searches on from its last address (next fit), so that it
    /// returns to a freed address only after it has passed the whole space.
    pub fn is_next_fit(self) -> bool {
        matches!(
            self,
            Self::Bitmap | Self::BitmapAsPublished | Self::TableBitmap
        )
    }
}

/// Axis 2: the structure that the hardware looks up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableKind {
    /// No table: the IOMMU is off.
    None,
    /// No table: the context entry selects pass-through.
    PassThrough,
    /// A radix table that maps all memory to itself, filled once.
    StaticRadix,
    /// A VT-d second-stage radix table that never frees table pages (Linux).
    Radix,
    /// [`Radix`](Self::Radix) with a per-CPU cache of leaf tables.
    CachedRadix,
    /// [`Radix`](Self::Radix) that frees empty table pages and writes back the whole table page at
    /// every unmap (FreeBSD as published).
    RadixReclaimAsPublished,
    /// [`Radix`](Self::Radix) that frees empty table pages and writes back only the touched lines
    /// (FreeBSD, fixed).
    RadixReclaim,
    /// IBM Calgary: one flat table of 2^20 entries for each device.
    Flat,
    /// [`Flat`](Self::Flat), filled once: it maps all of a guest's memory, up to 4 GiB.
    StaticFlat,
    /// rIOMMU: one flat table for each ring, 16 bytes a slot. Its walks always snoop, even if the
    /// platform's walks do not.
    Ring,
    /// [`Ring`](Self::Ring) whose walks do not snoop: the driver writes back every touched line.
    RingNonCoherent,
    /// [`Ring`](Self::Ring) with the lookup as published: the unit checks only the first byte of an
    /// access against the length.
    RingAsPublished,
    /// [`RingNonCoherent`](Self::RingNonCoherent) with the lookup as published.
    RingNonCoherentAsPublished,
}

impl TableKind {
    /// Returns true if the table consists of rings.
    pub fn is_ring(self) -> bool {
        matches!(
            self,
            Self::Ring
                | Self::RingNonCoherent
                | Self::RingAsPublished
                | Self::RingNonCoherentAsPublished
        )
    }
}

/// Axis 3: the time at which a stale translation is invalidated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlushKind {
    /// Never: the mode invalidates nothing.
    Never,
    /// At each unmap, before the driver gets the buffer back (`ringfence_dma::flush::Strict`).
    PerUnmap,
    /// One global invalidation for 250 entries of the unit, or after 10 ms.
    Deferred,
    /// One domain invalidation for 256 entries per domain and CPU, or after 10 ms.
    PerCpuQueue,
    /// When the allocator has handed out every address once.
    PerWrap,
    /// At the end of a burst of unmaps. The layer withholds the buffers until then.
    Burst,
    /// [`Burst`](Self::Burst) as rIOMMU's figures have it: the driver gets buffers back at once.
    BurstAsPublished,
    /// At the end of a descriptor: after 64 unmapped pages of a device, direction and CPU, or after
    /// 100 us (buffers that the device writes) or 1 ms. The layer withholds the buffers until then.
    Descriptor,
    /// After 64 unmapped pages, as F&S publishes it: the driver gets the buffers of the first 63
    /// back before the unmap.
    DescriptorAsPublished,
    /// At the end of a descriptor if the device only reads the buffers, which the layer withholds
    /// until then. At each unmap for all others.
    TransmitBatch,
    /// In one batch, after C whole timer cycles without a user. A reverse translation cache in
    /// front of the allocator finds released mappings by their pages.
    PerCycle,
    /// [`PerCycle`](Self::PerCycle) with a residency that follows the recent time between reuses.
    /// It never exceeds that of `PerCycle`.
    PerCycleAdaptive,
    /// [`PerCycle`](Self::PerCycle) as published (PVIOMMU): the cache compares neither direction
    /// nor length, and the first of several users to release a mapping releases it for all.
    PerCycleAsPublished,
    /// At the unmap of the last of the buffers that share a mapping: those of the same pages and
    /// direction (Willmann et al.).
    LastUser,
    /// In one batch, less than 4 ms after the unmap of the last user. A map of the same pages
    /// restores the mapping until then. At most 256 mappings wait; a further one is invalidated at
    /// its unmap (Amit et al.).
    Optimistic,
    /// In one batch, when mappings of 2^14 pages are in use or released, the oldest first (Yassour
    /// et al.; Calgary slides).
    MapCache,
    /// When the addresses are needed again, all at once (Calgary slides).
    NeverFree,
    /// At the unmap that finds 2^14 released mappings of the device: the pool of its driver is full
    /// (page_pool).
    PagePool,
    /// When another core has executed the unmap, which returns before that. At most 64 unmaps wait,
    /// and none across a map (Amit et al.).
    Async,
}

impl FlushKind {
    /// Returns true if a cache in front of the allocator finds mappings by their pages. Buffers of
    /// the same pages and direction then share addresses.
    pub fn has_cache(self) -> bool {
        matches!(
            self,
            Self::PerCycle
                | Self::PerCycleAdaptive
                | Self::PerCycleAsPublished
                | Self::LastUser
                | Self::Optimistic
                | Self::MapCache
                | Self::NeverFree
                | Self::PagePool
        )
    }
}

/// Axis 4: the owner of the I/O page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// This kernel itself.
    Kernel,
    /// The host, before the guest runs. The guest sends no requests.
    Host,
    /// The guest's kernel, behind an IOMMU that the host emulates: the host copies the entries that
    /// the guest invalidates, also after a map, to the table that the hardware walks.
    Emulated,
    /// The guest's kernel owns the first stage, which the hardware walks. The host owns the second
    /// stage, which maps all guest memory, and executes the guest's invalidations.
    Nested,
    /// The host, on request over a virtio-iommu virtqueue. A request maps or unmaps one run of
    /// addresses.
    VirtioIommu,
    /// [`VirtioIommu`](Self::VirtioIommu) with domains in lazy mode: an unmap request invalidates
    /// nothing, and a flush request invalidates the domain (virtio-spec, issue 204).
    VirtioIommuLazy,
    /// The host, on request over the virtqueue of the para-virtual IOMMU. A request maps or unmaps
    /// pages.
    Pviommu,
    /// [`Pviommu`](Self::Pviommu) with the PVIOMMU paper's host optimisations: frames from a pool,
    /// and a pointer to the last table of the second stage.
    PviommuHopt,
    /// This kernel, on another core: maps and unmaps are requests to it (Amit et al.).
    Sidecore,
    /// Xen, on request by hypercall. A hypercall maps or unmaps one entry.
    Xen,
    /// [`Xen`](Self::Xen) with up to 32 calls in one crossing.
    XenMulticall,
    /// [`Xen`](Self::Xen) for a driver domain: the hypercalls that map and unmap grants store the
    /// entries.
    XenGrant,
}

impl Owner {
    /// Returns true if the owner is a host behind the para-virtual IOMMU.
    pub fn is_pviommu(self) -> bool {
        matches!(self, Self::Pviommu | Self::PviommuHopt)
    }

    /// Returns true if the owner is a host behind a virtio-iommu.
    pub fn is_virtio(self) -> bool {
        matches!(self, Self::VirtioIommu | Self::VirtioIommuLazy)
    }

    /// Returns true if the owner is Xen.
    pub fn is_xen(self) -> bool {
        matches!(self, Self::Xen | Self::XenMulticall | Self::XenGrant)
    }
}

/// The protection that a mode promises. Replays measure the actual protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Safety {
    /// The mode does not bound the device's access.
    None,
    /// A device may reach a buffer for a bounded time after the driver got it back.
    Bounded,
    /// A device cannot access memory outside live mappings and its own pool, which holds its
    /// buffers and nothing else. It may still change a buffer of the pool after its release.
    OwnPool,
    /// A device cannot access pages outside live mappings.
    Strict,
    /// A device cannot access bytes outside live mappings.
    ByteGranular,
}

impl fmt::Display for Safety {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Bounded => "bounded",
            Self::OwnPool => "own-pool",
            Self::Strict => "strict",
            Self::ByteGranular => "byte-granular",
        })
    }
}

/// A mode: one choice for each axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    /// Name, as given to `--modes` and printed in reports.
    pub name: String,
    /// Axis 1: the source of addresses.
    pub alloc: Alloc,
    /// Axis 2: the table.
    pub table: TableKind,
    /// Axis 3: the time of invalidations.
    pub flush: FlushKind,
    /// Axis 4: the owner of the table.
    pub owner: Owner,
    /// Largest page of a table that the kernel fills at each map.
    pub page_size: PageSize,
    /// Origin of the mode, in one line.
    pub about: &'static str,
}

/// The named modes, in report order.
#[rustfmt::skip]
pub const NAMED: &[(&str, Alloc, TableKind, FlushKind, Owner, &str)] = {
    use {Alloc::*, FlushKind::*, Owner::*};
    use TableKind::{
        self as T, RadixReclaimAsPublished, RingAsPublished, RingNonCoherentAsPublished,
    };
    &[
    ("none",             Identity,            T::None,             Never,               Kernel,
        "no IOMMU"),
    ("hwpt",             Identity,            T::PassThrough,      Never,               Kernel,
        "IOMMU on, pass-through in hardware (rIOMMU 5.1)"),
    ("swpt",             Identity,            T::StaticRadix,      Never,               Kernel,
        "all memory mapped to itself (rIOMMU 5.1)"),
    ("strict",           CachedRbTree,        T::Radix,            PerUnmap,            Kernel,
        "Linux 3.4, strict (rIOMMU, EIOVAR, Fujita)"),
    ("strict+",          Eiovar(None),        T::Radix,            PerUnmap,            Kernel,
        "strict with EIOVAR"),
    ("defer",            CachedRbTree,        T::Radix,            Deferred,            Kernel,
        "Linux 3.4, deferred: 250 entries or 10 ms"),
    ("defer+",           Eiovar(None),        T::Radix,            Deferred,            Kernel,
        "deferred with EIOVAR"),
    ("bitmap",           Bitmap,              T::Radix,            PerWrap,             Kernel,
        "Fujita and Moriai: one flush per wrap"),
    ("bitmap-paper",     BitmapAsPublished,   T::Radix,            PerWrap,             Kernel,
        "the bitmap as published, with its defect"),
    ("strict-bitmap",    Bitmap,              T::Radix,            PerUnmap,            Kernel,
        "the bitmap with a flush per unmap"),
    ("freebsd-paper",    FreeBsd,             RadixReclaimAsPublished, PerUnmap,        Kernel,
        "FreeBSD as published: unmap writes back whole table pages (EIOVAR 7)"),
    ("freebsd",          FreeBsd,             T::RadixReclaim,     PerUnmap,            Kernel,
        "FreeBSD, fixed: unmap writes back the cleared entries"),
    ("freebsd-14",       FreeBsd14,           T::RadixReclaim,     PerUnmap,            Kernel,
        "freebsd with the allocator of FreeBSD 14"),
    ("linux-strict",     LinuxRcache,         T::Radix,            PerUnmap,            Kernel,
        "today's Linux, iommu.strict=1"),
    ("linux-lazy",       LinuxRcache,         T::Radix,            PerCpuQueue,         Kernel,
        "today's Linux, default"),
    ("linux-maple",      LinuxMaple,          T::Radix,            PerUnmap,            Kernel,
        "linux-strict with the maple-tree series of June 2026"),
    ("fence",            Magazine,            T::CachedRadix,      PerUnmap,            Kernel,
        "Ringfence: the best strict composition"),
    ("fence-burst",      Magazine,            T::CachedRadix,      Burst,               Kernel,
        "Ringfence: strict, one invalidation per burst"),
    ("copy",             Shadow,              T::Radix,            PerUnmap,            Kernel,
        "shadow buffers that stay mapped; byte-granular (Markuze et al.)"),
    ("copy-hybrid",      ShadowHybrid,        T::CachedRadix,      Burst,               Kernel,
        "copy for small buffers and the ends of large ones, whose other pages are mapped"),
    ("fence-copy",       ShadowOrMap,         T::CachedRadix,      TransmitBatch,       Kernel,
        "Ringfence: small buffers are copied; large transmit buffers wait for a batch"),
    ("pool",             Pool,                T::Radix,            PerUnmap,            Kernel,
        "packet buffers from a pool that stays mapped; the driver copies headers (DAMN)"),
    ("fs-paper",         Contiguous,          T::Radix,            DescriptorAsPublished, Kernel,
        "F&S as published: pages of a descriptor are released before their unmap"),
    ("fs",               Contiguous,          T::CachedRadix,      Descriptor,       Kernel,
        "F&S, fixed: one invalidation per descriptor of 64 pages, which are withheld until then"),
    ("riommu-paper",     RingTailAsPublished, RingAsPublished,     BurstAsPublished,    Kernel,
        "rIOMMU as published, with its defects"),
    ("riommu--paper",    RingTailAsPublished, RingNonCoherentAsPublished, BurstAsPublished, Kernel,
        "the same with walks that do not snoop"),
    ("riommu",           RingTail,            T::Ring,             Burst,               Kernel,
        "rIOMMU, fixed: byte-granular; no hardware exists yet"),
    ("riommu-",          RingTail,            T::RingNonCoherent,  Burst,               Kernel,
        "the same with walks that do not snoop"),
    ("riommu-ooo",       RingFree,            T::Ring,             Burst,               Kernel,
        "Ringfence: rIOMMU for drivers that unmap out of order"),
    ("kvm-baseline",     Identity,            T::StaticRadix,      Never,               Host,
        "a KVM guest with all of its memory mapped once (PVIOMMU 2)"),
    ("emulated-strict",  LinuxRcache,         T::Radix,            PerUnmap,            Emulated,
        "a guest behind an emulated VT-d with caching mode, iommu.strict=1"),
    ("emulated-lazy",    LinuxRcache,         T::Radix,            PerCpuQueue,         Emulated,
        "a guest behind an emulated VT-d with caching mode, lazy"),
    ("nested-strict",    LinuxRcache,         T::Radix,            PerUnmap,            Nested,
        "a guest's first stage over its host's second stage, iommu.strict=1 (rIOMMU 2.1)"),
    ("virtio-strict",    LinuxRcache,         T::Radix,            PerUnmap,            VirtioIommu,
        "a guest behind virtio-iommu, iommu.strict=1"),
    ("virtio-lazy",      LinuxRcache,         T::Radix,            PerCpuQueue,         VirtioIommu,
        "a guest behind virtio-iommu, default"),
    ("pviommu",          LinuxRcache,         T::Radix,            PerUnmap,            Pviommu,
        "a guest behind the para-virtual IOMMU (PVIOMMU 4)"),
    ("rtc-paper",        LinuxRcache,         T::Radix,            PerCycleAsPublished, Pviommu,
        "with the reverse translation cache as published, with its defects"),
    ("pviommu+rtc",      LinuxRcache,         T::Radix,            PerCycle,            Pviommu,
        "with the reverse translation cache, fixed (PVIOMMU 4.5)"),
    ("pviommu+rtc+hopt", LinuxRcache,         T::Radix,            PerCycle,            PviommuHopt,
        "and a host with a page pool and a last-table pointer (PVIOMMU 4.6)"),
    ("pviommu+rtc-adaptive", LinuxRcache,     T::Radix,            PerCycleAdaptive,    Pviommu,
        "Ringfence: with a cache whose residency follows reuse"),
    ("shared",           LinuxRcache,         T::Radix,            LastUser,            Kernel,
        "counted mappings, one for all buffers of the same pages and direction (Willmann et al.)"),
    ("optimistic",       LinuxRcache,         T::Radix,            Optimistic,          Kernel,
        "optimistic teardown: unmaps wait a few ms for their reuse (Amit et al.)"),
    ("map-cache",        LinuxRcache,         T::Radix,            MapCache,            Kernel,
        "a cache of mappings inside the DMA API (Calgary slides)"),
    ("never-free",       LinuxRcache,         T::Flat,             NeverFree,           Kernel,
        "Calgary: mappings exist until their entries are reused (Calgary slides)"),
    ("pviommu+map-cache", LinuxRcache,        T::Radix,            MapCache,            Pviommu,
        "mapping on demand, with a map cache and batched requests (Yassour et al.)"),
    ("sidecore-strict",  LinuxRcache,         T::Radix,            PerUnmap,            Sidecore,
        "another core maps and unmaps, and both wait for it (Amit et al.)"),
    ("sidecore",         LinuxRcache,         T::Radix,            Async,               Sidecore,
        "another core maps and unmaps, and only maps wait for it (Amit et al.)"),
    ("persistent",       LinuxRcache,         T::Radix,            NeverFree,           Kernel,
        "persistent mappings: made at the first use, kept for all others (Willmann et al.)"),
    ("calgary",          Bitmap,              T::Flat,             PerUnmap,            Kernel,
        "Linux on Calgary with a flush per unmap (Calgary slides)"),
    ("calgary-lazy",     Bitmap,              T::Flat,             PerWrap,             Kernel,
        "Linux on Calgary as merged in 2.6.18: one flush per wrap"),
    ("xen",              Bitmap,              T::Flat,             PerUnmap,            Xen,
        "a Xen domain maps on demand: one hypercall per entry (Calgary slides)"),
    ("xen-multicall",    Bitmap,              T::Flat,             PerUnmap,           XenMulticall,
        "with up to 32 entries in one crossing"),
    ("xen-lazy",         Bitmap,              T::Flat,             PerWrap,             Xen,
        "with a deferred flush of the TCE cache: one per wrap"),
    ("xen-grant",        Bitmap,              T::Flat,             PerUnmap,            XenGrant,
        "a driver domain: the grant operations map and unmap"),
    ("virtio-bounce",    Shadow,              T::Radix,            PerUnmap,            VirtioIommu,
        "a pool of bounce buffers behind virtio-iommu; byte-granular (Stevens 2021)"),
    ("virtio-lazy-domain", LinuxRcache,       T::Radix,            PerCpuQueue,     VirtioIommuLazy,
        "virtio-lazy with lazy domains: one invalidation per flush (virtio-spec issue 204)"),
    ("premap",           LinuxRcache,         T::Radix,            PagePool,            Kernel,
        "buffers of a pool that stays mapped and recycles its pages (page_pool)"),
    ]
};

/// Names of the modes that `ringfence compare` replays by default: those that a user of today's
/// Linux, of a guest or of Ringfence can select, and `riommu`. `hwpt` is absent because all of its
/// counts equal those of `none`.
pub const DEFAULT: [&str; 12] = [
    "none",
    "linux-strict",
    "linux-lazy",
    "fence",
    "fence-burst",
    "copy",
    "riommu",
    "kvm-baseline",
    "virtio-strict",
    "virtio-lazy",
    "pviommu",
    "pviommu+rtc",
];

impl Mode {
    /// Returns the modes of [`DEFAULT`].
    pub fn default_selection() -> Vec<Self> {
        let mut modes = Self::named();
        modes.retain(|mode| DEFAULT.contains(&mode.name.as_str()));
        modes
    }

    /// Returns all named modes.
    pub fn named() -> Vec<Self> {
        NAMED
            .iter()
            .map(|&(name, alloc, table, flush, owner, about)| Self {
                name: name.to_owned(),
                alloc,
                table,
                flush,
                owner,
                page_size: PageSize::Size4K,
                about,
            })
            .collect()
    }

    /// Returns the named mode `name`.
    pub fn find(name: &str) -> Option<Self> {
        Self::named().into_iter().find(|mode| mode.name == name)
    }

    /// Returns the protection that the mode promises.
    pub fn safety(&self) -> Safety {
        match self.flush {
            // The ring as published overwrites live entries and lets accesses run past the end of a
            // buffer. The cache as published lets a device write a read-only mapping while the
            // mapping is in use. Neither exposure has a bound.
            FlushKind::Never | FlushKind::BurstAsPublished | FlushKind::PerCycleAsPublished => {
                Safety::None
            }
            // An incomplete descriptor of a device that falls silent is never unmapped.
            FlushKind::DescriptorAsPublished => Safety::None,
            // A released mapping stays for as long as the device maps nothing else.
            FlushKind::MapCache | FlushKind::NeverFree | FlushKind::PagePool => Safety::None,
            FlushKind::PerUnmap if self.alloc == Alloc::Pool => Safety::OwnPool,
            // The pages of large buffers may hold other data.
            FlushKind::PerUnmap | FlushKind::Burst | FlushKind::TransmitBatch
                if self.alloc == Alloc::ShadowOrMap =>
            {
                Safety::Strict
            }
            FlushKind::PerUnmap | FlushKind::Burst | FlushKind::TransmitBatch
                if self.has_rings() || self.copies() =>
            {
                Safety::ByteGranular
            }
            FlushKind::PerUnmap
            | FlushKind::Burst
            | FlushKind::Descriptor
            | FlushKind::TransmitBatch
            | FlushKind::LastUser => Safety::Strict,
            FlushKind::Deferred
            | FlushKind::PerCpuQueue
            | FlushKind::PerWrap
            | FlushKind::PerCycle
            | FlushKind::PerCycleAdaptive
            | FlushKind::Optimistic
            | FlushKind::Async => Safety::Bounded,
        }
    }

    /// Returns the stated bound of a `bounded` mode; `None` for other modes.
    pub fn bound(&self) -> Option<&'static str> {
        match self.flush {
            FlushKind::PerCycle | FlushKind::PerCycleAdaptive => {
                Some("T x (C + 1) of the cache's cycles")
            }
            FlushKind::Optimistic => Some("4 ms, for at most 256 mappings of the device"),
            FlushKind::Async => Some("64 unmaps that wait for the sidecore"),
            FlushKind::Deferred => Some("250 unmaps of the unit or 10 ms"),
            FlushKind::PerCpuQueue => Some("256 unmaps of the domain on one CPU or 10 ms"),
            FlushKind::PerWrap => Some("one wrap of the 32-bit space, 2^20 pages"),
            _ => None,
        }
    }

    /// Returns true if the mode needs a unit that looks up rings. No machine has one today.
    pub fn has_rings(&self) -> bool {
        self.table.is_ring()
    }

    /// Returns true if the driver ends bursts with its descriptors.
    pub fn has_descriptors(&self) -> bool {
        matches!(self.flush, FlushKind::Descriptor | FlushKind::TransmitBatch)
    }

    /// Returns true if the device uses copies of buffers, in memory that stays mapped. Of large
    /// buffers, `copy-hybrid` copies only the parts of pages, and `fence-copy` nothing.
    pub fn copies(&self) -> bool {
        matches!(
            self.alloc,
            Alloc::Shadow | Alloc::ShadowHybrid | Alloc::ShadowOrMap
        )
    }

    /// Returns true if the device uses a pool that stays mapped, for copies or for the driver's own
    /// buffers.
    pub fn has_pool(&self) -> bool {
        self.copies() || self.alloc == Alloc::Pool
    }

    /// Returns true if the IOMMU translates device accesses.
    pub fn translates(&self) -> bool {
        !matches!(self.alloc, Alloc::Identity)
    }
}
