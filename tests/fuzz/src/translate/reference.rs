//! The permitted answers of a unit with caches: all results of a walk over memory as it was since
//! the last invalidation.

use std::collections::BTreeSet;

use ringfence_pgtable::{
    Context, Cursor, Format, Levels, SecondStage, TranslationType, find_context, walk,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, Fault, FaultReason, Invalidation, Iova, IovaRange, PageSize,
    Pfn, PhysAddr, PhysRange, RequesterId,
};

use super::history::{History, PAGE_BYTES, Time, View};

/// Maximum number of combinations to try; beyond it, any answer is permitted.
const WAYS: usize = 256;

/// Operations on the unit that invalidate caches.
#[derive(Default)]
pub(super) struct Log {
    root: Option<PhysAddr>,
    /// Time of the last programming of the root register, which drops all cached entries.
    programmed: Time,
    invalidations: Vec<(Time, Invalidation)>,
}

/// Age limit of cached entries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// Entries since the last invalidation. If `whole`, every invalidation purges all translations.
    Cached { whole: bool },
    /// The unit has no caches.
    None,
}

impl Log {
    pub(super) fn program(&mut self, now: Time, root: PhysAddr) {
        self.root = Some(root);
        self.programmed = now;
    }

    pub(super) fn invalidate(&mut self, now: Time, request: Invalidation) {
        self.invalidations.push((now, request));
    }

    /// Returns the time of the last drop of `device`'s context.
    fn context_since(&self, device: RequesterId) -> Time {
        self.last(|request| *request == Invalidation::Context(device))
    }

    /// Returns the time of the last drop of all entries cached for `page` of `domain`, and that of
    /// the last drop of its leaf.
    fn since(&self, whole: bool, domain: DomainId, page: Pfn) -> (Time, Time) {
        let covers = |request: &Invalidation, wanted: &[CachedLevels]| match request {
            Invalidation::Global => true,
            _ if whole => true,
            Invalidation::Domain(purged) => *purged == domain,
            Invalidation::Pages {
                domain: purged,
                range,
                levels,
            } => {
                *purged == domain
                    && range.lo() <= page
                    && page <= range.hi()
                    && wanted.contains(levels)
            }
            _ => false,
        };
        let all = self.last(|request| covers(request, &[CachedLevels::All]));
        let leaf = self.last(|request| covers(request, &[CachedLevels::All, CachedLevels::Leaves]));
        (all, leaf)
    }

    fn last(&self, is_meant: impl Fn(&Invalidation) -> bool) -> Time {
        self.invalidations
            .iter()
            .rev()
            .find(|(_, request)| is_meant(request))
            .map_or(self.programmed, |(time, _)| (*time).max(self.programmed))
    }
}

/// A reference for one access.
pub(super) struct Reference<'a> {
    pub(super) history: &'a History,
    pub(super) log: &'a Log,
    pub(super) devices: &'a [RequesterId],
    pub(super) now: Time,
    pub(super) caches: Memory,
}

/// Possible results for a page: the address of its byte, or the reason to stop.
type Page = BTreeSet<Result<PhysAddr, FaultReason>>;

/// An access to a unit that is switched on.
pub(super) struct Asked {
    pub(super) device: RequesterId,
    pub(super) iova: Iova,
    pub(super) bytes: u64,
    pub(super) access: Access,
}

