//! The command-line names of the choices on each axis, as `ringfence modes` prints them and
//! `--mode` takes them.

use super::hint;
use crate::modes::{Alloc, FlushKind, Owner, TableKind};

/// A choice that has a name on the command line.
pub trait Axis: Sized + Copy + 'static {
    /// The name of the axis: a key of `--mode`.
    const KEY: &'static str;
    /// The choices that have a name of their own.
    const CHOICES: &'static [Self];

    /// Returns the name of the choice.
    fn name(self) -> String;

    /// Returns the names that [`Axis::parse`] accepts.
    fn names() -> Vec<String> {
        Self::CHOICES.iter().map(|choice| choice.name()).collect()
    }

    /// Returns the choice named `text`.
    ///
    /// # Errors
    /// No choice has this name.
    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        parse_choice(text)
    }
}

fn parse_choice<T: Axis>(text: &str) -> Result<T, ParseAxisError> {
    let found = T::CHOICES.iter().find(|choice| choice.name() == text);
    found.copied().ok_or_else(|| ParseAxisError {
        axis: T::KEY,
        name: text.to_owned(),
        candidates: T::names(),
    })
}

/// The name is not a choice of the axis.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no {axis} is named {name:?}; {}the choices are {}",
    hint(name, candidates), candidates.join(", ")
)]
pub struct ParseAxisError {
    /// The name of the axis.
    pub axis: &'static str,
    /// The unknown name.
    pub name: String,
    /// The valid names.
    pub candidates: Vec<String>,
}

impl Axis for Alloc {
    const KEY: &'static str = "alloc";
    const CHOICES: &'static [Self] = &[
        Self::Identity,
        Self::CachedRbTree,
        Self::Eiovar(None),
        Self::Bitmap,
        Self::BitmapAsPublished,
        Self::TableBitmap,
        Self::FreeBsd,
        Self::FreeBsd14,
        Self::LinuxRcache,
        Self::LinuxMaple,
        Self::Magazine,
        Self::Contiguous,
        Self::Shadow,
        Self::ShadowHybrid,
        Self::ShadowOrMap,
        Self::Pool,
        Self::RingTail,
        Self::RingFree,
        Self::RingTailAsPublished,
    ];

    fn name(self) -> String {
        match self {
            Self::Identity => "identity".into(),
            Self::CachedRbTree => "cached-rbtree".into(),
            Self::Eiovar(None) => "eiovar".into(),
            Self::Eiovar(Some(k)) => format!("eiovar-{k}"),
            Self::Bitmap => "bitmap".into(),
            Self::BitmapAsPublished => "bitmap-paper".into(),
            Self::TableBitmap => "table-bitmap".into(),
            Self::FreeBsd => "freebsd".into(),
            Self::FreeBsd14 => "freebsd-14".into(),
            Self::LinuxRcache => "linux-rcache".into(),
            Self::LinuxMaple => "linux-maple".into(),
            Self::Magazine => "magazine".into(),
            Self::Contiguous => "contiguous".into(),
            Self::Shadow => "shadow".into(),
            Self::ShadowHybrid => "shadow-hybrid".into(),
            Self::ShadowOrMap => "shadow-or-map".into(),
            Self::Pool => "pool".into(),
            Self::RingTail => "ring-tail".into(),
            Self::RingFree => "ring-free".into(),
            Self::RingTailAsPublished => "ring-tail-paper".into(),
        }
    }

    fn names() -> Vec<String> {
        let names = Self::CHOICES.iter().map(|choice| choice.name());
        names.chain(["eiovar-K".into()]).collect()
    }

    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        // Freelists of at most K entries: `eiovar-64`.
        match text.strip_prefix("eiovar-").map(str::parse::<usize>) {
            Some(Ok(k)) if k > 0 => Ok(Self::Eiovar(Some(k))),
            _ => parse_choice(text),
        }
    }
}

/// Implements [`Axis`] for an enum whose variants have one name each.
macro_rules! axis {
    ($axis:ident, $key:literal, $($choice:ident => $name:literal,)+) => {
        impl Axis for $axis {
            const KEY: &'static str = $key;
            const CHOICES: &'static [Self] = &[$(Self::$choice),+];

            fn name(self) -> String {
                match self {
                    $(Self::$choice => $name.into(),)+
                }
            }
        }
    };
}

axis! {
    TableKind, "table",
    None => "none",
    PassThrough => "pass-through",
    StaticRadix => "static-radix",
    Radix => "radix",
    CachedRadix => "cached-radix",
    RadixReclaimAsPublished => "radix-reclaim-paper",
    RadixReclaim => "radix-reclaim",
    Flat => "flat",
    StaticFlat => "static-flat",
    Ring => "ring",
    RingNonCoherent => "ring-non-coherent",
    RingAsPublished => "ring-paper",
    RingNonCoherentAsPublished => "ring-non-coherent-paper",
}

axis! {
    FlushKind, "flush",
    Never => "never",
    PerUnmap => "per-unmap",
    Deferred => "deferred",
    PerCpuQueue => "per-cpu-queue",
    PerWrap => "per-wrap",
    Burst => "burst",
    BurstAsPublished => "burst-paper",
    Descriptor => "descriptor",
    DescriptorAsPublished => "descriptor-paper",
    TransmitBatch => "transmit-batch",
    PerCycle => "per-cycle",
    PerCycleAdaptive => "per-cycle-adaptive",
    PerCycleAsPublished => "per-cycle-paper",
    LastUser => "last-user",
    Optimistic => "optimistic",
    MapCache => "map-cache",
    NeverFree => "never-free",
    PagePool => "page-pool",
    Async => "async",
}

axis! {
    Owner, "owner",
    Kernel => "kernel",
    Host => "host",
    Emulated => "emulated",
    Nested => "nested",
    VirtioIommu => "virtio-iommu",
    VirtioIommuLazy => "virtio-iommu-lazy",
    Pviommu => "pviommu",
    PviommuHopt => "pviommu-hopt",
    Sidecore => "sidecore",
    Xen => "xen",
    XenMulticall => "xen-multicall",
    XenGrant => "xen-grant",
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::Mode;

    #[test]
    fn every_choice_of_every_mode_is_found_by_its_name() {
        for mode in Mode::named() {
            assert_eq!(Alloc::parse(&mode.alloc.name()), Ok(mode.alloc));
            assert_eq!(TableKind::parse(&mode.table.name()), Ok(mode.table));
            assert_eq!(FlushKind::parse(&mode.flush.name()), Ok(mode.flush));
            assert_eq!(Owner::parse(&mode.owner.name()), Ok(mode.owner));
        }
        assert_eq!(Alloc::parse("eiovar-8"), Ok(Alloc::Eiovar(Some(8))));
        for wrong in ["eiovar-0", "eiovar-x", "Eiovar", ""] {
            assert!(Alloc::parse(wrong).is_err(), "{wrong}");
        }
    }
}
