//! The cells where the modes of this program differ from the attack matrix, and the reasons.

use ringfence_lab::modes::{Alloc, FlushKind, Mode, Owner, TableKind};

use crate::expect::{Kind, Outcome};

/// A cell where this program differs from the attack matrix.
#[derive(Clone, Copy)]
pub struct Departure {
    /// Number of the class.
    pub class: &'static str,
    /// Returns true for the modes that differ.
    pub applies: fn(&Mode) -> bool,
    /// Outcome of these modes.
    pub outcome: Outcome,
    /// Reason, as the matrix prints it.
    pub reason: &'static str,
}

pub(crate) fn as_published(mode: &Mode) -> bool {
    matches!(
        mode.flush,
        FlushKind::BurstAsPublished
            | FlushKind::DescriptorAsPublished
            | FlushKind::PerCycleAsPublished
    ) || matches!(
        mode.alloc,
        Alloc::BitmapAsPublished | Alloc::RingTailAsPublished
    )
}

fn is_published_ring(mode: &Mode) -> bool {
    Kind::of(mode) == Kind::Ring && as_published(mode)
}

fn reuses_ahead(mode: &Mode) -> bool {
    mode.alloc == Alloc::BitmapAsPublished
}

/// A bridge has one space for all devices behind it.
fn shares_a_bridge(mode: &Mode) -> bool {
    matches!(mode.table, TableKind::Flat | TableKind::StaticFlat)
}

/// Unmaps wait in a multicall until it is full, or until the flush.
fn batches_hypercalls(mode: &Mode) -> bool {
    mode.owner == Owner::XenMulticall && is_deferred(mode)
}

fn is_deferred(mode: &Mode) -> bool {
    Kind::of(mode) == Kind::Deferred
}

fn has_no_device_tlb(mode: &Mode) -> bool {
    mode.has_rings()
        || mode.owner == Owner::Nested
        || matches!(
            mode.table,
            TableKind::PassThrough | TableKind::Flat | TableKind::StaticFlat
        )
}

fn has_no_page_requests(mode: &Mode) -> bool {
    mode.has_rings() || mode.table == TableKind::Flat || mode.owner == Owner::Nested
}

fn always_snoops(mode: &Mode) -> bool {
    matches!(mode.table, TableKind::Ring | TableKind::RingAsPublished)
}

fn expires_first_page(mode: &Mode) -> bool {
    mode.flush == FlushKind::PerCycleAsPublished
}

fn keeps_entries(mode: &Mode) -> bool {
    matches!(
        mode.flush,
        FlushKind::MapCache | FlushKind::NeverFree | FlushKind::PagePool
    )
}

/// The last page of a descriptor writes the cleared entries of all its pages back.
fn writes_back_descriptors(mode: &Mode) -> bool {
    mode.flush == FlushKind::DescriptorAsPublished
}

fn executes_requests(mode: &Mode) -> bool {
    mode.owner.is_pviommu() || mode.owner.is_xen()
}

/// The host or the device checks each request of the guest.
fn checks_requests(mode: &Mode) -> bool {
    (executes_requests(mode) || mode.owner.is_virtio()) && Kind::of(mode) != Kind::Cached
}

fn caches_without_requests(mode: &Mode) -> bool {
    !executes_requests(mode) && !mode.owner.is_virtio() && Kind::of(mode) == Kind::Cached
}

fn runs_no_simulator(mode: &Mode) -> bool {
    let runs = mode.owner.is_pviommu() || mode.owner == Owner::Host;
    !runs && Kind::of(mode) != Kind::Ring
}

fn reclaims_no_frame(mode: &Mode) -> bool {
    !executes_requests(mode) && Kind::of(mode) != Kind::None
}

fn caches_without_pointer(mode: &Mode) -> bool {
    mode.owner != Owner::PviommuHopt && Kind::of(mode) == Kind::Cached
}

fn has_pointer_without_cache(mode: &Mode) -> bool {
    mode.owner == Owner::PviommuHopt && Kind::of(mode) != Kind::Cached
}

fn withholds(mode: &Mode) -> bool {
    Kind::of(mode) == Kind::Ring && !as_published(mode)
}

fn queues_requests(mode: &Mode) -> bool {
    mode.owner.is_virtio() && Kind::of(mode) == Kind::Deferred
}

fn has_lazy_shadow(mode: &Mode) -> bool {
    mode.owner == Owner::Emulated && Kind::of(mode) == Kind::Deferred
}

fn copies(mode: &Mode) -> bool {
    mode.copies()
}

fn has_pool(mode: &Mode) -> bool {
    mode.has_pool()
}

fn is_async(mode: &Mode) -> bool {
    mode.flush == FlushKind::Async
}

fn is_shared(mode: &Mode) -> bool {
    Kind::of(mode) == Kind::Shared
}

/// The other core checks an unmap after the driver has the buffer back.
fn unmaps_later(mode: &Mode) -> bool {
    is_async(mode) && mode.owner == Owner::Sidecore
}

/// The layer cannot read the table. No tree, cache of mappings or pool of copies has a record of
/// the address.
fn asks_the_host(mode: &Mode) -> bool {
    let records = matches!(
        mode.alloc,
        Alloc::CachedRbTree | Alloc::FreeBsd | Alloc::FreeBsd14
    );
    let cached = mode.flush.has_cache() && !expires_first_page(mode);
    let remote = executes_requests(mode) || mode.owner.is_virtio();
    remote && !records && !cached && !mode.copies()
}

const fn only_user(class: &'static str) -> Departure {
    Departure {
        class,
        applies: is_shared,
        outcome: Outcome::Stopped,
        reason: "the buffer is the only user of its mapping, and its unmap invalidates",
    }
}

