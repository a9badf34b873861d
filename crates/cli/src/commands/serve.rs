//! `ringfence serve`: serves virtio devices behind a virtual IOMMU to a QEMU.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use ringfence_live::confine::drop_privileges;
use ringfence_live::daemon::{
    Daemon, DeviceOptions, EndReason, LocalConfig, Log, use_all_descriptors,
};
use ringfence_live::handover::HandOverTimeouts;
use ringfence_live::sandbox::run_sandboxed_device;
use ringfence_live::server::ServeEvent;

use super::device_options::{
    Image, access, device_options, host_page_pool, limits, memory, own_program,
};
use crate::args::{DeviceArgs, ServeArgs};
use crate::failure::Failure;
use crate::interrupt::{AfterSignal, on_interrupt};
use crate::output::{print, print_status};

/// Exit code after another process has taken over the devices.
const HANDED_OVER: u8 = 4;

/// Serves until Ctrl-C, or until another process takes over.
pub(crate) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    let daemon = if args.take_over {
        take_over(args)?
    } else {
        begin(args)?
    };
    match daemon.join().map_err(Failure::io(&args.dir))? {
        EndReason::Stopped => Ok(ExitCode::SUCCESS),
        EndReason::HandedOver => {
            print_status("another process has the devices");
            Ok(ExitCode::from(HANDED_OVER))
        }
    }
}

fn begin(args: &ServeArgs) -> Result<Daemon, Failure> {
    let options = device_options(&args.devices, Image::None)?;
    let made = options.access.make_directory(&args.dir);
    let dir = made.map_err(Failure::io(&args.dir))?;
    let mut daemon = start(&dir, &options, &args.devices)?;
    match announce(&mut daemon, args) {
        Ok(()) => Ok(daemon),
        Err(error) => {
            // Stopping the daemon also removes its sockets.
            daemon.stopper().stop();
            let _ = daemon.join();
            Err(error)
        }
    }
}

/// Offers the devices to other processes and to QEMU.
fn announce(daemon: &mut Daemon, args: &ServeArgs) -> Result<(), Failure> {
    let offered = daemon.offer_hand_over(HandOverTimeouts::default(), &log());
    offered.map_err(Failure::io(&args.dir))?;
    let arguments = daemon.qemu_args_mut().device_arguments();
    let arguments = arguments.map_err(|(path, source)| Failure::Io { path, source })?;
    confine(daemon, args)?;
    let words: Vec<String> = arguments.iter().map(|word| quote(word)).collect();
    let lines: Vec<String> = words.chunks(2).map(|pair| pair.join(" ")).collect();
    print_status("serving; arguments for QEMU:");
    print(&format!("{}\n", lines.join(" \\\n")))
}

fn take_over(args: &ServeArgs) -> Result<Daemon, Failure> {
    use_all_descriptors();
    let here = LocalConfig {
        dir: &args.dir,
        access: access(&args.devices),
        limits: &limits(&args.devices.caps),
        host_page_pool: host_page_pool(&args.devices),
        memory: &memory(&args.devices),
        sandbox: Some(&own_program()?),
        log: &log(),
    };
    let taken = Daemon::take_over(here, args.precopy_requests);
    let (daemon, taken) = taken.map_err(|(path, error)| Failure::Io {
        path,
        source: io::Error::other(error),
    })?;
    confine(&daemon, args)?;
    print(&format!(
        "taken over: {} copies in {} us while {} requests were completed; then {} us without \
        devices: {} to stop and copy {} bytes, {} to rebuild, {} to release\n",
        taken.copies,
        taken.copying.as_micros(),
        taken.requests_completed,
        taken.pause.as_micros(),
        taken.stopping.as_micros(),
        taken.bytes,
        taken.rebuilding.as_micros(),
        (taken.pause - taken.stopping - taken.rebuilding).as_micros(),
    ))?;
    Ok(daemon)
}

/// Confines the daemon after all its files are open: later threads can open no more files.
fn confine(daemon: &Daemon, args: &ServeArgs) -> Result<(), Failure> {
    daemon.confine().map_err(Failure::io(&args.dir))?;
    stop_with_ctrl_c(daemon)
}

fn stop_with_ctrl_c(daemon: &Daemon) -> Result<(), Failure> {
    let stop = daemon.stopper();
    let handled = on_interrupt(move || {
        stop.stop();
        AfterSignal::GoOn
    });
    handled.map_err(Failure::io("Ctrl-C".as_ref()))
}

/// Runs a device for the process at the other end of standard input, a socket.
pub(crate) fn device() -> Result<(), Failure> {
    run_sandboxed_device().map_err(Failure::io("device".as_ref()))
}

/// Starts the devices; errors of clients go to standard error.
pub(super) fn start(
    dir: &Path,
    options: &DeviceOptions,
    args: &DeviceArgs,
) -> Result<Daemon, Failure> {
    use_all_descriptors();
    let started = Daemon::start(dir, options, &log());
    let mut daemon = started.map_err(|(path, source)| Failure::Io { path, source })?;
    daemon.qemu_args_mut().memory = args.memory;
    daemon.qemu_args_mut().processors = args.cpus;
    // Neither this process nor a QEMU that it starts needs privileges.
    drop_privileges().map_err(Failure::io(dir))?;
    Ok(daemon)
}

/// Returns a log that writes to standard error.
fn log() -> Log {
    Arc::new(|device, event| {
        let line = match event {
            ServeEvent::Refused(refusal) => format!("{device}: refused: {refusal}"),
            ServeEvent::Closed(error) => format!("{device}: connection closed: {error}"),
            ServeEvent::Broken(broken) => format!("{device}: {broken}"),
            ServeEvent::InjectedDma(tried) => format!("{device}: {tried}"),
            ServeEvent::Ended(violation) => {
                format!("{device}: killed the sandbox process: {violation}")
            }
            ServeEvent::Kept(why) => format!("the devices stay in this process: {why}"),
            ServeEvent::Failed(error) => format!("{device}: serves no further client: {error}"),
            ServeEvent::Connected | ServeEvent::Disconnected => return,
        };
        print_status(&line);
    })
}

/// Quotes a word for a shell.
pub(super) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:".contains(c);
    if word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
