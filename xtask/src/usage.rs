//! CPU time of steps; shows whether a step computed or waited.

use std::cell::Cell;
use std::fs;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Duration;

/// Linux reports times in units of 10 ms, whatever its own clock tick is.
const TICK: Duration = Duration::from_millis(10);

/// Interval of checks for the end of a process that has closed its output.
const PAUSE: Duration = Duration::from_millis(5);

thread_local! {
    static CHILDREN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Returns the CPU time of the calling thread and of its child processes. Child processes count
/// after [`wait`], and other threads' times after [`add`]. Zero without `/proc`.
pub(crate) fn so_far() -> Duration {
    let own = Usage::read("thread-self").map_or(Duration::ZERO, |usage| usage.own);
    own + CHILDREN.get()
}

/// Adds the time that another thread used for this one.
pub(crate) fn add(time: Duration) {
    CHILDREN.set(CHILDREN.get() + time);
}

/// Waits for a process and adds its CPU time, including that of its waited-for child processes.
pub(crate) fn wait(child: &mut Child) -> std::io::Result<ExitStatus> {
    // The kernel keeps the times of a zombie until the wait.
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

/// Values from the kernel for a process or thread.
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

    /// Parses proc_pid_stat(5): the state after the name, which may contain any character, and the
    /// four CPU times eleven fields later.
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
    fn fields_are_counted_after_the_name() {
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
    fn usage_includes_child_processes() {
        if Usage::read("self").is_none() {
            return;
        }
        let before = so_far();
        // Computes until the kernel reports 0.2 s, once itself and once in a child process.
        let burn = "import os, sys\n\
            while os.times().user < 0.2: pass\n\
            if len(sys.argv) == 1: sys.exit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, \
            '-c', sys.orig_argv[2], 'x']))";
        let mut child = Command::new("python3").args(["-c", burn]).spawn().unwrap();
        assert!(wait(&mut child).unwrap().success());
        let used = so_far() - before;
        assert!(used >= Duration::from_millis(400), "{used:?}");
    }
}
