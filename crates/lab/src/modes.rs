//! The table of all named modes: each is a row of four answers and nothing else.

use std::fmt;

/// Question 1: where does the I/O virtual address come from?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alloc {
    /// It is the physical address.
    Identity,
    /// Linux 3.4: red-black tree with a cached node.
    CachedRbTree,
    /// EIOVAR: freelists in front of the tree; `None` is unbounded.
    Eiovar(Option<usize>),
    /// Fujita and Moriai: next-fit bitmap.
    Bitmap,
    /// The same as the document has it: addresses freed ahead of the pointer are reused before the
    /// flush.
    BitmapAsPublished,
    /// The bitmap whose bits are the entries of the flat table.
    TableBitmap,
    /// FreeBSD: augmented tree.
    FreeBsd,
    /// Linux 6.12: per-CPU magazines for up to 32 pages, in front of the tree.
    LinuxRcache,
    /// Ringfence: per-CPU magazines for every size.
    Magazine,
    /// rIOMMU: the slot at the tail of the ring; if that is not free, the map waits.
    RingTail,
    /// Ringfence: the next free slot of the ring, from the tail on.
    RingFree,
    /// The tail as the document has it: a live entry is overwritten.
    RingTailAsPublished,
}

/// Question 2: what does the hardware look up?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TableKind {
    /// Nothing: the IOMMU is off.
    None,
    /// The context entry says pass-through.
    PassThrough,
    /// A radix table that maps all memory to itself, once.
    StaticRadix,
    /// A VT-d second-stage radix table; table pages stay (Linux).
    Radix,
    /// The same with a per-CPU cache of leaf tables in front.
    CachedRadix,
    /// The same, reclaiming empty table pages and writing back the whole page at every unmap
    /// (FreeBSD as documented).
    RadixReclaimPage,
    /// The same, reclaiming, and writing back what was touched (FreeBSD repaired).
    RadixReclaim,
    /// One flat table of 2^20 entries a device: IBM's Calgary.
    Flat,
    /// A flat table a ring, of 16 bytes a slot: rIOMMU, whose walks snoop whatever the platform's
    /// do.
    Ring,
    /// The same, and the walks do not snoop: every touched line is written back.
    RingNonCoherent,
    /// [`Ring`](Self::Ring) looked up as the document has it: the first byte of an access is
    /// checked against the length.
    RingAsPublished,
    /// [`RingNonCoherent`](Self::RingNonCoherent) looked up so.
    RingNonCoherentAsPublished,
}

impl TableKind {
    /// Whether it is rings.
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

/// Question 3: when does a stale translation die?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlushKind {
    /// Never.
    Never,
    /// At each unmap, before the buffer is back.
    PerUnmap,
    /// 250 entries or 10 ms for the unit, one global invalidation.
    Deferred,
    /// 256 entries per domain and processor, or 10 ms, one domain invalidation.
    PerCpuQueue,
    /// When the allocator has handed out every address once.
    PerWrap,
    /// At the end of a burst of unmaps; buffers are withheld until then.
    Burst,
    /// The same as rIOMMU's figures have it: buffers are back at once.
    BurstAsPublished,
    /// After C whole timer cycles without a user, in one batch: a reverse translation cache stands
    /// in front of question 1, and finds what was released by the pages that it leads to.
    PerCycle,
    /// The same as long as reuse has been taking, and never longer.
    PerCycleAdaptive,
    /// The same as the document has it: direction and length are not asked for, and whoever
    /// releases first of several users releases all.
    PerCycleAsPublished,
}

/// Question 4: who does the work?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// This kernel.
    Kernel,
    /// The host, before the guest runs; nobody asks it for anything.
    Host,
    /// The host, asked through a virtqueue as virtio-iommu has it: a request maps or unmaps one run
    /// of addresses.
    VirtioIommu,
    /// The host, asked through a virtqueue as the para-virtual IOMMU has it: a request maps or
    /// unmaps pages.
    Pviommu,
    /// The same with the document's optimisations of the host: frames from a pool, and a pointer to
    /// the last table of the second stage.
    PviommuHopt,
}

