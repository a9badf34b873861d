//! The conversation with the process that has the devices: they are copied, and rebuilt, while they
//! work, then stopped, rebuilt once more, and let go of there.

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

/// Between two copies, which each cost every device a turn.
const COPY_INTERVAL: Duration = Duration::from_millis(20);
/// The longest that is copied for want of requests.
const COPY_TIMEOUT: Duration = Duration::from_secs(120);

impl Daemon {
    /// Takes the devices over that another process serves in the directory, from its guest's view
    /// without an interruption: it has them until they stand rebuilt here. They are copied, and
    /// rebuilt, while they work, at least once, and until `meanwhile` requests were completed; then
    /// they are stopped.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn take_over(
        here: LocalConfig<'_>,
        meanwhile: u64,
    ) -> Result<(Self, TakeOverStats), (PathBuf, TakeOverError)> {
        let checked = here.access.check_directory(here.dir);
        let dir = checked.map_err(|error| (here.dir.to_owned(), error.into()))?;
        let here = LocalConfig { dir: &dir, ..here };
        let path = dir.join(CONTROL);
        complete_take_over(here, &path, meanwhile).map_err(|error| (path, error))
    }

    /// Holds all of a take-over's conversation with the process at the other end of `first`, which
    /// lets go of its devices at the end of it, and serves none of them.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn rehearse_take_over(
        first: UnixStream,
        here: LocalConfig<'_>,
    ) -> Result<RestoredDevices, TakeOverError> {
        let taken = negotiate(&HandOverDestination::with(first), here, 0)?;
        Ok(RestoredDevices(taken.daemon))
    }
}

/// Devices that were taken over and stand still.
struct PausedTakeOver {
    daemon: Daemon,
    pause_requested: Instant,
    /// The pause is not over yet.
    stats: TakeOverStats,
}

fn complete_take_over(
    here: LocalConfig<'_>,
    control: &Path,
    meanwhile: u64,
) -> Result<(Daemon, TakeOverStats), TakeOverError> {
    let PausedTakeOver {
        mut daemon,
        pause_requested: asked,
        stats: mut taken,
    } = negotiate(&HandOverDestination::connect(control)?, here, meanwhile)?;
    daemon.launch();
    taken.pause = asked.elapsed();
    // They are here, whatever becomes of the next hand-over.
    if let Err(error) = daemon.offer_hand_over(HandOverTimeouts::default(), here.log) {
        (here.log)("hand-over", &ServeEvent::Kept(&error.to_string()));
    }
    Ok((daemon, taken))
}

/// When it returns devices, the other process has let go of them.
fn negotiate(
    take: &HandOverDestination,
    here: LocalConfig<'_>,
    meanwhile: u64,
) -> Result<PausedTakeOver, TakeOverError> {
    let begun = Instant::now();
    let first = take.copy()?;
    let before = first.requests();
    // Whatever would fail, fails here, while the devices work.
    Daemon::rehearse(here, first)?;
    let mut copies = 1;
    let mut completed = 0;
    while completed < meanwhile {
        if begun.elapsed() > COPY_TIMEOUT {
            return Err(TakeOverError::TimeOut);
        }
        thread::sleep(COPY_INTERVAL);
        let handed = take.copy()?;
        completed = handed.requests().saturating_sub(before);
        Daemon::rehearse(here, handed)?;
        copies += 1;
    }
    let copying = begun.elapsed();
    let asked = Instant::now();
    let (taking, handed) = take.stop()?;
    let stopping = asked.elapsed();
    let meanwhile = handed.requests().saturating_sub(before);
    let daemon = Daemon::rebuild(here, handed)?;
    let rebuilding = asked.elapsed().saturating_sub(stopping);
    let bytes = taking.bytes;
    taking.confirm()?;
    Ok(PausedTakeOver {
        daemon,
        pause_requested: asked,
        stats: TakeOverStats {
            copies,
            copying,
            requests_completed: meanwhile,
            pause: Duration::ZERO,
            stopping,
            rebuilding,
            bytes,
        },
    })
}
