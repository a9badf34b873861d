//! The generic DMA path of a kernel to a device in pass-through (`hwpt`, `swpt`).
//!
//! Linux 3.4, which rIOMMU measures, takes these steps for each call of a driver:
//!
//! 1. `get_dma_ops`: the device's operations, or those of the driver of the IOMMU.
//! 2. The indirect call `ops->map_page` or `ops->unmap_page` (`intel_map_page`).
//! 3. `identity_mapping`: the domain of the device, compared with the domain of pass-through.
//! 4. `iommu_should_identity_map`: the device's mask, compared with `dma_get_required_mask`.
//! 5. After a map, `dma_mapping_error`: a second lookup and an indirect call.
//!
//! [`PassThrough`] takes the same steps in front of the layer's own. The mode `none` has no driver
//! of an IOMMU and takes none of them. [`Direction`](ringfence_types::Direction) is valid by its
//! type, so `valid_dma_direction` needs no step.

use std::hint::black_box;

use ringfence_dma::{DmaSegment, MapError, MapReason, NotInvalidated};
use ringfence_trace::{ARENA_BYTES, DeviceIndex};
use ringfence_types::{DomainId, Iova, IovaRange, Nanos, PfnRange, PhysRange, RequesterId};

use super::{
    ContextTarget, DmaOps, HasPlatform, LayerPlatform, Mapped, MappingToken, OpKey, Refusal,
    SpaceTraits, UnmapOutcome,
};
use crate::error::LabError;

/// `DMA_MAPPING_ERROR`: the address that stands for a failed map.
const MAPPING_ERROR: Iova = Iova::new(u64::MAX);

/// Operations of a device: the entries of `struct dma_map_ops` that a streaming mapping uses.
struct MapOps<L: 'static> {
    map: MapPage<L>,
    mapping_error: fn(&MappingToken) -> bool,
    unmap: fn(&mut L, &IommuDriver, &Device<L>, OpKey, MappingToken) -> UnmapOutcome,
}

type MapPage<L> =
    fn(&mut L, &IommuDriver, &Device<L>, OpKey, u64, &[PhysRange]) -> Result<Mapped, MapError>;

/// A device as the generic code knows it.
struct Device<L: 'static> {
    id: RequesterId,
    domain: DomainId,
    /// Highest address that the device can issue.
    mask: u64,
    /// The device's own operations; `None` for those of the driver of the IOMMU.
    ops: Option<&'static MapOps<L>>,
}

/// State of the driver of the IOMMU.
#[derive(Debug)]
struct IommuDriver {
    /// Highest address of memory.
    last_byte: u64,
    /// By domain: true if it maps all memory to itself.
    pass_through: Vec<bool>,
}

impl IommuDriver {
    /// Returns true if accesses of `device` pass through: its domain is the static one, and its
    /// mask reaches all memory.
    #[inline]
    fn is_pass_through<L: 'static>(&self, device: &Device<L>) -> bool {
        let domain_index = usize::from(device.domain.get());
        let is_static = self.pass_through.get(domain_index) == Some(&true);
        let required = u64::MAX.unbounded_shr(self.last_byte.leading_zeros());
        is_static && device.mask >= required
    }
}

/// A layer behind the generic DMA path.
pub struct PassThrough<L: 'static> {
    layer: L,
    iommu: IommuDriver,
    devices: Vec<Option<Device<L>>>,
    /// Operations of devices without their own.
    ops: &'static MapOps<L>,
}

#[inline(never)]
fn map_page<L: DmaOps + 'static>(
    layer: &mut L,
    iommu: &IommuDriver,
    device: &Device<L>,
    key: OpKey,
    buffer: u64,
    pieces: &[PhysRange],
) -> Result<Mapped, MapError> {
    if !iommu.is_pass_through(device) {
        // Linux moves the device to a domain with translations. These modes have none.
        return Err(beyond_mask(device.id, pieces));
    }
    layer.map(key, buffer, pieces)
}

#[inline(never)]
fn mapping_error(token: &MappingToken) -> bool {
    token
        .range()
        .is_some_and(|range| range.start() == MAPPING_ERROR)
}

#[inline(never)]
fn unmap_page<L: DmaOps + 'static>(
    layer: &mut L,
    iommu: &IommuDriver,
    device: &Device<L>,
    key: OpKey,
    token: MappingToken,
) -> UnmapOutcome {
    if !iommu.is_pass_through(device) {
        return UnmapOutcome::Refused(Refusal::Other);
    }
    layer.unmap(key, token)
}

#[cold]
fn beyond_mask(device: RequesterId, pieces: &[PhysRange]) -> MapError {
    MapError {
        device,
        buffer: pieces.first().copied(),
        reason: MapReason::BeyondMask,
    }
}

