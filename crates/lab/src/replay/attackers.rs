//! The attackers of a pass.

use ringfence_devices::{
    Attacker, DmaPort, DriverEvent, Neighbour, Racer, Replayer, Reuse, Straddler, WrongDirection,
};

/// Attackers for rings only: one accesses the bytes beside a buffer, one runs past its end.
type BufferEdgeAttackers = (Neighbour, Straddler);

/// The choice of attackers for an attack pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttackerKind {
    /// All attackers that apply to the mode.
    #[default]
    All,
    /// None: the device only accesses buffers before their unmap.
    Passive,
    /// A device that repeats accesses to addresses of earlier mappings.
    Replayer,
    /// A device that also keeps the translations of live mappings in the IOTLB.
    Racer,
}

/// The attackers of a pass. An enum, so that both passes of a mode have the same type.
pub enum Attackers {
    /// No attacker, in the metered pass.
    None,
    /// The replayer alone.
    Replayer(Box<Replayer>),
    /// The replayer and the racer that prepares it.
    Racer(Box<(Replayer, Racer)>),
    /// The attackers of every mode.
    Paged(Box<(Replayer, Neighbour)>),
    /// Adds one that accesses buffers against their direction.
    AgainstDirection(Box<((Replayer, Neighbour), WrongDirection)>),
    /// Adds the straddler and the racer. The racer runs last, because the entry that it keeps warm
    /// replaces the one that the replayer has just tried.
    Rings(Box<((Replayer, BufferEdgeAttackers), Racer)>),
}

impl Attackers {
    /// Returns the attackers of a mode without rings.
    pub fn pages(kind: AttackerKind, reuse: Reuse) -> Self {
        let all = || Self::Paged(Box::new((Replayer::new(reuse), Neighbour)));
        Self::chosen(kind, reuse, all)
    }

    /// Adds an attacker that accesses buffers against their direction to those of every mode.
    #[must_use]
    pub fn against_direction(self) -> Self {
        match self {
            Self::Paged(every) => Self::AgainstDirection(Box::new((*every, WrongDirection))),
            other => other,
        }
    }

    /// Returns the attackers of `kind`, of which `all` returns all.
    fn chosen(kind: AttackerKind, reuse: Reuse, all: impl FnOnce() -> Self) -> Self {
        match kind {
            AttackerKind::All => all(),
            AttackerKind::Passive => Self::None,
            AttackerKind::Replayer => Self::Replayer(Box::new(Replayer::new(reuse))),
            AttackerKind::Racer => Self::Racer(Box::new((Replayer::new(reuse), Racer::new()))),
        }
    }

    /// Returns the attackers of a mode with rings, which has two more. The cache entry of a ring is
    /// overwritten by that of the next slot, so only a device that keeps a stale entry warm (the
    /// racer) can use it. A unit that looks up buffers by the byte may check only the first byte of
    /// an access (the straddler).
    pub fn rings(kind: AttackerKind) -> Self {
        Self::chosen(kind, Reuse::Page, || {
            let others = (Replayer::new(Reuse::Page), (Neighbour, Straddler));
            Self::Rings(Box::new((others, Racer::new())))
        })
    }

    #[inline(never)]
    fn attack<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match self {
            Self::None => {}
            Self::Replayer(attacker) => attacker.on(event, port),
            Self::Racer(attackers) => attackers.on(event, port),
            Self::Paged(attackers) => attackers.on(event, port),
            Self::AgainstDirection(attackers) => attackers.on(event, port),
            Self::Rings(attackers) => attackers.on(event, port),
        }
    }
}

impl Attacker for Attackers {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        if !matches!(self, Self::None) {
            self.attack(event, port);
        }
    }
}

#[cfg(test)]
mod tests {
    use ringfence_devices::{DeviceMapping, DmaRequest};
    use ringfence_types::{Direction, Fault, Iova, IovaRange, RequesterId};

    use super::*;

    /// Returns the addresses that the attackers of a mode without rings access.
    fn accessed(kind: AttackerKind) -> Vec<u64> {
        let mapping = |page: u64| DeviceMapping {
            device: RequesterId::new(8),
            range: IovaRange::new(Iova::new(page << 12), 1).unwrap(),
            direction: Direction::FromDevice,
        };
        let mut found = Vec::new();
        let mut port = |request: &DmaRequest| -> Result<(), Fault> {
            found.push(request.iova.get());
            Ok(())
        };
        let mut attackers = Attackers::pages(kind, Reuse::Page);
        for event in [
            DriverEvent::Mapped(mapping(1)),
            DriverEvent::Mapped(mapping(2)),
            DriverEvent::Unmapping(mapping(2)),
            DriverEvent::Unmapped(mapping(2)),
        ] {
            attackers.on(&event, &mut port);
        }
        found
    }

    #[test]
    fn only_the_racer_accesses_live_mappings() {
        assert!(accessed(AttackerKind::Passive).is_empty());
        assert_eq!(accessed(AttackerKind::Replayer), [0x2000]);
        // At the second map the first mapping; before the unmap the second; then the replayer's
        // access, and the first mapping once more.
        assert_eq!(
            accessed(AttackerKind::Racer),
            [0x1000, 0x2000, 0x2000, 0x1000]
        );
    }
}