impl Owner {
    /// Whether it is a host behind the para-virtual IOMMU.
    pub fn is_pviommu(self) -> bool {
        matches!(self, Self::Pviommu | Self::PviommuHopt)
    }
}

/// What a mode promises; what it does is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Safety {
    /// No protection within the device's reach.
    None,
    /// A device may reach a buffer for a stated time after it was handed back.
    Bounded,
    /// No access outside live mappings, to the page.
    Strict,
    /// No access outside live mappings, to the byte.
    ByteGranular,
}

impl fmt::Display for Safety {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Bounded => "bounded",
            Self::Strict => "strict",
            Self::ByteGranular => "byte-granular",
        })
    }
}

/// One mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    /// Name.
    pub name: String,
    /// Question 1.
    pub alloc: Alloc,
    /// Question 2.
    pub table: TableKind,
    /// Question 3.
    pub flush: FlushKind,
    /// Question 4.
    pub owner: Owner,
    /// Where it comes from, in a line.
    pub about: &'static str,
}

/// The named modes, in the order in which reports show them.
#[rustfmt::skip]
pub const NAMED: &[(&str, Alloc, TableKind, FlushKind, Owner, &str)] = {
    use {Alloc::*, FlushKind::*, TableKind as T, Owner::*};
    &[
        ("none",            Identity,        T::None,                   Never,        Kernel,      "no IOMMU"),
        ("hwpt",            Identity,        T::PassThrough,            Never,        Kernel,      "IOMMU on, pass-through in hardware (rIOMMU 5.1)"),
        ("swpt",            Identity,        T::StaticRadix,            Never,        Kernel,      "all memory mapped to itself (rIOMMU 5.1)"),
        ("strict",          CachedRbTree,    T::Radix,                  PerUnmap,     Kernel,      "Linux 3.4, strict (rIOMMU, EIOVAR, Fujita)"),
        ("strict+",         Eiovar(None),    T::Radix,                  PerUnmap,     Kernel,      "strict with EIOVAR"),
        ("defer",           CachedRbTree,    T::Radix,                  Deferred,     Kernel,      "Linux 3.4, deferred: 250 entries or 10 ms"),
        ("defer+",          Eiovar(None),    T::Radix,                  Deferred,     Kernel,      "deferred with EIOVAR"),
        ("bitmap",          Bitmap,          T::Radix,                  PerWrap,      Kernel,      "Fujita and Moriai: one flush per wrap"),
        ("bitmap-literal",  BitmapAsPublished,   T::Radix,                  PerWrap,      Kernel,      "the bitmap as documented, defect included"),
        ("strict-bitmap",   Bitmap,          T::Radix,                  PerUnmap,     Kernel,      "the bitmap with a flush per unmap"),
        ("freebsd",         FreeBsd,         T::RadixReclaimPage,       PerUnmap,     Kernel,      "FreeBSD as EIOVAR section 7 found it"),
        ("freebsd-fixed",   FreeBsd,         T::RadixReclaim,           PerUnmap,     Kernel,      "FreeBSD with the flush repaired"),
        ("linux-strict",    LinuxRcache,     T::Radix,                  PerUnmap,     Kernel,      "today's Linux, iommu.strict=1"),
        ("linux-lazy",      LinuxRcache,     T::Radix,                  PerCpuQueue,  Kernel,      "today's Linux, default"),
        ("fence",           Magazine,        T::CachedRadix,            PerUnmap,     Kernel,      "Ringfence: the best strict composition"),
        ("fence-burst",     Magazine,        T::CachedRadix,            Burst,        Kernel,      "Ringfence: strict, one invalidation per burst"),
        ("riommu-literal",  RingTailAsPublished, T::RingAsPublished,            BurstAsPublished, Kernel,      "rIOMMU as its figures have it, defects included"),
        ("riommu--literal", RingTailAsPublished, T::RingNonCoherentAsPublished, BurstAsPublished, Kernel,      "the same, and its walks do not snoop"),
        ("riommu",          RingTail,        T::Ring,                   Burst,        Kernel,      "rIOMMU repaired: protection to the byte; no such hardware yet"),
        ("riommu-",         RingTail,        T::RingNonCoherent,        Burst,        Kernel,      "the same, and its walks do not snoop"),
        ("riommu-ooo",      RingFree,        T::Ring,                   Burst,        Kernel,      "Ringfence: rIOMMU for drivers that unmap out of order"),
        ("kvm-baseline",    Identity,        T::StaticRadix,            Never,        Host,        "a guest under KVM: all of its memory mapped, once (PVIOMMU 2)"),
        ("virtio-strict",   LinuxRcache,     T::Radix,                  PerUnmap,     VirtioIommu, "a guest behind virtio-iommu, iommu.strict=1"),
        ("virtio-lazy",     LinuxRcache,     T::Radix,                  PerCpuQueue,  VirtioIommu, "a guest behind virtio-iommu, default"),
        ("pviommu",         LinuxRcache,     T::Radix,                  PerUnmap,     Pviommu,     "a guest behind the para-virtual IOMMU (PVIOMMU 4)"),
        ("rtc-literal",     LinuxRcache,     T::Radix,                  PerCycleAsPublished, Pviommu,  "with its reverse translation cache as printed, defects included"),
        ("pviommu+rtc",     LinuxRcache,     T::Radix,                  PerCycle,     Pviommu,     "with its reverse translation cache, repaired (PVIOMMU 4.5)"),
        ("pviommu+rtc+hopt", LinuxRcache,    T::Radix,                  PerCycle,     PviommuHopt, "and its host with a page pool and a pointer to the last table (PVIOMMU 4.6)"),
        ("pviommu+rtc-adaptive", LinuxRcache, T::Radix,                 PerCycleAdaptive, Pviommu, "Ringfence: with a cache whose residency follows reuse"),
    ]
};

