//! Never: spaces in which nothing is installed per mapping.

use core::mem::ManuallyDrop;

use ringfence_types::InvalidationError;

use super::{Flush, Home, ReleasedStale, Retiring};
use crate::space::{Space, Untouched};
use crate::{Owed, Platform};

/// No translation ever dies: no IOMMU, pass-through, static table. The buffer is back at once, and stays reachable.
#[derive(Debug, Clone, Copy, Default)]
pub struct Never;

impl<S: Space<Gone = Untouched>, B> Flush<S, B> for Never {
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = ReleasedStale<B>;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    #[inline]
    fn retire<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        _home: Home<'_, S>,
        _platform: &mut P,
        item: Retiring<S, B>,
    ) -> Result<ReleasedStale<B>, (InvalidationError, Owed<B>)> {
        Ok(ReleasedStale(ManuallyDrop::into_inner(item.buffer)))
    }
}
