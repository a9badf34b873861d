//! Maps a mode to the types that implement it on an IOMMU beside VT-d. Only the modes that
//! [`Mode::not_on`] permits are built, to bound the compile time.

use ringfence_dma::flush::{Burst, Strict};

use crate::components::{
    ModeParts, dyn_alloc, family_cached_radix, family_radix, magazine, rcache,
};
use crate::error::LabError;
use crate::iommu_family::IommuFamily;
use crate::mode_dispatch::per_cpu_queue;
use crate::mode_dispatch::{IdentityKind, ModeVisitor, dispatch, dispatch_dyn};
use crate::modes::{Alloc, FlushKind, Mode, TableKind};
use crate::shadow::ShadowParts;

/// Calls `visitor` with the static types of `mode` on `family`, for timed replays.
///
/// # Errors
/// The mode is not built in for the family.
pub(crate) fn dispatch_on<V: ModeVisitor>(
    family: IommuFamily,
    mode: &Mode,
    visitor: V,
) -> Result<V::Output, LabError> {
    use {Alloc as A, FlushKind as F, ModeParts as P, TableKind as T};
    if family == IommuFamily::Vtd {
        return dispatch(mode, visitor);
    }
    let visitor = match without_alloc(family, mode, visitor) {
        Ok(output) => return output,
        Err(visitor) => visitor,
    };
    let plain = family_radix(family, mode.page_size);
    let cached = family_cached_radix(family, mode.page_size);
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::LinuxRcache, T::Radix, F::PerUnmap) => {
            visitor.paged(P::new(mode, rcache, plain, || Strict))
        }
        (A::LinuxRcache, T::Radix, F::PerCpuQueue) => {
            visitor.paged(P::new(mode, rcache, plain, per_cpu_queue))
        }
        (A::Magazine, T::CachedRadix, F::PerUnmap) => {
            visitor.paged(P::new(mode, magazine, cached, || Strict))
        }
        (A::Magazine, T::CachedRadix, F::Burst) => {
            visitor.paged(P::new(mode, magazine, cached, Burst::default))
        }
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    })
}

/// Calls `visitor` with the types that modes share on `family`, for replays under the oracle.
///
/// # Errors
/// The mode is not built in for the family.
pub(crate) fn dispatch_dyn_on<V: ModeVisitor>(
    family: IommuFamily,
    mode: &Mode,
    visitor: V,
) -> Result<V::Output, LabError> {
    use {FlushKind as F, ModeParts as P, TableKind as T};
    if family == IommuFamily::Vtd {
        return dispatch_dyn(mode, visitor);
    }
    let visitor = match without_alloc(family, mode, visitor) {
        Ok(output) => return output,
        Err(visitor) => visitor,
    };
    let plain = family_radix(family, mode.page_size);
    let cached = family_cached_radix(family, mode.page_size);
    Ok(match (mode.table, mode.flush) {
        (T::Radix, F::PerUnmap) => visitor.paged(P::new(mode, dyn_alloc, plain, || Strict)),
        (T::Radix, F::PerCpuQueue) => visitor.paged(P::new(mode, dyn_alloc, plain, per_cpu_queue)),
        (T::CachedRadix, F::PerUnmap) => visitor.paged(P::new(mode, dyn_alloc, cached, || Strict)),
        (T::CachedRadix, F::Burst) => {
            visitor.paged(P::new(mode, dyn_alloc, cached, Burst::default))
        }
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    })
}

/// Calls `visitor` with a mode whose replays under the oracle and timed ones have the same types.
/// Returns it for other modes.
fn without_alloc<V: ModeVisitor>(
    family: IommuFamily,
    mode: &Mode,
    visitor: V,
) -> Result<Result<V::Output, LabError>, V> {
    if mode.not_on(family).is_some() {
        return Ok(Err(LabError::NotBuilt(mode.name.clone())));
    }
    match mode.alloc {
        Alloc::Identity => Ok(Ok(visitor.identity(IdentityKind::Off))),
        Alloc::Shadow => {
            let table = family_radix(family, mode.page_size);
            Ok(Ok(visitor.shadow(ShadowParts::new(mode, table))))
        }
        _ => Err(visitor),
    }
}
