//! Modes that a user composes: `alloc=magazine,table=radix,flush=burst`.

mod axes;
mod suggest;

pub use axes::{Axis, ParseAxisError};
pub use suggest::hint;

use std::fmt;

use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};

/// The reason why a composition is not a mode.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComposeError {
    /// A part has no `axis=choice` form.
    NotKeyValue(String),
    /// The key is not one of the four axes.
    NoSuchAxis(String),
    /// The composition gives an axis twice.
    Twice(&'static str),
    /// The composition lacks an axis.
    Missing(&'static str),
    /// The axis has no such choice.
    NoSuchValue(ParseAxisError),
    /// The choices do not fit together.
    Unsupported {
        /// The composition, as the user wrote it.
        mode: String,
        /// The reason, as a sentence.
        reason: &'static str,
    },
}

impl fmt::Display for ComposeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotKeyValue(part) => {
                write!(
                    f,
                    "{part:?} is no answer; write alloc=...,table=...,flush=..."
                )?;
                match Mode::find(part) {
                    Some(_) => write!(f, ", or --modes {part} for the mode of that name"),
                    None => Ok(()),
                }
            }
            Self::NoSuchAxis(key) => {
                write!(
                    f,
                    "no question is called {key:?}; there are alloc, table, flush, who"
                )
            }
            Self::Twice(key) => write!(f, "{key} is answered twice"),
            Self::Missing(key) => write!(f, "{key} is not answered"),
            Self::NoSuchValue(e) => e.fmt(f),
            Self::Unsupported { mode: row, reason } => write!(f, "{row} makes no sense: {reason}"),
        }
    }
}

impl std::error::Error for ComposeError {}

impl From<ParseAxisError> for ComposeError {
    fn from(e: ParseAxisError) -> Self {
        Self::NoSuchValue(e)
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
    let (mut alloc, mut table, mut flush, mut who) = (None, None, None, None);
    for part in row.split(',') {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| ComposeError::NotKeyValue(part.to_owned()))?;
        match key.trim() {
            Alloc::KEY => set::<Alloc>(&mut alloc, value.trim())?,
            TableKind::KEY => set::<TableKind>(&mut table, value.trim())?,
            FlushKind::KEY => set::<FlushKind>(&mut flush, value.trim())?,
            Owner::KEY => set::<Owner>(&mut who, value.trim())?,
            other => return Err(ComposeError::NoSuchAxis(other.to_owned())),
        }
    }
    let alloc = alloc.ok_or(ComposeError::Missing(Alloc::KEY))?;
    let table = table.ok_or(ComposeError::Missing(TableKind::KEY))?;
    let flush = flush.ok_or(ComposeError::Missing(FlushKind::KEY))?;
    let who = who.unwrap_or(Owner::Kernel);
    if let Some(reason) = senseless(alloc, table, flush).or(misplaced(alloc, table, flush, who)) {
        return Err(ComposeError::Unsupported {
            mode: row.to_owned(),
            reason,
        });
    }
    let named = Mode::named().into_iter().find(|mode| {
        (mode.alloc, mode.table, mode.flush, mode.owner) == (alloc, table, flush, who)
    });
    Ok(named.unwrap_or_else(|| Mode {
        name: match who {
            Owner::Kernel => format!("{}/{}/{}", alloc.name(), table.name(), flush.name()),
            who => {
                let (alloc, table) = (alloc.name(), table.name());
                format!("{alloc}/{table}/{}/{}", flush.name(), who.name())
            }
        },
        alloc,
        table,
        flush,
        owner: who,
        about: "composed on the command line",
    }))
}

/// Returns the reason why these choices do not fit together; `None` if they do.
fn senseless(alloc: Alloc, table: TableKind, flush: FlushKind) -> Option<&'static str> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    let fixed = matches!(table, T::None | T::PassThrough | T::StaticRadix);
    let ring_alloc = matches!(alloc, A::RingTail | A::RingFree | A::RingTailAsPublished);
    let literal_table = matches!(table, T::RingAsPublished | T::RingNonCoherentAsPublished);
    let ring_table = literal_table || matches!(table, T::Ring | T::RingNonCoherent);
    if ring_alloc || ring_table || flush == F::BurstAsPublished {
        let literals = [
            alloc == A::RingTailAsPublished,
            literal_table,
            flush == F::BurstAsPublished,
        ];
        return match (ring_alloc && ring_table, literals, flush) {
            (false, ..) => Some(
                "an address of a ring is its slot, and its table holds nothing but slots; a ring's \
                alloc goes with a ring's table",
            ),
            (_, [true, true, true], _) | (_, [false, false, false], F::PerUnmap | F::Burst) => None,
            (_, [false, false, false], _) => Some(
                "slots would stay away for longer than a ring lasts; rings go with flush=burst or \
                per-unmap",
            ),
            _ => Some(
                "the figures of rIOMMU are literal in alloc, table and flush alike, or in none",
            ),
        };
    }
    match (alloc, flush) {
        (A::Identity, _) if !fixed => Some(
            "the address is the physical one, so two buffers on one page would share an entry; \
             identity goes with table none, pass-through or static-radix",
        ),
        (A::Identity, F::Never) => None,
        (A::Identity, _) => Some(
            "nothing is unmapped, so there is nothing to invalidate; identity goes with \
            flush=never",
        ),
        _ if fixed => Some(
            "the table never changes, so an allocated address would lead nowhere; use \
            alloc=identity",
        ),
        (_, F::Never) => {
            Some("addresses could never be used again: their old translations live on")
        }
        (_, flush)
            if flush != F::PerUnmap && matches!(table, T::RadixReclaim | T::RadixReclaimPage) =>
        {
            Some(
                "a table page would be given back while the walk caches still lead to it; \
                reclaiming goes with flush=per-unmap",
            )
        }
        (A::TableBitmap, _) if table != T::Flat => {
            Some("its bits are the entries of the flat table; use table=flat, or alloc=bitmap")
        }
        (A::Bitmap | A::BitmapAsPublished | A::TableBitmap, F::PerWrap) => None,
        (_, F::PerWrap) => {
            Some("only the bitmaps hand out every address once before they hand one out again")
        }
        (A::BitmapAsPublished, _) => Some(
            "the literal bitmap differs from the bitmap only in what it reuses before a wrap's \
            flush; use alloc=bitmap",
        ),
        _ => None,
    }
}

