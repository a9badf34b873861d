//! Types and identity kinds of the named modes.

use std::any::type_name;

use ringfence_dma::space::Rounding;

use super::*;

/// Returns the coherency of the rings of a mode.
struct RingCoherency;

impl ModeVisitor for RingCoherency {
    type Output = Option<Coherency>;

    fn identity(self, _: IdentityKind) -> Self::Output {
        None
    }

    fn paged<A, T, F>(self, _: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        None
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        None
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        None
    }

    fn rings<D, L, F>(self, parts: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        Some(parts.setup.coherency)
    }
}

#[test]
fn riommu_snoops_and_riommu_minus_does_not() {
    for (name, wanted) in [
        ("riommu", Some(Coherency::Coherent)),
        ("riommu-", Some(Coherency::NonCoherent)),
        ("riommu-paper", Some(Coherency::Coherent)),
        ("riommu--paper", Some(Coherency::NonCoherent)),
        ("strict", None),
    ] {
        let mode = Mode::find(name).unwrap();
        assert_eq!(dispatch(&mode, RingCoherency).unwrap(), wanted, "{name}");
    }
}

/// Returns the kind of a mode without translation.
struct Kind;

impl ModeVisitor for Kind {
    type Output = Option<IdentityKind>;

    fn identity(self, kind: IdentityKind) -> Self::Output {
        Some(kind)
    }

    fn paged<A, T, F>(self, _: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        None
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        None
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        None
    }

    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        None
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
        let found = dispatch(&Mode::find(name).unwrap(), Kind).unwrap();
        assert_eq!(found, Some(kind), "{name}");
        assert_eq!(
            (kind.has_generic_path(), kind.has_table()),
            (generic, table),
            "{name}"
        );
    }
    assert_eq!(
        dispatch(&Mode::find("strict").unwrap(), Kind).unwrap(),
        None
    );
}

/// Returns the type names of allocator, flush policy and table, the rounding and the allocator of a
/// mode that maps pages.
struct Built;

impl ModeVisitor for Built {
    type Output = Option<([&'static str; 3], Rounding, Alloc)>;

    fn identity(self, _: IdentityKind) -> Self::Output {
        None
    }

    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let types = [type_name::<A>(), type_name::<F>(), type_name::<T>()];
        Some((types, parts.rounding, parts.kind))
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, _: CachedParts<T>) -> Self::Output {
        None
    }

    fn shadow<P: CopyParts>(self, _: P) -> Self::Output {
        None
    }

    fn rings<D, L, F>(self, _: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        None
    }
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
        ("bitmap-paper", "::BitmapState", "::PerWrap", Exact),
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
        let mode = Mode::find(name).unwrap();
        let ([a, f, t], rounded, kind) = dispatch(&mode, Built).unwrap().unwrap();
        assert!(a.contains(alloc), "{name}: {a}");
        assert!(f.contains(flush), "{name}: {f}");
        assert_eq!(rounded, rounding, "{name}");
        assert_eq!(kind, mode.alloc, "{name}");
        assert_eq!(a.contains("::Eiovar<"), name.ends_with('+'), "{name}: {a}");
        let has_rcache = alloc == rcache || name == "linux-maple";
        assert_eq!(a.contains("::LinuxRcache<"), has_rcache, "{name}: {a}");
        let reclaims = name.starts_with("freebsd");
        assert_eq!(t.contains("Reclaiming"), reclaims, "{name}: {t}");
    }
}
