//! The conversation with the process that has the devices: they are copied, and rebuilt, while they work, then stopped, rebuilt once more, and let go of there.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::rebuild::Rebuilt;
use super::{Daemon, Here};
use crate::handover::{CONTROL, Limits, Take, TakeOverError, Taken};
use crate::server::Event;

/// Between two copies, which each cost every device a turn.
const BREATH: Duration = Duration::from_millis(20);
/// The longest that is copied for want of requests.
const COPYING: Duration = Duration::from_secs(120);

impl Daemon {
    /// Takes the devices over that another process serves in the directory, from its guest's view without an interruption: it has them until they stand rebuilt
    /// here. They are copied, and rebuilt, while they work, at least once, and until `meanwhile` requests were completed; then they are stopped.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn take_over(
        here: Here<'_>,
        meanwhile: u64,
    ) -> Result<(Self, Taken), (PathBuf, TakeOverError)> {
        let checked = here.access.check_directory(here.dir);
        let dir = checked.map_err(|error| (here.dir.to_owned(), error.into()))?;
        let here = Here { dir: &dir, ..here };
        let path = dir.join(CONTROL);
        taken_over(here, &path, meanwhile).map_err(|error| (path, error))
    }

    /// Holds all of a take-over's conversation with the process at the other end of `first`, which lets go of its devices at the end of it, and serves
    /// none of them.
    ///
    /// # Errors
    /// [`TakeOverError`]: the other process goes on with them.
    pub fn rehearse_take_over(first: UnixStream, here: Here<'_>) -> Result<Rebuilt, TakeOverError> {
        let taken = converse(&Take::with(first), here, 0)?;
        Ok(Rebuilt(taken.daemon))
    }
}

/// Devices that were taken over and stand still.
struct Conversed {
    daemon: Daemon,
    asked: Instant,
    /// The pause is not over yet.
    taken: Taken,
}

fn taken_over(
    here: Here<'_>,
    control: &Path,
    meanwhile: u64,
) -> Result<(Daemon, Taken), TakeOverError> {
    let Conversed {
        mut daemon,
        asked,
        mut taken,
    } = converse(&Take::connect(control)?, here, meanwhile)?;
    daemon.launch();
    taken.pause = asked.elapsed();
    // They are here, whatever becomes of the next hand-over.
    if let Err(error) = daemon.offer_hand_over(Limits::default(), here.log) {
        (here.log)("hand-over", &Event::Kept(&error.to_string()));
    }
    Ok((daemon, taken))
}

/// When it returns devices, the other process has let go of them.
fn converse(take: &Take, here: Here<'_>, meanwhile: u64) -> Result<Conversed, TakeOverError> {
    let begun = Instant::now();
    let first = take.copy()?;
    let before = first.requests();
    // Whatever would fail, fails here, while the devices work.
    Daemon::rehearse(here, first)?;
    let mut copies = 1;
    let mut completed = 0;
    while completed < meanwhile {
        if begun.elapsed() > COPYING {
            return Err(TakeOverError::TimeOut);
        }
        thread::sleep(BREATH);
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
    Ok(Conversed {
        daemon,
        asked,
        taken: Taken {
            copies,
            copying,
            meanwhile,
            pause: Duration::ZERO,
            stopping,
            rebuilding,
            bytes,
        },
    })
}