/// Returns the reason why the owner does not fit the other choices; `None` if it does.
fn misplaced(alloc: Alloc, table: TableKind, flush: FlushKind, who: Owner) -> Option<&'static str> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    let cached = matches!(
        flush,
        F::PerCycle | F::PerCycleAdaptive | F::PerCycleAsPublished
    );
    match (who, alloc, table, flush) {
        _ if cached && !who.is_pviommu() => Some(
            "only the para-virtual IOMMU's frontend has a cache that keeps what is unmapped; use \
            who=pviommu or pviommu-hopt",
        ),
        (Owner::Kernel, ..) | (Owner::Host, A::Identity, T::StaticRadix, _) => None,
        (Owner::Host, ..) => Some(
            "nobody asks the host, so all that it can do is map all memory, once; who=host goes \
            with alloc=identity,table=static-radix",
        ),
        (Owner::Pviommu | Owner::PviommuHopt, _, _, F::Deferred | F::PerCpuQueue) => Some(
            "the guest waits for its unmaps at every map and unmap, so deferring their flush would \
            defer nothing; use flush=per-unmap or burst",
        ),
        (_, _, T::Radix, F::PerWrap) => Some(
            "the host invalidates what it unmaps, so a wrap leaves nothing to flush; use \
            flush=per-unmap or per-cpu-queue",
        ),
        (_, _, T::Radix, _) => None,
        (_, A::Identity, ..) => Some(
            "nothing is mapped, so there is nothing to ask the host for; a host is asked with an \
            allocator and table=radix",
        ),
        _ => Some("the table is the host's, which keeps a radix table; use table=radix"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_named_modes_keep_their_names() {
        for mode in Mode::named() {
            let row = format!(
                "alloc={},table={},flush={},who={}",
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
        let mode = compose("flush=burst,alloc=eiovar-8,table=radix,who=virtio-iommu").unwrap();
        assert_eq!(mode.name, "eiovar-8/radix/burst/virtio-iommu");
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_a_reason() {
        use ComposeError as E;
        let senseless = [
            "alloc=identity,table=radix,flush=never",
            "alloc=identity,table=none,flush=per-unmap",
            "alloc=magazine,table=none,flush=per-unmap",
            "alloc=magazine,table=radix,flush=never",
            "alloc=magazine,table=radix,flush=per-wrap",
            "alloc=bitmap-literal,table=radix,flush=deferred",
            "alloc=bitmap,table=radix-reclaim,flush=per-wrap",
            "alloc=magazine,table=radix-reclaim-page,flush=burst",
            "alloc=table-bitmap,table=radix,flush=per-unmap",
            "alloc=identity,table=flat,flush=never",
            "alloc=bitmap-literal,table=flat,flush=burst",
            "alloc=ring-tail,table=radix,flush=burst",
            "alloc=magazine,table=ring,flush=burst",
            "alloc=identity,table=ring,flush=never",
            "alloc=ring-free,table=ring,flush=deferred",
            "alloc=ring-tail-literal,table=ring,flush=burst",
            "alloc=ring-tail,table=ring,flush=burst-literal",
            "alloc=ring-tail,table=ring-literal,flush=burst",
            "alloc=magazine,table=radix,flush=burst-literal",
            "alloc=magazine,table=radix,flush=burst,who=host",
            "alloc=identity,table=none,flush=never,who=host",
            "alloc=identity,table=static-radix,flush=never,who=virtio-iommu",
            "alloc=bitmap,table=radix,flush=per-wrap,who=virtio-iommu",
            "alloc=magazine,table=cached-radix,flush=per-unmap,who=virtio-iommu",
            "alloc=ring-tail,table=ring,flush=burst,who=virtio-iommu",
            "alloc=magazine,table=radix,flush=per-cpu-queue,who=pviommu",
            "alloc=identity,table=none,flush=never,who=pviommu",
            "alloc=linux-rcache,table=radix,flush=deferred,who=pviommu-hopt",
            "alloc=linux-rcache,table=radix,flush=per-cycle",
            "alloc=linux-rcache,table=radix,flush=per-cycle-literal,who=virtio-iommu",
        ];
        for row in senseless {
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
