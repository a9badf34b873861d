//! The invalidation of Calgary's and CalIOC2's TCE cache: registers of a PCI host bridge, and the
//! two drivers' sequences.
//!
//! The bridge has no invalidation command. A write of the table address register (TAR) drops the
//! cache. No DMA may be in flight at that moment, so a driver first stops the bus. The registers
//! and the sequences are those of Linux (`arch/x86/kernel/pci-calgary_64.c`:
//! `calgary_tce_cache_blast`, `calioc2_tce_cache_blast`). The slides only mention "oddities" and
//! "TCE shoot-downs".
//!
//! As published, both drivers continue after a failure: Calgary's writes the TAR although DMA is in
//! flight, and CalIOC2's returns without a flush ("pray for the best"). [`ShootDown::Checked`]
//! returns an error instead, so that no address is reused.

use ringfence_types::InvalidationError;

/// Maximum number of polls of the split queue, and of attempts of a soft stop.
pub const ATTEMPTS: u32 = 100;

/// The variant of the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bridge {
    /// PCI-X. Software disables arbitration on the bus.
    Calgary,
    /// PCIe. Software requests a soft stop, which may fail, and then a hard stop.
    CalIoc2,
}

/// Reaction of a sequence to a bridge that does not stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShootDown {
    /// Assumes success, as Linux does.
    AsPublished,
    /// Returns an error.
    Checked,
}

/// The registers of one PCI host bridge, as far as the sequence uses them.
#[derive(Debug, Clone)]
pub struct HostBridgeRegisters {
    kind: Bridge,
    /// DMA requests in flight; each read of the split queue completes one while the bus is stopped.
    in_flight: u32,
    /// Soft stops that fail from now on (SoftStopFault).
    failing_stops: u32,
    arbitration: bool,
    soft_stop: bool,
    hard_stop: bool,
    accesses: u64,
    flushes: u64,
    /// A DMA was in flight at a TAR write: the bridge may cache an old entry again.
    flushed_under_dma: bool,
}

impl HostBridgeRegisters {
    /// Creates a running bridge with `in_flight` DMA requests. The next `failing_stops` soft stops
    /// fail (CalIOC2 only).
    pub fn new(kind: Bridge, in_flight: u32, failing_stops: u32) -> Self {
        Self {
            kind,
            in_flight,
            failing_stops,
            arbitration: true,
            soft_stop: false,
            hard_stop: false,
            accesses: 0,
            flushes: 0,
            flushed_under_dma: false,
        }
    }

    /// Returns the number of flushes that no DMA in flight can undo.
    pub fn clean_flushes(&self) -> u64 {
        if self.flushed_under_dma {
            0
        } else {
            self.flushes
        }
    }

    /// Returns true if the bridge serves DMA.
    pub fn is_running(&self) -> bool {
        self.arbitration && !self.soft_stop && !self.hard_stop
    }

    /// Returns the number of register reads and writes so far.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    fn stopped(&self) -> bool {
        match self.kind {
            Bridge::Calgary => !self.arbitration,
            Bridge::CalIoc2 => self.soft_stop || self.hard_stop,
        }
    }

    /// Arbiter enable register (PHB_AER).
    fn set_arbitration(&mut self, on: bool) {
        self.accesses += 1;
        self.arbitration = on;
    }

    /// Page Migration Control, SoftStop bit; and its removal with HardStop.
    fn set_soft_stop(&mut self, on: bool) {
        self.accesses += 1;
        self.soft_stop = on;
        if !on {
            self.hard_stop = false;
        }
    }

    /// Reads the split queue: true if no DMA is in flight (0xff). Without a stop, new requests
    /// replace completed ones.
    fn split_queue_is_idle(&mut self) -> bool {
        self.accesses += 1;
        let idle = self.in_flight == 0;
        if self.stopped() {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        idle
    }

    /// Page Migration Debug: SoftStopFault. The failed stop ends.
    fn soft_stop_failed(&mut self) -> bool {
        self.accesses += 1;
        let failed = self.failing_stops > 0;
        if failed {
            self.failing_stops -= 1;
            self.soft_stop = false;
        }
        failed
    }

    /// A read of Page Migration Control turns a soft stop into a hard stop.
    fn read_migration_control(&mut self) {
        self.accesses += 1;
        self.hard_stop |= self.soft_stop;
    }

    /// TAR: a write drops the TCE cache.
    fn write_table_address(&mut self) {
        self.accesses += 1;
        self.flushes += 1;
        // A soft stop of CalIOC2 does not yet hold the bus.
        let held = match self.kind {
            Bridge::Calgary => !self.arbitration,
            Bridge::CalIoc2 => self.hard_stop,
        };
        self.flushed_under_dma |= self.in_flight > 0 || !held;
    }

    /// Reads a register to complete the writes before it.
    fn flush_writes(&mut self) {
        self.accesses += 1;
    }
}

