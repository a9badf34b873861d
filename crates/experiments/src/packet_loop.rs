//! The packet loop of the testbed, a driver and a device model without protection, lengthened by a
//! busy-wait for each packet (RI20). rIOMMU section 3.3 and Fig. 8 validate the model `Gbps(C)` in
//! this way.
//!
//! The loop is that of the testbed: the device writes a frame and its completion, the driver
//! verifies the frame, replaces its buffers and sends acknowledgements. Its cycles without a wait
//! are measured, and the model must then predict every lengthened loop.

use std::cell::Cell;
use std::rc::Rc;

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::{ClientAction, NetperfStream, Packet, Workload};

use super::capture::Capture;
use super::finding::median;
use super::model::{Point, gbps};
use ringfence_lab::LabError;

/// A workload whose server spins for a number of cycles on each packet that it receives.
struct Lengthened<W, C> {
    inner: W,
    /// Cycles to wait.
    wait: Rc<Cell<u64>>,
    /// Reads a counter of cycles.
    now: C,
}

impl<W: Workload, C: FnMut() -> u64> Workload for Lengthened<W, C> {
    fn clients(&self) -> u32 {
        self.inner.clients()
    }
    fn offer(&mut self) -> ClientAction {
        self.inner.offer()
    }
    fn received(&mut self, packet: Packet) {
        let (begin, wait) = ((self.now)(), self.wait.get());
        if wait > 0 {
            while (self.now)().wrapping_sub(begin) < wait {
                std::hint::spin_loop();
            }
        }
        self.inner.received(packet);
    }
    fn send(&mut self) -> Option<Packet> {
        self.inner.send()
    }
    fn answered(&mut self, packet: Packet) {
        self.inner.answered(packet);
    }
    fn begin_run(&mut self) {
        self.inner.begin_run();
    }
}

/// Amount of work of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoopAmount {
    /// Frames of a run, in both directions.
    pub(super) frames: u64,
    /// Runs for each length of the wait, of which the median counts.
    pub(super) repetitions: usize,
}

/// Throughput of the loop on a core of `clock_ghz` for each of `waits`, in cycles per received
/// packet. The x-axis is the measured cycles without a wait plus the wait; the y-axis follows from
/// the elapsed cycles. `now` reads a free-running counter of cycles.
///
/// # Errors
/// The testbed failed.
pub(super) fn packet_loop_line(
    clock_ghz: f64,
    waits: &[u64],
    amount: LoopAmount,
    now: impl FnMut() -> u64 + Clone,
) -> Result<Vec<Point>, LabError> {
    let wait = Rc::new(Cell::new(0));
    let workload = Lengthened {
        inner: NetperfStream::new(16 << 10, 1),
        wait: Rc::clone(&wait),
        now: now.clone(),
    };
    let adapter = NicProfile::BRCM;
    let mut capture = Capture::with(adapter, workload, adapter.rx_frames, amount.frames)?;
    // The first run fills the rings.
    capture.run()?;
    let mut clock = now;
    // The lengths take turns, so that a slow moment of the machine meets all of them.
    let lengths: Vec<u64> = std::iter::once(0).chain(waits.iter().copied()).collect();
    let mut elapsed = vec![Vec::new(); lengths.len()];
    for _ in 0..amount.repetitions.max(1) {
        for (length, each) in lengths.iter().zip(&mut elapsed) {
            wait.set(*length);
            let begin = clock();
            let run = capture.run()?;
            let spent = clock().wrapping_sub(begin);
            each.push(spent as f64 / run.traffic.received.max(1) as f64);
        }
    }
    let per_packet: Vec<f64> = elapsed.iter().map(|each| median(each).middle).collect();
    let Some((base, lengthened)) = per_packet.split_first() else {
        return Ok(Vec::new());
    };
    let points = waits.iter().zip(lengthened).map(|(wait, cycles)| Point {
        cycles: base + *wait as f64,
        gbps: gbps(clock_ghz, *cycles),
    });
    Ok(points.collect())
}

#[cfg(test)]
mod tests {
    use ringfence_lab::meter::cycles;

    use super::super::model::deviation;
    use super::super::published::CLOCK_GHZ;
    use super::*;

    const SMALL: LoopAmount = LoopAmount {
        frames: 600,
        repetitions: 1,
    };

    /// Time advances by 1 at each reading. A wait of N cycles for each packet takes N readings, and
    /// the loop without a wait one.
    #[test]
    fn each_packet_of_the_loop_waits_once() {
        let time = Rc::new(Cell::new(0));
        let clock = move || {
            time.set(time.get() + 1);
            time.get()
        };
        let waits = [10, 100, 1000];
        let line = packet_loop_line(CLOCK_GHZ, &waits, SMALL, clock).unwrap();
        assert_eq!(line.len(), waits.len());
        for (point, wait) in line.iter().zip(waits) {
            // The readings around the run add less than one for each packet.
            assert!(
                (point.cycles - (wait as f64 + 1.0)).abs() < 0.1,
                "{point:?}"
            );
            let elapsed = gbps(CLOCK_GHZ, 1.0) / point.gbps;
            assert!((elapsed - point.cycles).abs() < 0.1, "{point:?}: {elapsed}");
        }
        assert!(deviation(CLOCK_GHZ, &line).unwrap().worst < 0.01);
    }

    /// The real loop takes at least the wait. Its own work is in the elapsed time, too.
    #[test]
    fn real_loop_takes_longer_than_its_wait() {
        let waits = [200_000];
        let line = packet_loop_line(CLOCK_GHZ, &waits, SMALL, cycles).unwrap();
        let elapsed = gbps(CLOCK_GHZ, 1.0) / line[0].gbps;
        assert!(elapsed > 200_000.0, "{elapsed}");
        assert!(line[0].cycles > 200_000.0 + 50.0, "{line:?}");
    }
}
