//! The modes to which large entries and a prefetch apply.

use ringfence_types::PageSize;

use crate::IotlbPrefetch;
use crate::modes::{Mode, Owner, TableKind};

impl Mode {
    /// Returns the mode with leaves of up to `size` in tables that the kernel fills at each map.
    #[must_use]
    pub fn with_page_size(mut self, size: PageSize) -> Self {
        self.page_size = size;
        self
    }

    /// Returns the reason why the page size of the mode does not apply to its table; `None` if it
    /// applies.
    pub fn without_large_entries(&self) -> Option<&'static str> {
        use TableKind as T;
        Some(match (self.owner, self.table) {
            _ if self.has_rings() => "a ring has no pages",
            (_, T::None | T::PassThrough) => "no table translates",
            (_, T::StaticRadix) => "all memory is already mapped in pages of 2 MiB",
            (_, T::Flat | T::StaticFlat) => "a Calgary table has entries of 4 KiB only",
            (_, T::RadixReclaim | T::RadixReclaimAsPublished) => {
                "the table that frees its pages is modelled with entries of 4 KiB"
            }
            (Owner::Kernel | Owner::Sidecore, _) => return None,
            _ => "the tables of a host are modelled with entries of 4 KiB",
        })
    }

    /// Returns the reason why `prefetch` does not apply to the unit of the mode; `None` if it
    /// applies.
    pub fn without_prefetch(&self, prefetch: IotlbPrefetch) -> Option<&'static str> {
        use TableKind as T;
        let hint = prefetch == IotlbPrefetch::HintAtMap;
        Some(match (self.owner, self.table) {
            _ if self.has_rings() => "a ring has its own prefetch",
            (_, T::None | T::PassThrough) => "no table translates",
            (_, T::Flat | T::StaticFlat) => "the Calgary unit is modelled without prefetch",
            (Owner::Nested, _) => "the unit of two stages is modelled without prefetch",
            (Owner::Kernel | Owner::Host | Owner::Sidecore, _) => return None,
            _ if hint => "a guest cannot reach the unit of its host",
            _ => return None,
        })
    }
}