impl<L: DmaOps + 'static> PassThrough<L> {
    const OPS: &'static MapOps<L> = &MapOps {
        map: map_page,
        mapping_error,
        unmap: unmap_page,
    };

    /// Puts the generic path in front of `layer`.
    pub fn new(layer: L) -> Self {
        Self {
            layer,
            iommu: IommuDriver {
                last_byte: ARENA_BYTES - 1,
                pass_through: Vec::new(),
            },
            devices: Vec::new(),
            // A kernel sets the operations at boot, so its compiler cannot know them either.
            ops: black_box(Self::OPS),
        }
    }

    /// Returns the parts for an operation; `None` if its device is unknown.
    #[inline(always)]
    fn parts(
        &mut self,
        key: OpKey,
    ) -> Option<(&mut L, &IommuDriver, &Device<L>, &'static MapOps<L>)> {
        let device = self.devices.get(key.device.index())?.as_ref()?;
        let ops = device.ops.unwrap_or(self.ops);
        Some((&mut self.layer, &self.iommu, device, ops))
    }
}

impl<I, L: HasPlatform<I> + 'static> HasPlatform<I> for PassThrough<L> {
    fn platform(&self) -> &LayerPlatform<I> {
        self.layer.platform()
    }
}

impl<L: DmaOps + 'static> DmaOps for PassThrough<L> {
    #[inline(always)]
    fn space_traits(&self) -> SpaceTraits {
        self.layer.space_traits()
    }

    #[inline(always)]
    fn set_time(&mut self, now: Nanos) {
        self.layer.set_time(now);
    }

    fn reserve(&mut self, cpus: usize, segments: usize) -> Result<(), LabError> {
        self.layer.reserve(cpus, segments)
    }

    fn is_attached(&self, index: DeviceIndex) -> bool {
        self.layer.is_attached(index)
    }

    fn attach(
        &mut self,
        index: DeviceIndex,
        device: RequesterId,
    ) -> Result<(DomainId, ContextTarget), LabError> {
        let (domain, target) = self.layer.attach(index, device)?;
        let domain_index = usize::from(domain.get());
        if self.iommu.pass_through.len() <= domain_index {
            self.iommu.pass_through.resize(domain_index + 1, false);
        }
        self.iommu.pass_through[domain_index] = true;
        if self.devices.len() <= index.index() {
            self.devices.resize_with(index.index() + 1, || None);
        }
        self.devices[index.index()] = Some(Device {
            id: device,
            domain,
            mask: u64::MAX,
            ops: None,
        });
        Ok((domain, target))
    }

    fn detach(&mut self, index: DeviceIndex) -> Result<(), LabError> {
        self.layer.detach(index)?;
        if let Some(device) = self.devices.get_mut(index.index()) {
            *device = None;
        }
        Ok(())
    }

    fn claim(&mut self, key: OpKey, range: IovaRange, buffer: u64) -> Option<MappingToken> {
        self.layer.claim(key, range, buffer)
    }

    #[inline(always)]
    fn map(&mut self, key: OpKey, buffer: u64, pieces: &[PhysRange]) -> Result<Mapped, MapError> {
        let Some((layer, iommu, device, ops)) = self.parts(key) else {
            return self.layer.map(key, buffer, pieces);
        };
        let mapped = (ops.map)(layer, iommu, device, key, buffer, pieces)?;
        if (ops.mapping_error)(&mapped.token) {
            let id = device.id;
            let _ = (ops.unmap)(layer, iommu, device, key, mapped.token);
            return Err(beyond_mask(id, pieces));
        }
        Ok(mapped)
    }

    fn segments(&self) -> &[DmaSegment] {
        self.layer.segments()
    }

    fn each_reserved(
        &self,
        key: OpKey,
        token: &MappingToken,
        pieces: usize,
        each: &mut dyn FnMut(Option<PfnRange>),
    ) {
        self.layer.each_reserved(key, token, pieces, each);
    }

    #[inline(always)]
    fn unmap(&mut self, key: OpKey, token: MappingToken) -> UnmapOutcome {
        let Some((layer, iommu, device, ops)) = self.parts(key) else {
            return UnmapOutcome::Refused(Refusal::Other);
        };
        (ops.unmap)(layer, iommu, device, key, token)
    }

    fn unmap_multi(
        &mut self,
        key: OpKey,
        tokens: Vec<MappingToken>,
        returned: &mut Vec<u64>,
    ) -> bool {
        self.layer.unmap_multi(key, tokens, returned)
    }

    fn retry_invalidation(
        &mut self,
        token: NotInvalidated<u64>,
    ) -> Result<u64, NotInvalidated<u64>> {
        self.layer.retry_invalidation(token)
    }

    #[inline(always)]
    fn end_burst(&mut self, key: OpKey, returned: Option<&mut Vec<u64>>) {
        self.layer.end_burst(key, returned);
    }

    #[inline(always)]
    fn sync_map(&mut self, key: OpKey) {
        self.layer.sync_map(key);
    }

    #[inline(always)]
    fn tick(&mut self) {
        self.layer.tick();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ringfence_dma::flush::Never;
    use ringfence_dma::space::Identity;
    use ringfence_types::{Direction, PhysAddr};

    use super::*;
    use crate::layer::{AttachInfo, DmaLayer, FreeInvalidator, LayerPlatform};

    type Layer = DmaLayer<Identity, Never, FreeInvalidator>;

    const DEVICE: DeviceIndex = DeviceIndex(0);
    const KEY: OpKey = OpKey::new(DEVICE, 0, Direction::FromDevice);

    fn attached() -> PassThrough<Layer> {
        let platform = LayerPlatform::without_tables().unwrap();
        let make = |of: &AttachInfo, _: &LayerPlatform<FreeInvalidator>| {
            Ok((Identity::new(of.domain), ContextTarget::PassThrough))
        };
        let mut layer = PassThrough::new(DmaLayer::new(Never, platform, make));
        layer.attach(DEVICE, RequesterId::new(8)).unwrap();
        layer.reserve(1, 1).unwrap();
        layer
    }

    fn piece() -> PhysRange {
        PhysRange::new(PhysAddr::new(0x5000), 100).unwrap()
    }

    fn outcome(layer: &mut PassThrough<Layer>) -> Result<Option<u64>, MapReason> {
        let mapped = layer
            .map(KEY, 7, &[piece()])
            .map_err(|error| error.reason)?;
        assert_eq!(mapped.token.range().unwrap().start().get(), 0x5000);
        Ok(layer.unmap(KEY, mapped.token).into_buffer())
    }

    #[test]
    fn mask_and_domain_decide_the_pass_through() {
        let last = ARENA_BYTES - 1;
        for (mask, is_static, wanted) in [
            (u64::MAX, true, Ok(Some(7))),
            (last.next_power_of_two() - 1, true, Ok(Some(7))),
            (
                last.next_power_of_two() - 2,
                true,
                Err(MapReason::BeyondMask),
            ),
            (u64::MAX, false, Err(MapReason::BeyondMask)),
        ] {
            let mut layer = attached();
            let device = layer.devices[0].as_mut().unwrap();
            device.mask = mask;
            let domain = usize::from(device.domain.get());
            layer.iommu.pass_through[domain] = is_static;
            assert_eq!(outcome(&mut layer), wanted, "{mask:#x} {is_static}");
        }
    }

    thread_local! {
        static CALLS: Cell<[u32; 3]> = const { Cell::new([0; 3]) };
    }

    fn count(which: usize) {
        let mut calls = CALLS.get();
        calls[which] += 1;
        CALLS.set(calls);
    }

    #[test]
    fn calls_take_the_operations_of_the_device_first() {
        const COUNTED: &MapOps<Layer> = &MapOps {
            map: |layer, iommu, device, key, buffer, pieces| {
                count(0);
                map_page(layer, iommu, device, key, buffer, pieces)
            },
            mapping_error: |token| {
                count(1);
                mapping_error(token)
            },
            unmap: |layer, iommu, device, key, token| {
                count(2);
                unmap_page(layer, iommu, device, key, token)
            },
        };
        for (own, wanted) in [(true, [1; 3]), (false, [0; 3])] {
            CALLS.set([0; 3]);
            let mut layer = attached();
            layer.devices[0].as_mut().unwrap().ops = own.then_some(COUNTED);
            assert_eq!(outcome(&mut layer), Ok(Some(7)));
            assert_eq!(CALLS.get(), wanted);
        }
        // The operations of the driver of the IOMMU serve a device without its own.
        CALLS.set([0; 3]);
        let mut layer = attached();
        layer.ops = COUNTED;
        assert_eq!(outcome(&mut layer), Ok(Some(7)));
        assert_eq!(CALLS.get(), [1; 3]);
    }

    #[test]
    fn an_error_of_the_address_undoes_the_map() {
        const FAILS: &MapOps<Layer> = &MapOps {
            mapping_error: |_| true,
            unmap: |layer, iommu, device, key, token| {
                count(2);
                unmap_page(layer, iommu, device, key, token)
            },
            ..*PassThrough::<Layer>::OPS
        };
        CALLS.set([0; 3]);
        let mut layer = attached();
        layer.ops = FAILS;
        assert_eq!(outcome(&mut layer), Err(MapReason::BeyondMask));
        assert_eq!(CALLS.get(), [0, 0, 1]);
    }
}