impl Reference<'_> {
    /// Returns true if `answer` is permitted. More than [`WAYS`] combinations permit any answer.
    pub(super) fn allows(&self, asked: &Asked, answer: &Result<Vec<PhysRange>, Fault>) -> bool {
        let Some(range) = IovaRange::new(asked.iova, asked.bytes) else {
            return stopped_at(answer, asked.iova, FaultReason::BadLength);
        };
        let Some(contexts) = self.contexts(asked.device) else {
            return true;
        };
        contexts.into_iter().any(|context| match context {
            Err(reason) => stopped_at(answer, asked.iova, reason),
            Ok(context) => self.under(context, asked, &range, answer),
        })
    }

    /// Returns the contexts that the unit may have for a device. Absent contexts are never cached.
    fn contexts(&self, device: RequesterId) -> Option<Vec<Result<Context, FaultReason>>> {
        let Some(root) = self.log.root else {
            return Some(vec![Err(FaultReason::Blocked)]);
        };
        let since = match self.caches {
            Memory::Cached { .. } => self.log.context_since(device),
            Memory::None => self.now,
        };
        let mut found = Vec::new();
        let view = View::new(self.history, since);
        let complete = view.every(WAYS, |view| {
            if let Ok(context) = context(view, root, device) {
                found.push(Ok(context));
            }
        });
        View::new(self.history, self.now).every(1, |view| {
            if let Err(reason) = context(view, root, device) {
                found.push(Err(reason));
            }
        });
        complete.then_some(found)
    }

    fn under(
        &self,
        context: Context,
        asked: &Asked,
        range: &IovaRange,
        answer: &Result<Vec<PhysRange>, Fault>,
    ) -> bool {
        let beyond = FaultReason::AddressBeyondWidth;
        let (TranslationType::Table { levels, .. } | TranslationType::PassThrough { levels }) =
            context.translation
        else {
            return false;
        };
        let highest = Iova::new((1 << levels.width()) - 1);
        if asked.iova > highest {
            return stopped_at(answer, asked.iova, beyond);
        }
        if let TranslationType::PassThrough { .. } = context.translation {
            if range.last() > highest {
                return stopped_at(answer, highest.wrapping_add(1), beyond);
            }
            let start = PhysAddr::new(asked.iova.get());
            let same = PhysRange::new(start, asked.bytes).expect("as long as the range");
            return *answer == Ok(vec![same]);
        }
        if asked.bytes > ringfence_hw::MAX_TRANSLATED_BYTES {
            return stopped_at(answer, asked.iova, FaultReason::BadLength);
        }
        let mut done = 0;
        let mut at = asked.iova;
        loop {
            let pages = if at > highest {
                Page::from([Err(beyond)])
            } else {
                match self.page(context, at, asked.access) {
                    Some(pages) => pages,
                    None => return true,
                }
            };
            match answer {
                Err(fault) if fault.iova == at => return pages.contains(&Err(fault.reason)),
                // The fault is at a later page.
                Err(_) => {
                    if !pages.iter().any(Result::is_ok) {
                        return false;
                    }
                }
                Ok(ranges) => {
                    let there = byte(ranges, done);
                    if !there.is_some_and(|there| pages.contains(&Ok(there))) {
                        return false;
                    }
                }
            }
            let end = Iova::new(at.get() | (PAGE_BYTES - 1)).min(range.last());
            done += end.get() - at.get() + 1;
            if end == range.last() {
                return answer.is_ok();
            }
            at = end.wrapping_add(1);
        }
    }

    /// Returns the possible results for a page; `None` if there are too many combinations.
    fn page(&self, own: Context, at: Iova, access: Access) -> Option<Page> {
        let (all, leaf) = match self.caches {
            Memory::Cached { whole } => self.log.since(whole, own.domain, Pfn::containing(at)),
            Memory::None => (self.now, self.now),
        };
        let mut found = Page::new();
        let mut look = |context: Context| {
            let TranslationType::Table { root, levels } = context.translation else {
                return true;
            };
            if at.get() >> levels.width() != 0 {
                return true;
            }
            let format = format(levels);
            View::new(self.history, all).every(WAYS, |view| {
                let end = walk(&format, view, Cursor::root(&format, root), at, |_| {});
                match end {
                    Ok(page) if view.last_held(leaf) && page.permissions.allows(access) => {
                        found.insert(Ok(page.translate(at)));
                    }
                    // The unit may have cached an entry that permits only the other kind of access.
                    Ok(_) if view.last_held(leaf) => {
                        found.insert(Err(match access {
                            Access::Read => FaultReason::ReadDenied,
                            Access::Write => FaultReason::WriteDenied,
                        }));
                    }
                    // The upper levels may come from a cache, but a missing entry is never cached.
                    Err(error) if view.last_is_present() => {
                        found.insert(Err(error.kind.fault_reason(access)));
                    }
                    _ => {}
                }
            })
        };
        let mut complete = look(own);
        let mut looked = true;
        // Cached entries are tagged by domain. If several devices share a domain, the walk of any
        // of them may have cached the entry.
        if self.caches != Memory::None
            && let Some(root) = self.log.root
        {
            for device in self.devices {
                let view = View::new(self.history, self.log.programmed);
                complete &= view.every(WAYS, |view| {
                    if let Ok(context) = context(view, root, *device)
                        && context.domain == own.domain
                        && context != own
                    {
                        looked &= look(context);
                    }
                });
            }
        }
        (complete && looked).then_some(found)
    }
}

/// Returns the context of a device, or the reason for the unit to refuse it.
fn context(view: &View<'_>, root: PhysAddr, device: RequesterId) -> Result<Context, FaultReason> {
    let context = find_context(view, root, device).map_err(|error| error.fault_reason())?;
    match context.translation {
        // A context of another kind of unit.
        TranslationType::Rings { .. } => Err(FaultReason::ContextInvalid),
        // Untranslated requests do not depend on the device TLB.
        TranslationType::DeviceTlb { root, levels, .. } => Ok(Context {
            translation: TranslationType::Table { root, levels },
            ..context
        }),
        _ => Ok(context),
    }
}

/// The unit accepts all page sizes.
fn format(levels: Levels) -> impl Format {
    SecondStage::new(levels).with_pages_up_to(PageSize::Size1G)
}

fn stopped_at(answer: &Result<Vec<PhysRange>, Fault>, iova: Iova, reason: FaultReason) -> bool {
    matches!(answer, Err(fault) if (fault.iova, fault.reason) == (iova, reason))
}

/// Returns the address of byte `index` of several ranges.
fn byte(ranges: &[PhysRange], mut index: u64) -> Option<PhysAddr> {
    for range in ranges {
        let bytes = range.last().get() - range.start().get() + 1;
        if index < bytes {
            return Some(PhysAddr::new(range.start().get() + index));
        }
        index -= bytes;
    }
    None
}
