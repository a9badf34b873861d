//! The command-line names of the choices on each axis, as `ringfence modes` prints them and
//! `--mode` takes them.

use std::fmt;

use super::hint;
use crate::modes::{Alloc, FlushKind, Owner, TableKind};

/// A choice that has a name on the command line.
pub trait Axis: Sized + Copy {
    /// The name of the axis: a key of `--mode`.
    const KEY: &'static str;

    /// Returns the name of the choice.
    fn name(self) -> String;

    /// Returns the names that [`Axis::parse`] accepts.
    fn names() -> Vec<String>;

    /// Returns the choice named `text`.
    ///
    /// # Errors
    /// No choice has this name.
    fn parse(text: &str) -> Result<Self, ParseAxisError>;
}

/// The name is not a choice of the axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseAxisError {
    /// The name of the axis.
    pub axis: &'static str,
    /// The unknown name.
    pub name: String,
    /// The valid names.
    pub candidates: Vec<String>,
}

impl fmt::Display for ParseAxisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            axis,
            name,
            candidates,
        } = self;
        write!(
            f,
            "no {axis} is named {name:?}; {}the choices are {}",
            hint(name, candidates),
            candidates.join(", ")
        )
    }
}

impl std::error::Error for ParseAxisError {}

/// Returns the choice in `all` with this name.
fn parse_among<T: Axis>(text: &str, all: &[T]) -> Result<T, ParseAxisError> {
    let found = all.iter().find(|choice| choice.name() == text);
    found.copied().ok_or_else(|| ParseAxisError {
        axis: T::KEY,
        name: text.to_owned(),
        candidates: T::names(),
    })
}

impl Alloc {
    const ALL: &[Self] = &[
        Self::Identity,
        Self::CachedRbTree,
        Self::Eiovar(None),
        Self::Bitmap,
        Self::BitmapAsPublished,
        Self::TableBitmap,
        Self::FreeBsd,
        Self::LinuxRcache,
        Self::Magazine,
        Self::RingTail,
        Self::RingFree,
        Self::RingTailAsPublished,
    ];
}

impl Axis for Alloc {
    const KEY: &'static str = "alloc";

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
            Self::LinuxRcache => "linux-rcache".into(),
            Self::Magazine => "magazine".into(),
            Self::RingTail => "ring-tail".into(),
            Self::RingFree => "ring-free".into(),
            Self::RingTailAsPublished => "ring-tail-paper".into(),
        }
    }

    fn names() -> Vec<String> {
        let mut names: Vec<String> = Self::ALL.iter().map(|choice| choice.name()).collect();
        names.push("eiovar-K".into());
        names
    }

    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        // Freelists of at most K entries: `eiovar-64`.
        match text.strip_prefix("eiovar-").map(str::parse::<usize>) {
            Some(Ok(k)) if k > 0 => Ok(Self::Eiovar(Some(k))),
            _ => parse_among(text, Self::ALL),
        }
    }
}

impl TableKind {
    const ALL: &[Self] = &[
        Self::None,
        Self::PassThrough,
        Self::StaticRadix,
        Self::Radix,
        Self::CachedRadix,
        Self::RadixReclaimAsPublished,
        Self::RadixReclaim,
        Self::Flat,
        Self::Ring,
        Self::RingNonCoherent,
        Self::RingAsPublished,
        Self::RingNonCoherentAsPublished,
    ];
}

impl Axis for TableKind {
    const KEY: &'static str = "table";

    fn name(self) -> String {
        match self {
            Self::None => "none",
            Self::PassThrough => "pass-through",
            Self::StaticRadix => "static-radix",
            Self::Radix => "radix",
            Self::CachedRadix => "cached-radix",
            Self::RadixReclaimAsPublished => "radix-reclaim-paper",
            Self::RadixReclaim => "radix-reclaim",
            Self::Flat => "flat",
            Self::Ring => "ring",
            Self::RingNonCoherent => "ring-non-coherent",
            Self::RingAsPublished => "ring-paper",
            Self::RingNonCoherentAsPublished => "ring-non-coherent-paper",
        }
        .into()
    }

    fn names() -> Vec<String> {
        Self::ALL.iter().map(|choice| choice.name()).collect()
    }

    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        parse_among(text, Self::ALL)
    }
}

impl FlushKind {
    const ALL: &[Self] = &[
        Self::Never,
        Self::PerUnmap,
        Self::Deferred,
        Self::PerCpuQueue,
        Self::PerWrap,
        Self::Burst,
        Self::BurstAsPublished,
        Self::PerCycle,
        Self::PerCycleAdaptive,
        Self::PerCycleAsPublished,
    ];
}

impl Axis for FlushKind {
    const KEY: &'static str = "flush";

    fn name(self) -> String {
        match self {
            Self::Never => "never",
            Self::PerUnmap => "per-unmap",
            Self::Deferred => "deferred",
            Self::PerCpuQueue => "per-cpu-queue",
            Self::PerWrap => "per-wrap",
            Self::Burst => "burst",
            Self::BurstAsPublished => "burst-paper",
            Self::PerCycle => "per-cycle",
            Self::PerCycleAdaptive => "per-cycle-adaptive",
            Self::PerCycleAsPublished => "per-cycle-paper",
        }
        .into()
    }

    fn names() -> Vec<String> {
        Self::ALL.iter().map(|choice| choice.name()).collect()
    }

    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        parse_among(text, Self::ALL)
    }
}

impl Owner {
    const ALL: &[Self] = &[
        Self::Kernel,
        Self::Host,
        Self::VirtioIommu,
        Self::Pviommu,
        Self::PviommuHopt,
    ];
}

impl Axis for Owner {
    const KEY: &'static str = "owner";

    fn name(self) -> String {
        match self {
            Self::Kernel => "kernel",
            Self::Host => "host",
            Self::VirtioIommu => "virtio-iommu",
            Self::Pviommu => "pviommu",
            Self::PviommuHopt => "pviommu-hopt",
        }
        .into()
    }

    fn names() -> Vec<String> {
        Self::ALL.iter().map(|choice| choice.name()).collect()
    }

    fn parse(text: &str) -> Result<Self, ParseAxisError> {
        parse_among(text, Self::ALL)
    }
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