const fn counted_users(class: &'static str) -> Departure {
    Departure {
        class,
        applies: is_shared,
        outcome: Outcome::Stopped,
        reason: "buffers share by pages and direction, and each user is counted",
    }
}

const NO_DEVICE_TLB: &str = "the unit, or the pass-through context, permits no device TLB";
const WITHHELD: &str = "the layer withholds the buffers of a burst until its invalidation";

const fn withheld(class: &'static str) -> Departure {
    Departure {
        class,
        applies: withholds,
        outcome: Outcome::Stopped,
        reason: WITHHELD,
    }
}

/// The cells where this program differs from the attack matrix.
pub const DEPARTURES: &[Departure] = &[
    Departure {
        class: "A14",
        applies: copies,
        outcome: Outcome::Stopped,
        reason: "the kept host address is in the device's own pool of copies",
    },
    Departure {
        class: "A20",
        applies: has_pool,
        outcome: Outcome::Stopped,
        reason: "the pool is mapped by a table that never frees table pages",
    },
    withheld("A02"),
    withheld("A04"),
    Departure {
        class: "A04",
        applies: reuses_ahead,
        outcome: Outcome::Succeeded,
        reason: "the bitmap as published reuses an address ahead of its search before the flush",
    },
    withheld("A05"),
    withheld("A17"),
    Departure {
        class: "A11",
        applies: shares_a_bridge,
        outcome: Outcome::Succeeded,
        reason: "a host bridge has one address space for all devices behind it",
    },
    withheld("A23"),
    withheld("A27"),
    withheld("A35"),
    counted_users("A06"),
    only_user("A37"),
    Departure {
        class: "A03",
        applies: queues_requests,
        outcome: Outcome::Succeeded,
        reason: "the guest sends the unmap with its next request: until then the host's table \
            still has the entry",
    },
    Departure {
        class: "A03",
        applies: batches_hypercalls,
        outcome: Outcome::Succeeded,
        reason: "the unmap waits in a multicall of up to 32 calls: until its crossing, Xen's table \
            still has the entry; only composed modes do this",
    },
    Departure {
        class: "A03",
        applies: has_lazy_shadow,
        outcome: Outcome::Succeeded,
        reason: "the hardware walks the host's shadow, which keeps the entry until the flush",
    },
    Departure {
        class: "A03",
        applies: is_async,
        outcome: Outcome::Succeeded,
        reason: "the other core has not cleared the entry yet",
    },
    counted_users("A28"),
    counted_users("A29"),
    Departure {
        class: "A13",
        applies: has_no_device_tlb,
        outcome: Outcome::NotApplicable,
        reason: NO_DEVICE_TLB,
    },
    Departure {
        class: "A14",
        applies: has_no_device_tlb,
        outcome: Outcome::NotApplicable,
        reason: NO_DEVICE_TLB,
    },
    Departure {
        class: "A19",
        applies: is_published_ring,
        outcome: Outcome::Succeeded,
        reason: "the unit as published checks only the first byte of an access",
    },
    Departure {
        class: "A20",
        applies: is_deferred,
        outcome: Outcome::Stopped,
        reason: "the tables of deferred modes free no page",
    },
    Departure {
        class: "A21",
        applies: always_snoops,
        outcome: Outcome::NotApplicable,
        reason: "walks of the rings always snoop",
    },
    Departure {
        class: "A21",
        applies: keeps_entries,
        outcome: Outcome::NotApplicable,
        reason: "the mode keeps the entry of a released buffer",
    },
    Departure {
        class: "A21",
        applies: expires_first_page,
        outcome: Outcome::Succeeded,
        reason: "the cache as published unmaps only the first page of an expired mapping",
    },
    Departure {
        class: "A30",
        applies: checks_requests,
        outcome: Outcome::Stopped,
        reason: "the owner is a host, which checks every request",
    },
    Departure {
        class: "A30",
        applies: caches_without_requests,
        outcome: Outcome::NotApplicable,
        reason: "no host executes requests",
    },
    Departure {
        class: "A31",
        applies: runs_no_simulator,
        outcome: Outcome::NotApplicable,
        reason: "no host of the mode runs emulated devices",
    },
    Departure {
        class: "A32",
        applies: reclaims_no_frame,
        outcome: Outcome::NotApplicable,
        reason: "this kernel owns the frames, or the host pins all of the guest's",
    },
    Departure {
        class: "A33",
        applies: caches_without_pointer,
        outcome: Outcome::NotApplicable,
        reason: "the host keeps no pointer to a table",
    },
    Departure {
        class: "A33",
        applies: has_pointer_without_cache,
        outcome: Outcome::Stopped,
        reason: "the pointer ends with its table; only composed modes need this",
    },
    Departure {
        class: "A21",
        applies: writes_back_descriptors,
        outcome: Outcome::Succeeded,
        reason: "as published, the last page of a descriptor ends the mappings of all its pages, \
            and their entries are written back then",
    },
    Departure {
        class: "A38",
        applies: has_no_page_requests,
        outcome: Outcome::NotApplicable,
        reason: NO_DEVICE_TLB,
    },
    Departure {
        class: "A25",
        applies: unmaps_later,
        outcome: Outcome::Succeeded,
        reason: "the layer returns a buffer before the other core has checked its address",
    },
    Departure {
        class: "A25",
        applies: asks_the_host,
        outcome: Outcome::Succeeded,
        reason: "the table is in another machine, so the layer accepts an address that a driver \
            claims again; a token is consumed",
    },
    Departure {
        class: "A36",
        applies: shares_a_bridge,
        outcome: Outcome::Succeeded,
        reason: "a host bridge has one address space for all devices behind it",
    },
];