impl Mode {
    /// All named modes.
    pub fn named() -> Vec<Self> {
        NAMED
            .iter()
            .map(|&(name, alloc, table, flush, who, about)| Self {
                name: name.to_owned(),
                alloc,
                table,
                flush,
                owner: who,
                about,
            })
            .collect()
    }

    /// The mode of that name.
    pub fn find(name: &str) -> Option<Self> {
        Self::named().into_iter().find(|mode| mode.name == name)
    }

    /// What the mode promises.
    pub fn safety(&self) -> Safety {
        match self.flush {
            // The literal ring overwrites live entries and lets accesses run past a buffer's end,
            // and the literal cache lets a device write what it was to read, for as long as that is
            // in use: nothing bounds that.
            FlushKind::Never | FlushKind::BurstAsPublished | FlushKind::PerCycleAsPublished => {
                Safety::None
            }
            FlushKind::PerUnmap | FlushKind::Burst if self.has_rings() => Safety::ByteGranular,
            FlushKind::PerUnmap | FlushKind::Burst => Safety::Strict,
            FlushKind::Deferred
            | FlushKind::PerCpuQueue
            | FlushKind::PerWrap
            | FlushKind::PerCycle
            | FlushKind::PerCycleAdaptive => Safety::Bounded,
        }
    }

    /// The bound that a `bounded` mode states.
    pub fn bound(&self) -> Option<&'static str> {
        match self.flush {
            FlushKind::PerCycle | FlushKind::PerCycleAdaptive => {
                Some("T x (C + 1) of the cache's cycles")
            }
            FlushKind::Deferred => Some("250 unmaps of the unit or 10 ms"),
            FlushKind::PerCpuQueue => Some("256 unmaps of the domain on one CPU or 10 ms"),
            FlushKind::PerWrap => Some("one wrap of the 32-bit space, 2^20 pages"),
            _ => None,
        }
    }

    /// Whether it needs a unit that looks up rings, which no machine has today.
    pub fn has_rings(&self) -> bool {
        self.table.is_ring()
    }

    /// Whether devices' accesses are translated at all.
    pub fn translates(&self) -> bool {
        !matches!(self.alloc, Alloc::Identity)
    }
}
