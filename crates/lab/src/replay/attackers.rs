//! The attackers of a pass.

use ringfence_devices::{
    Attacker, DmaPort, DriverEvent, Neighbour, Racer, Replayer, Reuse, Straddler,
};

/// Attackers for rings only: one accesses the bytes beside a buffer, one runs past its end.
type BufferEdgeAttackers = (Neighbour, Straddler);

/// The attackers of a pass. An enum, so that both passes of a mode have the same type.
pub enum Attackers {
    /// No attacker, in the metered pass.
    None,
    /// The attackers of every mode.
    Paged(Box<(Replayer, Neighbour)>),
    /// Adds the straddler and the racer. The racer runs last, because the entry that it keeps warm
    /// replaces the one that the replayer has just tried.
    Rings(Box<((Replayer, BufferEdgeAttackers), Racer)>),
}

impl Attackers {
    /// Returns the attackers of a mode without rings.
    pub fn pages(reuse: Reuse) -> Self {
        Self::Paged(Box::new((Replayer::new(reuse), Neighbour)))
    }

    /// Returns the attackers of a mode with rings, which has two more. The cache entry of a ring is
    /// overwritten by that of the next slot, so only a device that keeps a stale entry warm (the
    /// racer) can use it. A unit that looks up buffers by the byte may check only the first byte of
    /// an access (the straddler).
    pub fn rings() -> Self {
        let others = (Replayer::new(Reuse::Page), (Neighbour, Straddler));
        Self::Rings(Box::new((others, Racer::new())))
    }

    #[inline(never)]
    fn attack<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match self {
            Self::None => {}
            Self::Paged(attackers) => attackers.on(event, port),
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
