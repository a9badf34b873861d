//! Waits for the end of a recording.

use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::RecordError;

/// Interval at which an ending recording checks for a stop.
const TICK: Duration = Duration::from_millis(20);

/// Time that a command has to exit after a stop. Ctrl-C in a terminal reaches the command too.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that a signal may take to reach this process after it ended the command.
const SIGNAL_DELAY: Duration = Duration::from_millis(100);

/// End of the recording.
#[derive(Debug)]
pub enum Workload<'a> {
    /// Records for this long, without a command.
    Time(Duration),
    /// Records until this command exits.
    Command(&'a mut Command),
}

impl Workload<'_> {
    /// Waits until the end of the recording, or a stop. Returns the status of the command.
    pub(super) fn wait(self, stop: &AtomicBool) -> Result<Option<ExitStatus>, RecordError> {
        let failed = |source| RecordError::Command { source };
        match self {
            Self::Time(time) => {
                let end = Instant::now() + time;
                while Instant::now() < end && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(TICK.min(end.saturating_duration_since(Instant::now())));
                }
                Ok(None)
            }
            Self::Command(command) => {
                let mut child = command.spawn().map_err(failed)?;
                let mut timer = WaitTimer::default();
                loop {
                    match child.try_wait() {
                        Ok(Some(status)) if status.success() => return Ok(Some(status)),
                        Ok(Some(status)) => {
                            // Ctrl-C ends both processes. Which of them sees it first is random and
                            // must not affect the result.
                            let mut timer = WaitTimer::default();
                            while !stop.load(Ordering::Relaxed) {
                                if timer.is_over(SIGNAL_DELAY) {
                                    return Ok(Some(status));
                                }
                            }
                            return Ok(None);
                        }
                        Ok(None) if !stop.load(Ordering::Relaxed) => std::thread::sleep(TICK),
                        Ok(None) if !timer.is_over(STOP_TIMEOUT) => {}
                        Ok(None) => {
                            let _ = child.kill();
                            let _ = child.wait();
                            return Ok(None);
                        }
                        Err(error) => {
                            let _ = child.kill();
                            let _ = child.wait();
                            return Err(failed(error));
                        }
                    }
                }
            }
        }
    }
}

/// Total time spent waiting.
#[derive(Debug, Default)]
struct WaitTimer(Duration);

impl WaitTimer {
    /// Returns true if the total wait has reached `limit`; otherwise waits for one [`TICK`].
    fn is_over(&mut self, limit: Duration) -> bool {
        if self.0 >= limit {
            return true;
        }
        std::thread::sleep(TICK);
        self.0 += TICK;
        false
    }
}
