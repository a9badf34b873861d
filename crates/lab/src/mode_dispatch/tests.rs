//! Types and identity kinds of the named modes.

use std::any::type_name;
use std::rc::Rc;

use ringfence_dma::space::Rounding;
use ringfence_iova::AllocRequest;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{Pfn, PhysAddr, PhysRange};

use super::*;

/// The types and parameters with which a mode is visited.
#[derive(Debug, PartialEq)]
enum Visited {
    Identity(IdentityKind),
    /// Type names of allocator, flush policy and table; rounding and allocator; the first pages of
    /// its first two ranges.
    Paged([&'static str; 3], Rounding, Alloc, [u64; 2]),
    /// The same of a mode with a sidecore, and the moment at which its unmaps return.
    Offloaded(Box<Self>, UnmapWait),
    Cached,
    Shadow,
    Rings(Coherency),
}

struct Visit;

impl ModeVisitor for Visit {
    type Output = Visited;

    fn identity(self, kind: IdentityKind) -> Visited {
        Visited::Identity(kind)
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Visited
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let types = [type_name::<A>(), type_name::<F>(), type_name::<T>()];
        Visited::Paged(types, parts.rounding, parts.kind, first_pages(&parts))
    }

    fn offloaded<A, T>(self, parts: ModeParts<A, T, Strict>, wait: UnmapWait) -> Visited
    where
        A: ReplayAlloc,
        T: ReplayTable,
        Strict: FlushFor<A, T>,
    {
        Visited::Offloaded(Box::new(self.paged(parts)), wait)
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Visited {
        Visited::Cached
    }

    fn shadow<P: CopyParts>(self, _: P) -> Visited {
        Visited::Shadow
    }

    fn rings<D, L, F>(self, parts: RingParts<D, L, F>) -> Visited
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Visited::Rings(parts.setup.coherency)
    }
}

/// Returns the first pages of two ranges of one page, which a new allocator of a mode allocates.
fn first_pages<A: ReplayAlloc, T: ReplayTable, F>(parts: &ModeParts<A, T, F>) -> [u64; 2] {
    let memory = Rc::new(Arena::new(1 << 20).unwrap());
    let region = PhysRange::new(PhysAddr::ZERO, 1 << 20).unwrap();
    let frames = Frames::new(Rc::clone(&memory), region);
    let alloc = parts.allocator(&memory, &frames, None).unwrap();
    let mut cpu = alloc.per_cpu();
    let request = AllocRequest::new(1, Pfn::new(u64::MAX >> 12));
    [(); 2].map(|()| alloc.alloc(&mut cpu, &request).unwrap().range.lo().get())
}

fn visited(name: &str) -> Visited {
    dispatch(&Mode::find(name).unwrap(), Visit).unwrap()
}

#[test]
fn riommu_snoops_and_riommu_minus_does_not() {
    for (name, wanted) in [
        ("riommu", Coherency::Coherent),
        ("riommu-", Coherency::NonCoherent),
        ("riommu-paper", Coherency::Coherent),
        ("riommu--paper", Coherency::NonCoherent),
    ] {
        assert_eq!(visited(name), Visited::Rings(wanted), "{name}");
    }
}

#[test]
fn pass_through_modes_have_the_generic_path_and_others_do_not() {
    use IdentityKind as K;
    for (name, kind, generic, table) in [
        ("none", K::Off, false, false),
        ("hwpt", K::PassThrough, true, false),
        ("swpt", K::StaticTable, true, true),
        ("kvm-baseline", K::WholeGuest, false, true),
    ] {
        assert_eq!(visited(name), Visited::Identity(kind), "{name}");
        assert_eq!(
            (kind.has_generic_path(), kind.has_table()),
            (generic, table),
            "{name}"
        );
    }
    assert!(matches!(visited("strict"), Visited::Paged(..)));
}

/// A timed replay calls the types that [`dispatch`] selects.
#[test]
fn timed_modes_have_their_own_allocator_policy_and_rounding() {
    use Rounding::{Exact, PowerOfTwo};
    let rcache = "::LinuxRcache<ringfence_iova::cached_rbtree::CachedTree,";
    for (name, alloc, flush, rounding) in [
        ("strict", "::CachedTree", "::Strict", PowerOfTwo),
        ("strict+", "::Eiovar<", "::Strict", PowerOfTwo),
        ("defer", "::CachedTree", "::Deferred<", PowerOfTwo),
        ("defer+", "::Eiovar<", "::Deferred<", PowerOfTwo),
        ("bitmap", "::BitmapState", "::PerWrap", Exact),
        ("bitmap-paper", "::PublishedBitmapState", "::PerWrap", Exact),
        ("strict-bitmap", "::BitmapState", "::Strict", Exact),
        ("freebsd-paper", "::FreeBsdTree", "::Strict", Exact),
        ("freebsd", "::FreeBsdTree", "::Strict", Exact),
        ("freebsd-14", "::FreeBsdTree", "::Strict", Exact),
        ("linux-strict", rcache, "::Strict", Exact),
        ("linux-lazy", rcache, "::PerCpuQueue<", Exact),
        ("linux-maple", "::LinuxMaple", "::Strict", Exact),
        ("fence", "::Magazines<", "::Strict", Exact),
        ("fence-burst", "::Magazines<", "::Burst", Exact),
        ("fs", "::Contiguous<", "::Descriptors", Exact),
        (
            "fs-paper",
            "::Contiguous<",
            "::DescriptorsAsPublished",
            Exact,
        ),
        ("emulated-strict", rcache, "::Strict", Exact),
        ("emulated-lazy", rcache, "::PerCpuQueue<", Exact),
        ("nested-strict", rcache, "::Strict", Exact),
        ("virtio-strict", rcache, "::Strict", Exact),
        ("virtio-lazy", rcache, "::PerCpuQueue<", Exact),
        ("virtio-lazy-domain", rcache, "::PerCpuQueue<", Exact),
        ("sidecore-strict", rcache, "::Strict", Exact),
        ("sidecore", rcache, "::Strict", Exact),
        ("pviommu", rcache, "::Strict", Exact),
    ] {
        let (parts, wait) = match visited(name) {
            Visited::Offloaded(parts, wait) => (*parts, Some(wait)),
            parts => (parts, None),
        };
        let Visited::Paged([a, f, t], rounded, kind, first) = parts else {
            panic!("{name} maps pages");
        };
        let returns = match name {
            "sidecore" => Some(UnmapWait::Returns),
            "sidecore-strict" => Some(UnmapWait::Waits),
            _ => None,
        };
        assert_eq!(wait, returns, "{name}");
        // FreeBSD 14 leaves a page unused on both sides of a range.
        let wanted = match name {
            "freebsd-14" => Some([2, 4]),
            "freebsd" | "freebsd-paper" => Some([1, 2]),
            _ => None,
        };
        assert!(
            wanted.is_none_or(|wanted| wanted == first),
            "{name}: {first:?}"
        );
        assert!(a.contains(alloc), "{name}: {a}");
        assert!(f.contains(flush), "{name}: {f}");
        assert_eq!(rounded, rounding, "{name}");
        assert_eq!(kind, Mode::find(name).unwrap().alloc, "{name}");
        assert_eq!(a.contains("::Eiovar<"), name.ends_with('+'), "{name}: {a}");
        let has_rcache = alloc == rcache || name == "linux-maple";
        assert_eq!(a.contains("::LinuxRcache<"), has_rcache, "{name}: {a}");
        let reclaims = name.starts_with("freebsd");
        assert_eq!(t.contains("Reclaiming"), reclaims, "{name}: {t}");
    }
}
