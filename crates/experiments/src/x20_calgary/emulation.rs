//! The exits of an emulated adapter (CG15), counted in the model of a network adapter.
//!
//! The driver's writes to tail registers and the interrupts are counted. The registers that an
//! interrupt handler accesses are those of Linux's e1000, and the cost of an exit is a range.

use ringfence_devices::nic::NicProfile;
use ringfence_devices::workload::NetperfStream;
use ringfence_lab::LabError;
use ringfence_lab::plan::Step;

use crate::capture::Capture;

/// Register accesses of an interrupt: `e1000_intr` reads the cause (ICR), writes the mask (IMC) and
/// reads a register to flush the write; `e1000_irq_enable` writes the mask (IMS) and reads again.
const REGISTERS_OF_INTERRUPT: f64 = 5.0;

/// Cycles of an exit: the direct cost alone, 2000, and with indirect and synchronous costs, which
/// "can in certain cases be an order of magnitude higher" (Landau, Ben-Yehuda and Gordon, SplitX,
/// WIOV 2011, section 1). The factor of ten is that sentence's and not a measurement.
pub(super) const EXIT: [f64; 2] = [2000.0, 20_000.0];

/// Exits of a frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Exits {
    /// Writes of tail registers for each received frame and its part of acknowledgements.
    pub(super) doorbells: f64,
    /// Interrupts, of receptions and transmissions.
    pub(super) interrupts: f64,
}

impl Exits {
    /// Returns the exits of a frame.
    pub(super) fn per_frame(&self) -> f64 {
        self.doorbells + REGISTERS_OF_INTERRUPT * self.interrupts
    }
}

/// Counts the exits of a stream of `frames` frames, with an interrupt for `coalesced` completions.
///
/// # Errors
/// The adapter model failed.
pub(super) fn count(coalesced: u32, frames: u64) -> Result<Exits, LabError> {
    let adapter = NicProfile {
        rx_frames: coalesced,
        ..NicProfile::BRCM
    };
    let mut capture = Capture::with(adapter, NetperfStream::default(), coalesced, frames)?;
    // The driver fills its rings in the first run.
    capture.run()?;
    let before = capture.interrupts();
    let run = capture.run()?;
    let received = run.traffic.received.max(1) as f64;
    let steps = run.plan.steps.iter();
    let doorbells = steps.filter(|timed| matches!(timed.step, Step::Doorbell { .. }));
    Ok(Exits {
        doorbells: doorbells.count() as f64 / received,
        interrupts: (capture.interrupts() - before) as f64 / received,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_follow_interrupts_and_doorbells() {
        let single = count(1, 600).unwrap();
        // Every reception interrupts and refills its ring; every second frame is acknowledged.
        assert!((single.interrupts - 1.5).abs() < 0.1, "{single:?}");
        assert!((single.doorbells - 1.5).abs() < 0.1, "{single:?}");
        // One and a half doorbells, and as many interrupts of five registers.
        assert!((single.per_frame() - 9.0).abs() < 0.6, "{single:?}");
        let coalesced = count(44, 600).unwrap();
        assert!(
            coalesced.interrupts < single.interrupts / 10.0,
            "{coalesced:?}"
        );
        assert!(coalesced.per_frame() < single.per_frame(), "{coalesced:?}");
    }
}
