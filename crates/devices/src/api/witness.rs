//! Who is told what a driver does: the oracle's grants and the attackers' events hang here.

use ringfence_dma::Platform;
use ringfence_types::PhysRange;

use crate::{Attacker, Buffer, Event, Mapping, Port};

/// How the buffer of an unmapped range came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handback {
    /// Unreachable.
    Released,
    /// While the device may still reach it.
    Stale,
    /// Not yet.
    Withheld,
}

/// Sees what a driver does at the moment it happens. `P` is the platform under the layer.
pub trait Witness<P> {
    /// A buffer has been mapped to `memory`.
    fn mapped(&mut self, platform: &mut P, mapping: &Mapping, memory: PhysRange);
    /// It is about to be unmapped.
    fn unmapping(&mut self, platform: &mut P, mapping: &Mapping);
    /// Unmap has returned.
    fn unmapped(&mut self, platform: &mut P, mapping: &Mapping, handback: Handback);
    /// A withheld buffer was handed up at the end of its burst.
    fn released(&mut self, platform: &mut P, buffer: &Buffer);
    /// Everything mapped so far is visible to the hardware: from here on its device may be told of it.
    #[inline]
    fn published(&mut self, _platform: &mut P) {}
}

/// Nobody watches.
impl<P> Witness<P> for () {
    #[inline]
    fn mapped(&mut self, _: &mut P, _: &Mapping, _: PhysRange) {}
    #[inline]
    fn unmapping(&mut self, _: &mut P, _: &Mapping) {}
    #[inline]
    fn unmapped(&mut self, _: &mut P, _: &Mapping, _: Handback) {}
    #[inline]
    fn released(&mut self, _: &mut P, _: &Buffer) {}
}

impl<P, W: Witness<P> + ?Sized> Witness<P> for &mut W {
    #[inline]
    fn mapped(&mut self, platform: &mut P, mapping: &Mapping, memory: PhysRange) {
        (**self).mapped(platform, mapping, memory);
    }
    #[inline]
    fn unmapping(&mut self, platform: &mut P, mapping: &Mapping) {
        (**self).unmapping(platform, mapping);
    }
    #[inline]
    fn unmapped(&mut self, platform: &mut P, mapping: &Mapping, handback: Handback) {
        (**self).unmapped(platform, mapping, handback);
    }
    #[inline]
    fn released(&mut self, platform: &mut P, buffer: &Buffer) {
        (**self).released(platform, buffer);
    }
    #[inline]
    fn published(&mut self, platform: &mut P) {
        (**self).published(platform);
    }
}

/// A platform whose devices reach memory over a bus.
pub trait HasBus: Platform {
    /// The bus.
    type Bus<'a>: Port
    where
        Self: 'a;

    /// The bus, for an access.
    fn bus(&mut self) -> Self::Bus<'_>;
}

/// An attacker in the device: reacts to what the device's own driver does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attacked<A>(pub A);

impl<P: HasBus, A: Attacker> Witness<P> for Attacked<A> {
    #[inline]
    fn mapped(&mut self, platform: &mut P, mapping: &Mapping, _: PhysRange) {
        self.0.on(&Event::Mapped(*mapping), &mut platform.bus());
    }

    #[inline]
    fn unmapping(&mut self, platform: &mut P, mapping: &Mapping) {
        self.0.on(&Event::Unmapping(*mapping), &mut platform.bus());
    }

    #[inline]
    fn unmapped(&mut self, platform: &mut P, mapping: &Mapping, _: Handback) {
        self.0.on(&Event::Unmapped(*mapping), &mut platform.bus());
    }

    #[inline]
    fn released(&mut self, platform: &mut P, _: &Buffer) {
        self.0.on(&Event::Other, &mut platform.bus());
    }
}
