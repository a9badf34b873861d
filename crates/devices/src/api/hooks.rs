//! Hooks into a driver's DMA calls, for the oracle's grants and the attackers' events.

use ringfence_dma::Platform;
use ringfence_types::PhysRange;

use crate::{Attacker, Buffer, DeviceMapping, DmaPort, DriverEvent};

/// State of the buffer of an unmapped range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapOutcome {
    /// Returned; the device can no longer access it.
    Released,
    /// Returned, but the device may still access it.
    Stale,
    /// Not yet returned.
    Withheld,
}

/// Receives a driver's DMA calls when they happen. `P` is the platform of the layer.
pub trait DmaHooks<P> {
    /// A buffer has been mapped to `memory`.
    fn mapped(&mut self, platform: &mut P, mapping: &DeviceMapping, memory: PhysRange);
    /// The driver is about to unmap the buffer.
    fn unmapping(&mut self, platform: &mut P, mapping: &DeviceMapping);
    /// The unmap has returned.
    fn unmapped(&mut self, platform: &mut P, mapping: &DeviceMapping, outcome: UnmapOutcome);
    /// The layer has returned a withheld buffer at the end of its burst.
    fn released(&mut self, platform: &mut P, buffer: &Buffer);
    /// All mappings so far are visible to the hardware: from now on the driver may pass them to the
    /// device.
    #[inline]
    fn synced(&mut self, _platform: &mut P) {}
}

/// Ignores all calls.
impl<P> DmaHooks<P> for () {
    #[inline]
    fn mapped(&mut self, _: &mut P, _: &DeviceMapping, _: PhysRange) {}
    #[inline]
    fn unmapping(&mut self, _: &mut P, _: &DeviceMapping) {}
    #[inline]
    fn unmapped(&mut self, _: &mut P, _: &DeviceMapping, _: UnmapOutcome) {}
    #[inline]
    fn released(&mut self, _: &mut P, _: &Buffer) {}
}

impl<P, W: DmaHooks<P> + ?Sized> DmaHooks<P> for &mut W {
    #[inline]
    fn mapped(&mut self, platform: &mut P, mapping: &DeviceMapping, memory: PhysRange) {
        (**self).mapped(platform, mapping, memory);
    }
    #[inline]
    fn unmapping(&mut self, platform: &mut P, mapping: &DeviceMapping) {
        (**self).unmapping(platform, mapping);
    }
    #[inline]
    fn unmapped(&mut self, platform: &mut P, mapping: &DeviceMapping, outcome: UnmapOutcome) {
        (**self).unmapped(platform, mapping, outcome);
    }
    #[inline]
    fn released(&mut self, platform: &mut P, buffer: &Buffer) {
        (**self).released(platform, buffer);
    }
    #[inline]
    fn synced(&mut self, platform: &mut P) {
        (**self).synced(platform);
    }
}

/// A platform whose devices access memory over a bus.
pub trait HasBus: Platform {
    /// Type of the bus.
    type Bus<'a>: DmaPort
    where
        Self: 'a;

    /// Returns the bus, for an access.
    fn bus(&mut self) -> Self::Bus<'_>;
}

/// An attacker in the device: it reacts to the DMA calls of the device's own driver.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttackHook<A>(pub A);

impl<P: HasBus, A: Attacker> DmaHooks<P> for AttackHook<A> {
    #[inline]
    fn mapped(&mut self, platform: &mut P, mapping: &DeviceMapping, _: PhysRange) {
        self.0
            .on(&DriverEvent::Mapped(*mapping), &mut platform.bus());
    }

    #[inline]
    fn unmapping(&mut self, platform: &mut P, mapping: &DeviceMapping) {
        self.0
            .on(&DriverEvent::Unmapping(*mapping), &mut platform.bus());
    }

    #[inline]
    fn unmapped(&mut self, platform: &mut P, mapping: &DeviceMapping, _: UnmapOutcome) {
        self.0
            .on(&DriverEvent::Unmapped(*mapping), &mut platform.bus());
    }

    #[inline]
    fn released(&mut self, platform: &mut P, _: &Buffer) {
        self.0.on(&DriverEvent::Other, &mut platform.bus());
    }
}
