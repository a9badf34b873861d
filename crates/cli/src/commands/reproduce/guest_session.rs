//! The guests that one experiment boots: their directory, their stop request, and the order in
//! which they boot.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use super::guest_runner::GuestRunner;
use super::interrupt::Interrupt;
use crate::args::ReproduceGuestArgs;
use crate::directory::PrivateDir;
use crate::failure::Failure;
use crate::output::print_status;

/// The directory and the stop request of an experiment's guests.
#[derive(Debug)]
pub(super) struct GuestSession {
    program: PathBuf,
    dir: PrivateDir,
    stop: Arc<Interrupt>,
}

impl GuestSession {
    /// Creates the directory, and a handler for Ctrl-C.
    pub(super) fn new() -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::system("find this program"))?;
        // Below the system's temporary directory, because socket paths must be short.
        let dir = PrivateDir::new()?;
        let stop = Arc::new(Interrupt::default());
        stop.install_handler()
            .map_err(Failure::io("Ctrl-C".as_ref()))?;
        Ok(Self { program, dir, stop })
    }

    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.stop
    }

    /// Returns the runner of guests with `kernel`.
    pub(super) fn runner<'a>(
        &'a self,
        args: &'a ReproduceGuestArgs,
        kernel: &'a str,
    ) -> GuestRunner<'a> {
        GuestRunner {
            program: self.program.clone(),
            dir: self.dir.path().to_owned(),
            kernel,
            args,
            stop: &self.stop,
        }
    }

    /// Removes the directory. Returns true if Ctrl-C requested a stop.
    pub(super) fn finish(self) -> bool {
        drop(self.dir);
        self.stop.finish();
        self.stop.is_requested()
    }
}

/// Returns the reason why `experiment` cannot boot a guest without a fetch; `None` if it can.
pub(super) fn not_prepared(args: &ReproduceGuestArgs, experiment: &str) -> Option<String> {
    if args.guest_cache.join("kernels").is_dir() {
        return None;
    }
    Some(format!(
        "no guest was prepared in {}; run `ringfence reproduce {experiment}`, which fetches one, \
        or name another directory with --guest-cache",
        args.guest_cache.display()
    ))
}

/// Boots each guest with `boot`, as many in parallel as there are CPUs, and prints the result that
/// `boot` returns. After a stop request, the other guests do not boot.
pub(super) fn boot_all<G: Send>(
    guests: Vec<G>,
    stop: &Interrupt,
    name: impl Fn(&G) -> String + Sync,
    boot: impl Fn(G) -> String + Sync,
) {
    let count = guests.len();
    let next = Mutex::new(guests.into_iter().enumerate());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers.min(count) {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().ok().and_then(|mut next| next.next());
                    let Some((index, guest)) = taken else { break };
                    if stop.is_requested() {
                        continue;
                    }
                    let name = format!("guest {}/{count} {}", index + 1, name(&guest));
                    if io::stderr().is_terminal() {
                        print_status(&name);
                    }
                    let begun = Instant::now();
                    let result = boot(guest);
                    // Always print: the user sees partial results before the table, or without it
                    // after an error.
                    let seconds = begun.elapsed().as_secs_f64();
                    print_status(&format!("{name}: {result} ({seconds:.0} s)"));
                }
            });
        }
    });
}
