//! Who is told what a driver does: the oracle's grants and the attackers' events hang here.

use ringfence_dma::Platform;
use ringfence_types::PhysRange;

use crate::{Attacker, Buffer, DeviceMapping, DmaPort, DriverEvent};

/// How the buffer of an unmapped range came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapOutcome {
    /// Unreachable.
    Released,
    /// While the device may still reach it.
    Stale,
    /// Not yet.
    Withheld,
}

/// Sees what a driver does at the moment it happens. `P` is the platform under the layer.
pub trait DmaHooks<P> {
    /// A buffer has been mapped to `memory`.
    fn mapped(&mut self, platform: &mut P, mapping: &DeviceMapping, memory: PhysRange);
    /// It is about to be unmapped.
    fn unmapping(&mut self, platform: &mut P, mapping: &DeviceMapping);
    /// Unmap has returned.
    fn unmapped(&mut self, platform: &mut P, mapping: &DeviceMapping, handback: UnmapOutcome);
    /// A withheld buffer was handed up at the end of its burst.
    fn released(&mut self, platform: &mut P, buffer: &Buffer);
    /// Everything mapped so far is visible to the hardware: from here on its device may be told of
    /// it.
    #[inline]
    fn synced(&mut self, _platform: &mut P) {}
}

/// Nobody watches.
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
    fn unmapped(&mut self, platform: &mut P, mapping: &DeviceMapping, handback: UnmapOutcome) {
        (**self).unmapped(platform, mapping, handback);
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

/// A platform whose devices reach memory over a bus.
pub trait HasBus: Platform {
    /// The bus.
    type Bus<'a>: DmaPort
    where
        Self: 'a;

    /// The bus, for an access.
    fn bus(&mut self) -> Self::Bus<'_>;
}

/// An attacker in the device: reacts to what the device's own driver does.
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