/// Drops the TCE cache of a bridge.
///
/// # Errors
/// With [`ShootDown::Checked`], [`InvalidationError::Failed`] if the bus did not become idle or the
/// bridge did not stop. The bridge runs again, and its cache may hold old entries.
pub fn shoot_down(
    bridge: &mut HostBridgeRegisters,
    how: ShootDown,
) -> Result<(), InvalidationError> {
    match bridge.kind {
        Bridge::Calgary => calgary(bridge, how),
        Bridge::CalIoc2 => calioc2(bridge, how),
    }
}

fn quiesce(bridge: &mut HostBridgeRegisters) -> bool {
    (0..ATTEMPTS).any(|_| bridge.split_queue_is_idle())
}

fn calgary(bridge: &mut HostBridgeRegisters, how: ShootDown) -> Result<(), InvalidationError> {
    // Save and clear the arbiter; a read ensures that the write has arrived.
    bridge.flush_writes();
    bridge.set_arbitration(false);
    bridge.flush_writes();
    let idle = quiesce(bridge);
    let done = if idle || how == ShootDown::AsPublished {
        bridge.write_table_address();
        Ok(())
    } else {
        Err(InvalidationError::Failed)
    };
    bridge.set_arbitration(true);
    bridge.flush_writes();
    done
}

fn calioc2(bridge: &mut HostBridgeRegisters, how: ShootDown) -> Result<(), InvalidationError> {
    for _ in 0..ATTEMPTS {
        // 1 to 4. Soft stop, wait for the queues, and start again if the stop failed.
        bridge.flush_writes();
        bridge.set_soft_stop(true);
        let idle = quiesce(bridge);
        if bridge.soft_stop_failed() {
            continue;
        }
        if !idle && how == ShootDown::Checked {
            bridge.set_soft_stop(false);
            return Err(InvalidationError::Failed);
        }
        // 5 to 8. Hard stop, flush, and remove the stop.
        bridge.read_migration_control();
        bridge.write_table_address();
        bridge.flush_writes();
        bridge.set_soft_stop(false);
        bridge.flush_writes();
        return Ok(());
    }
    match how {
        ShootDown::AsPublished => Ok(()),
        ShootDown::Checked => Err(InvalidationError::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bridge, DMA in flight, failing stops; the result of the checked sequence, and the clean
    /// flushes of the checked and the published one.
    #[test]
    fn a_flush_counts_only_on_a_stopped_and_idle_bus() {
        use Bridge::{CalIoc2, Calgary};
        let failed = Err(InvalidationError::Failed);
        for (kind, in_flight, failing, result, checked, published) in [
            (Calgary, 0, 0, Ok(()), 1, 1),
            (Calgary, 3, 0, Ok(()), 1, 1),
            (Calgary, ATTEMPTS - 1, 0, Ok(()), 1, 1),
            // The bus stays busy: Linux flushes all the same, under a DMA in flight.
            (Calgary, ATTEMPTS + 5, 0, failed, 0, 0),
            (CalIoc2, 0, 0, Ok(()), 1, 1),
            (CalIoc2, 3, 2, Ok(()), 1, 1),
            (CalIoc2, 3, ATTEMPTS - 1, Ok(()), 1, 1),
            // The bridge never stops: Linux returns without a flush.
            (CalIoc2, 3, ATTEMPTS, failed, 0, 0),
            (CalIoc2, ATTEMPTS + 5, 0, failed, 0, 0),
        ] {
            for (how, expected, flushes) in [
                (ShootDown::Checked, result, checked),
                (ShootDown::AsPublished, Ok(()), published),
            ] {
                let mut bridge = HostBridgeRegisters::new(kind, in_flight, failing);
                let case = (kind, in_flight, failing, how);
                assert_eq!(shoot_down(&mut bridge, how), expected, "{case:?}");
                assert_eq!(bridge.clean_flushes(), flushes, "{case:?}");
                assert!(bridge.is_running(), "{case:?}: the bus stays stopped");
            }
        }
    }

    /// The number of register accesses of a flush: the cost that a profile charges.
    #[test]
    fn an_idle_flush_takes_few_accesses_and_a_busy_one_is_bounded() {
        for (kind, idle, most) in [
            (Bridge::Calgary, 7, 7 + u64::from(ATTEMPTS)),
            (
                Bridge::CalIoc2,
                9,
                u64::from(ATTEMPTS) * (u64::from(ATTEMPTS) + 9),
            ),
        ] {
            let mut bridge = HostBridgeRegisters::new(kind, 0, 0);
            shoot_down(&mut bridge, ShootDown::Checked).unwrap();
            assert_eq!(bridge.accesses(), idle, "{kind:?}");
            let mut bridge = HostBridgeRegisters::new(kind, u32::MAX, u32::MAX);
            assert!(shoot_down(&mut bridge, ShootDown::Checked).is_err());
            assert!(bridge.accesses() <= most, "{kind:?}: {}", bridge.accesses());
        }
    }
}
