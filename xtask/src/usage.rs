//! How much processor time was used: what says whether a step computed or waited.

use std::cell::Cell;
use std::fs;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Duration;

/// Linux tells times in hundredths of a second, whatever its own clock is.
const TICK: Duration = Duration::from_millis(10);

/// How long until a process that has closed its output is looked at again.
const PAUSE: Duration = Duration::from_millis(5);

thread_local! {
    static CHILDREN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Processor time of the calling thread, and of the processes that it has waited for by [`wait`]
/// and was told of by [`add`]. Where there is no `/proc` it is zero.
pub(crate) fn so_far() -> Duration {
    let own = Usage::read("thread-self").map_or(Duration::ZERO, |usage| usage.own);
    own + CHILDREN.get()
}

/// What another thread used for this one.
pub(crate) fn add(time: Duration) {
    CHILDREN.set(CHILDREN.get() + time);
}

/// Waits for a process, and takes down what it used, with all that it waited for itself.
pub(crate) fn wait(child: &mut Child) -> std::io::Result<ExitStatus> {
    // The kernel tells until somebody has waited for it.
    let pid = child.id().to_string();
    while let Some(usage) = Usage::read(&pid) {
        if usage.ended {
            add(usage.own + usage.children);
            break;
        }
        thread::sleep(PAUSE);
    }
    child.wait()
}

/// What the kernel says of a process or thread.
#[derive(Debug, PartialEq, Eq)]
struct Usage {
    ended: bool,
    own: Duration,
    children: Duration,
}

impl Usage {
    fn read(who: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{who}/stat")).ok()?)
    }

    /// proc_pid_stat(5): the state behind the name, which may hold anything, and eleven fields
    /// later four times.
    fn parse(stat: &str) -> Option<Self> {
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let ended = fields.next()? == "Z";
        let mut times = fields.skip(10).map(|ticks| ticks.parse::<u32>().ok());
        let mut two = || Some(TICK * times.next()?? + TICK * times.next()??);
        Some(Self {
            ended,
            own: two()?,
            children: two()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn fields_are_counted_from_behind_the_name() {
        let stat = "7 (a) Z (b) ) Z 1 7 7 0 -1 4 0 0 0 0 150 50 1000 2000 20 0 1 0 5";
        assert_eq!(
            Usage::parse(stat),
            Some(Usage {
                ended: true,
                own: Duration::from_secs(2),
                children: Duration::from_secs(30),
            })
        );
        assert_eq!(Usage::parse("7 (sh) R 1 7"), None);
    }

    #[test]
    fn what_a_process_and_its_own_used_is_taken_down() {
        if Usage::read("self").is_none() {
            return;
        }
        let before = so_far();
        // Counts until the kernel has told it of a fifth of a second, once itself and once in a
        // process that it waits for.
        let burn = "import os, sys\n\
            while os.times().user < 0.2: pass\n\
            if len(sys.argv) == 1: sys.exit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, '-c', sys.orig_argv[2], 'x']))";
        let mut child = Command::new("python3").args(["-c", burn]).spawn().unwrap();
        assert!(wait(&mut child).unwrap().success());
        let used = so_far() - before;
        assert!(used >= Duration::from_millis(400), "{used:?}");
    }
}
