//! Per unmap: the strict mode of every document (OS09).

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_types::{DrainUnmapped, Flushed, Invalidation, InvalidationError, Pending};

use super::batch::submit_and_release;
use super::{Cleared, Flush, Home, RangeBatch, Released, Retiring};
use crate::space::{Gone, Space, TablePages};
use crate::{Owed, Platform};

/// One invalidation per unmap, waited for before the buffer and the addresses come back (rIOMMU Fig. 6: remove the entry, purge
/// the IOTLB, free the IOVA, hand the buffer up, in this order).
#[derive(Debug, Clone, Copy, Default)]
pub struct Strict;

impl Strict {
    /// Purges what a mapping left in the caches. Table pages of a failed invalidation are given up.
    #[inline]
    pub(crate) fn purge<S: Space, T: TablePages, B, P: Platform>(
        home: &mut Home<'_, S>,
        platform: &mut P,
        cleared: Cleared<B, T>,
    ) -> Result<Released<B>, (InvalidationError, Owed<B>)> {
        let Cleared {
            gone,
            direction,
            tenant,
            buffer,
        } = cleared;
        match home.purge(gone, platform) {
            Ok(()) => Ok(Released(ManuallyDrop::into_inner(buffer))),
            Err((error, gone)) => {
                let cleared = Cleared {
                    gone,
                    direction,
                    tenant,
                    buffer,
                };
                Err((error, Owed { cleared }))
            }
        }
    }
}

impl<S: Space> Home<'_, S> {
    /// Invalidates a cleared range of the space at hand and gives it back.
    ///
    /// # Errors
    /// The range comes back.
    #[inline]
    pub(crate) fn purge<T: TablePages, P: Platform>(
        &mut self,
        gone: Gone<T>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, Gone)> {
        self.sync(platform);
        let request = self.purge_of(&gone);
        gone.invalidate(request, platform)
            .map(|range| self.release(range))
    }
}

impl<T: TablePages> Gone<T> {
    /// Submits `request`, which covers the range, waits for it, and frees the table pages.
    ///
    /// # Errors
    /// What must still be invalidated. Its table pages are given up.
    #[inline]
    pub(crate) fn invalidate<P: Platform>(
        self,
        request: Invalidation,
        platform: &mut P,
    ) -> Result<Flushed, (InvalidationError, Gone)> {
        let levels = self.levels;
        let left = |unmapped| Gone {
            unmapped,
            levels,
            tables: (),
        };
        let batch = ((self.unmapped, levels), self.tables);
        let pending = match Pending::submit(platform.invalidator(), request, batch) {
            Ok(pending) => pending,
            Err((((unmapped, _), _), error)) => return Err((error, left(unmapped))),
        };
        match pending.wait(platform.invalidator()) {
            Ok(flushed) => {
                let (range, tables) = flushed.split();
                T::release(tables, platform);
                Ok(range.split().0)
            }
            Err((pending, error)) => Err((error, left(pending.abandon().0.0))),
        }
    }
}

impl<T: TablePages, S: Space<Gone = Gone<T>>, B> Flush<S, B> for Strict {
    type PerCpu = ();
    type PerDomain = ();
    type Outcome = Released<B>;

    const GATHERS: bool = !T::ANY;

    fn per_domain(&self) {}

    fn per_cpu(&self, (): &()) {}

    #[inline]
    fn retire<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        mut home: Home<'_, S>,
        platform: &mut P,
        item: Retiring<S, B>,
    ) -> Result<Released<B>, (InvalidationError, Owed<B>)> {
        Self::purge(&mut home, platform, item.into_cleared())
    }

    /// One invalidation for all of them; one each where unmap may take table pages away.
    fn retire_many<P: Platform>(
        &self,
        (): &(),
        (): &mut (),
        mut home: Home<'_, S>,
        platform: &mut P,
        items: Vec<Retiring<S, B>>,
        each: impl FnMut(B),
    ) -> Result<(), (InvalidationError, Vec<Owed<B>>)> {
        if T::ANY {
            return one_by_one(home, platform, items, each);
        }
        let mut batch = RangeBatch::with_capacity(items.len());
        let mut buffers = Vec::with_capacity(items.len());
        for item in items {
            let Cleared {
                gone,
                direction,
                tenant,
                buffer,
            } = item.into_cleared();
            batch.push(Gone {
                unmapped: gone.unmapped,
                levels: gone.levels,
                tables: (),
            });
            buffers.push((direction, tenant, buffer));
        }
        if batch.is_empty() {
            return Ok(());
        }
        let levels = batch.levels();
        let request = batch.narrowest(&home);
        let (mut left, result) = submit_and_release(request, batch, &mut home, platform);
        match result {
            Ok(()) => {
                buffers
                    .into_iter()
                    .map(|(.., buffer)| ManuallyDrop::into_inner(buffer))
                    .for_each(each);
                Ok(())
            }
            Err(error) => {
                let mut owed = Vec::with_capacity(buffers.len());
                let mut buffers = buffers.into_iter();
                left.drain_unmapped(|unmapped| {
                    owed.extend(buffers.next().map(|(direction, tenant, buffer)| Owed {
                        cleared: Cleared {
                            gone: Gone {
                                unmapped,
                                levels,
                                tables: (),
                            },
                            direction,
                            tenant,
                            buffer,
                        },
                    }));
                });
                Err((error, owed))
            }
        }
    }
}

#[cold]
fn one_by_one<T: TablePages, S: Space<Gone = Gone<T>>, B, P: Platform>(
    mut home: Home<'_, S>,
    platform: &mut P,
    items: Vec<Retiring<S, B>>,
    mut each: impl FnMut(B),
) -> Result<(), (InvalidationError, Vec<Owed<B>>)> {
    let mut owed = Vec::new();
    let mut failure = None;
    for item in items {
        match Strict::purge(&mut home, platform, item.into_cleared()) {
            Ok(Released(buffer)) => each(buffer),
            Err((error, left)) => {
                failure = Some(error);
                owed.push(left);
            }
        }
    }
    failure.map_or(Ok(()), |error| Err((error, owed)))
}
