//! Types and identity kinds of the named modes.

use std::any::type_name;

use ringfence_dma::space::Rounding;

use super::*;

/// The types and parameters with which a mode is visited.
#[derive(Debug, PartialEq)]
enum Visited {
    Identity(IdentityKind),
    /// Type names of allocator, flush policy and table; rounding and allocator.
    Paged([&'static str; 3], Rounding, Alloc),
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
        Visited::Paged(types, parts.rounding, parts.kind)
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
            "fs-literal",
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
        let Visited::Paged([a, f, t], rounded, kind) = visited(name) else {
            panic!("{name} maps pages");
        };
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
