//! The expected outcome of a class on a mode, from the mode's properties.
//!
//! The table has a row for each class and a column for each kind of mode, as the project's attack
//! matrix has. A mode's kind follows from its axes, so a new mode needs no row. [`DEPARTURES`]
//! lists the cells where the modes of this program differ from the matrix, and the reasons.

use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::{FlushKind, Mode, Safety, TableKind};
use serde::Serialize;

use crate::departures::as_published;
pub use crate::departures::{DEPARTURES, Departure};

/// A column of the attack matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The device uses physical addresses.
    None,
    /// Unmap invalidates before the driver gets the buffer back.
    Strict,
    /// Unmaps wait in a queue for an invalidation, up to a bound.
    Deferred,
    /// All memory is mapped in advance.
    Persistent,
    /// Flat tables of a ring IOMMU.
    Ring,
    /// Buffers of a page share a mapping, which the unmap of the last user invalidates.
    Shared,
    /// Released mappings stay in a cache.
    Cached,
    /// The device uses copies, in memory that stays mapped.
    Copy,
    /// The driver's buffers are in memory that stays mapped and holds nothing else. The device may
    /// change released ones; the driver uses only bytes that it has copied.
    OwnPool,
}

impl Kind {
    /// All kinds, in the order of the matrix's columns.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Strict,
        Self::Deferred,
        Self::Shared,
        Self::Persistent,
        Self::Ring,
        Self::Cached,
        Self::Copy,
        Self::OwnPool,
    ];

    /// Returns the kind of `mode`.
    pub fn of(mode: &Mode) -> Self {
        if !mode.translates() {
            return match mode.table {
                TableKind::StaticRadix | TableKind::StaticFlat => Self::Persistent,
                _ => Self::None,
            };
        }
        if mode.has_pool() {
            return match mode.safety() {
                Safety::OwnPool => Self::OwnPool,
                _ => Self::Copy,
            };
        }
        if mode.has_rings() {
            return Self::Ring;
        }
        let is_cached = mode.flush.has_cache();
        match mode.safety() {
            Safety::Strict | Safety::ByteGranular if is_cached => Self::Shared,
            _ if is_cached => Self::Cached,
            Safety::Strict | Safety::ByteGranular => Self::Strict,
            Safety::OwnPool | Safety::Bounded | Safety::None => Self::Deferred,
        }
    }
}

/// The judgement of a cell of the attack matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Letter {
    /// `R`: the mode resists by design.
    Resists,
    /// `R*`: the mode resists if it is implemented with the noted order or check.
    ResistsIfOrdered,
    /// `B`: the attack succeeds up to a bound.
    Bounded,
    /// `V`: the mode is vulnerable by design.
    Vulnerable,
    /// `V*`: the mode is vulnerable as published.
    VulnerableAsPublished,
    /// `X`: no translation mode resists; another mechanism does.
    Orthogonal,
    /// `NA`: the class cannot occur.
    NotApplicable,
}

/// An expected outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// No attempt succeeds.
    Stopped,
    /// Some attempt succeeds.
    Succeeded,
    /// The class cannot occur in this mode.
    NotApplicable,
}

