//! The take-over from the process that has the devices. It copies and rebuilds their state while
//! they run. It then pauses them, rebuilds them again, and the other process releases them.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::rebuild::RestoredDevices;
use super::{Daemon, LocalConfig};
use crate::handover::{
    CONTROL, HandOverDestination, HandOverTimeouts, TakeOverError, TakeOverStats,
};
use crate::server::ServeEvent;

/// Interval between two copies. Each copy pauses every device once.
const COPY_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for the requested number of requests.
const COPY_TIMEOUT: Duration = Duration::from_secs(120);

impl Daemon {
    /// Takes over the devices that another process serves in the directory. The other process keeps
    /// the devices until they are rebuilt here, so the guest sees no interruption. This process
    /// copies and rebuilds them while they run, at least once, until they have completed
    /// `precopy_requests` requests. Then the other process pauses them.
    ///
    /// # Errors
    /// [`TakeOverError`]: this process does not serve the devices. The other process continues to
    /// serve them, unless the error is [`TakeOverError::Orphaned`] or that process has ended.
    pub fn take_over(
        config: LocalConfig<'_>,
        precopy_requests: u64,
    ) -> Result<(Self, TakeOverStats), (PathBuf, TakeOverError)> {
        let checked = config.access.check_directory(config.dir);
        let dir = checked.map_err(|error| (config.dir.to_owned(), error.into()))?;
        let config = LocalConfig {
            dir: &dir,
            ..config
        };
        let path = dir.join(CONTROL);
        complete_take_over(config, &path, precopy_requests).map_err(|error| (path, error))
    }

    /// Runs a complete take-over with the process at the other end of `first`, but serves none of
    /// the devices. The other process releases them at the end.
    ///
    /// # Errors
    /// [`TakeOverError`]: this process does not serve the devices. The other process continues to
    /// serve them, unless the error is [`TakeOverError::Orphaned`] or that process has ended.
    pub fn rehearse_take_over(
        first: UnixStream,
        config: LocalConfig<'_>,
    ) -> Result<RestoredDevices, TakeOverError> {
        let taken = negotiate(&HandOverDestination::with(first), config, 0)?;
        Ok(RestoredDevices(taken.daemon))
    }
}

/// Devices that were taken over and are paused.
struct PausedTakeOver {
    daemon: Daemon,
    pause_requested: Instant,
    /// Statistics; the pause has not ended yet, so its length is zero.
    stats: TakeOverStats,
}

fn complete_take_over(
    config: LocalConfig<'_>,
    control: &Path,
    precopy_requests: u64,
) -> Result<(Daemon, TakeOverStats), TakeOverError> {
    let PausedTakeOver {
        mut daemon,
        pause_requested: asked,
        stats: mut taken,
    } = negotiate(
        &HandOverDestination::connect(control)?,
        config,
        precopy_requests,
    )?;
    if let Err(error) = daemon.launch() {
        daemon.abandon();
        return Err(TakeOverError::Orphaned(error.to_string()));
    }
    taken.pause = asked.elapsed();
    // The take-over is complete even if no further hand-over is possible.
    if let Err(error) = daemon.offer_hand_over(HandOverTimeouts::default(), config.log) {
        (config.log)("hand-over", &ServeEvent::Kept(&error.to_string()));
    }
    Ok((daemon, taken))
}

/// When it returns `Ok`, the other process has released the devices.
fn negotiate(
    take: &HandOverDestination,
    config: LocalConfig<'_>,
    precopy_requests: u64,
) -> Result<PausedTakeOver, TakeOverError> {
    let begun = Instant::now();
    let first = take.copy()?;
    let before = first.requests();
    // Rebuild once while the devices run, so that a failure does not pause them.
    Daemon::rehearse(config, first)?;
    let mut copies = 1;
    let mut completed = 0;
    while completed < precopy_requests {
        if begun.elapsed() > COPY_TIMEOUT {
            return Err(TakeOverError::TimeOut);
        }
        thread::sleep(COPY_INTERVAL);
        let saved = take.copy()?;
        completed = saved.requests().saturating_sub(before);
        Daemon::rehearse(config, saved)?;
        copies += 1;
    }
    let copying = begun.elapsed();
    let asked = Instant::now();
    let (taking, saved) = take.stop()?;
    let stopping = asked.elapsed();
    let requests_completed = saved.requests().saturating_sub(before);
    let daemon = Daemon::rebuild(config, saved)?;
    let rebuilding = asked.elapsed().saturating_sub(stopping);
    let bytes = taking.bytes;
    taking.confirm()?;
    Ok(PausedTakeOver {
        daemon,
        pause_requested: asked,
        stats: TakeOverStats {
            copies,
            copying,
            requests_completed,
            pause: Duration::ZERO,
            stopping,
            rebuilding,
            bytes,
        },
    })
}