/// A row of the matrix: a class, and its judgement for each [`Kind`] in the order of [`Kind::ALL`].
type Row = (&'static str, [Letter; 9]);

#[rustfmt::skip]
const ROWS: [Row; 38] = {
    use Letter::{
        Bounded as B, NotApplicable as NA, Orthogonal as X, Resists as R, ResistsIfOrdered as RS,
        Vulnerable as V, VulnerableAsPublished as VS,
    };
    [
    //        none strict deferred shared persistent ring cached copy own-pool
    ("A01", [V,   R,   R,   R,   B,   R,   R,    R,    R]),
    ("A02", [V,   R,   V,   B,   V,   B,   V,    R,    V]),
    ("A03", [V,   R,   R,   B,   V,   R,   V,    R,    V]),
    ("A04", [NA,  R,   RS,  RS,  NA,  B,   R,    R,    R]),
    ("A05", [V,   R,   V,   B,   V,   B,   V,    R,    V]),
    ("A06", [V,   R,   R,   B,   V,   R,   VS,   R,    R]),
    ("A07", [V,   V,   V,   V,   V,   R,   V,    R,    R]),
    ("A08", [V,   V,   V,   V,   V,   R,   V,    R,    R]),
    ("A09", [V,   V,   V,   V,   V,   R,   V,    R,    R]),
    ("A10", [V,   V,   V,   B,   V,   V,   B,    R,    R]),
    ("A11", [V,   R,   R,   R,   B,   R,   R,    R,    R]),
    ("A12", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A13", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A14", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A15", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A16", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A17", [V,   RS,  V,   V,   V,   B,   V,    R,    R]),
    ("A18", [V,   X,   X,   X,   X,   X,   X,    X,    X]),
    ("A19", [V,   B,   B,   B,   V,   RS,  B,    R,    R]),
    ("A20", [NA,  RS,  B,   RS,  NA,  NA,  RS,   NA,   NA]),
    ("A21", [NA,  RS,  RS,  RS,  NA,  RS,  RS,   RS,   V]),
    ("A22", [NA,  RS,  RS,  RS,  NA,  RS,  RS,   RS,   RS]),
    ("A23", [V,   RS,  V,   B,   V,   B,   V,    R,    V]),
    ("A24", [NA,  V,   V,   V,   B,   B,   V,    V,    V]),
    ("A25", [NA,  RS,  RS,  RS,  NA,  VS,  RS,   RS,   RS]),
    ("A26", [NA,  NA,  NA,  NA,  NA,  VS,  NA,   NA,   NA]),
    ("A27", [NA,  NA,  NA,  NA,  NA,  B,   NA,   NA,   NA]),
    ("A28", [NA,  NA,  NA,  NA,  NA,  NA,  VS,   NA,   NA]),
    ("A29", [NA,  NA,  NA,  NA,  NA,  NA,  VS,   NA,   NA]),
    ("A30", [NA,  NA,  NA,  NA,  NA,  NA,  RS,   NA,   NA]),
    ("A31", [V,   R,   R,   R,   V,   NA,  R,    R,    R]),
    ("A32", [NA,  RS,  RS,  RS,  V,   RS,  RS,   RS,   RS]),
    ("A33", [NA,  NA,  NA,  NA,  NA,  NA,  VS,   NA,   NA]),
    ("A34", [NA,  V,   V,   V,   V,   R,   V,    RS,   RS]),
    ("A35", [V,   RS,  V,   V,   V,   B,   V,    R,    R]),
    ("A36", [V,   RS,  RS,  RS,  V,   RS,  RS,   RS,   RS]),
    ("A37", [V,   R,   V,   B,   V,   RS,  V,    R,    V]),
    ("A38", [NA,  X,   X,   X,   X,   X,   X,    X,    X]),
    ]
};

/// Returns the judgement of the attack matrix for a class and a kind of mode.
pub fn letter(class: &str, kind: Kind) -> Option<Letter> {
    let (_, letters) = ROWS.iter().find(|(id, _)| *id == class)?;
    let column = Kind::ALL.iter().position(|other| *other == kind)?;
    letters.get(column).copied()
}

/// An expected outcome, with the reason if it differs from the attack matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expectation {
    /// Outcome that the mode's properties predict.
    pub outcome: Outcome,
    /// Reason of a departure from the attack matrix.
    pub departure: Option<&'static str>,
}

/// Returns the expected outcome of a class on a mode; `None` for an unknown class.
///
/// For a class that needs another mechanism (`X`), the outcome is that without the mechanism.
pub fn expected(class: &str, mode: &Mode) -> Option<Expectation> {
    let mut departures = DEPARTURES.iter();
    if let Some(departure) =
        departures.find(|departure| departure.class == class && (departure.applies)(mode))
    {
        return Some(Expectation {
            outcome: departure.outcome,
            departure: Some(departure.reason),
        });
    }
    let outcome = match letter(class, Kind::of(mode))? {
        Letter::Resists | Letter::ResistsIfOrdered => Outcome::Stopped,
        Letter::VulnerableAsPublished if !as_published(mode) => Outcome::Stopped,
        Letter::NotApplicable => Outcome::NotApplicable,
        _ => Outcome::Succeeded,
    };
    Some(Expectation {
        outcome,
        departure: None,
    })
}

/// The stated bound of a window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bound {
    /// Time since the release, in nanoseconds.
    pub ns: Option<u64>,
    /// Unmaps of other buffers since the release.
    pub unmaps: Option<u64>,
}

/// Returns the bound of the mode's windows, in the units that the window classes measure.
pub fn bound(mode: &Mode) -> Bound {
    let timer = Some(10_000_000);
    match mode.flush {
        FlushKind::Deferred => Bound {
            ns: timer,
            unmaps: Some(250),
        },
        FlushKind::PerCpuQueue => Bound {
            ns: timer,
            unmaps: Some(256),
        },
        FlushKind::PerWrap => Bound {
            ns: None,
            unmaps: Some(1 << 20),
        },
        FlushKind::DescriptorAsPublished => Bound {
            ns: None,
            unmaps: Some(64),
        },
        FlushKind::Async => Bound {
            ns: None,
            unmaps: Some(64),
        },
        FlushKind::Optimistic => Bound {
            ns: Some(4_000_000),
            unmaps: None,
        },
        FlushKind::PerCycle | FlushKind::PerCycleAdaptive => Bound {
            ns: Some(CycleParams::PAPER.bound_ns()),
            unmaps: None,
        },
        _ => Bound::default(),
    }
}
