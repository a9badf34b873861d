//! `ringfence top`: shows the counters of a running daemon, and refreshes them.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use console::Term;
use ringfence_live::counter_table::{Sample, table};
use ringfence_live::daemon::METRICS;
use ringfence_trace::printable;

use crate::args::TopArgs;
use crate::failure::Failure;
use crate::output::print;

/// Maximum size of the counters of all devices in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// A working daemon answers at once.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Prints the counters repeatedly. In a terminal each table replaces the previous one; elsewhere
/// the tables follow each other.
pub(crate) fn top(args: &TopArgs) -> Result<(), Failure> {
    let socket = args.dir.join(METRICS);
    let term = Term::stdout();
    let mut last = (read_sample(&socket)?, Instant::now());
    let mut text = printable(&table(&last.0, None)).into_owned();
    print(&text)?;
    if args.once {
        return Ok(());
    }
    loop {
        thread::sleep(Duration::from_secs_f64(args.interval));
        let now = (read_sample(&socket)?, Instant::now());
        if term.is_term() {
            // The next print reports an error of the terminal.
            let _ = term.clear_last_lines(text.lines().count());
        } else {
            print("\n")?;
        }
        let since = now.1.duration_since(last.1);
        text = printable(&table(&now.0, Some((&last.0, since)))).into_owned();
        print(&text)?;
        last = now;
    }
}

fn read_sample(socket: &Path) -> Result<Sample, Failure> {
    let read =
        || Sample::parse(&counters(socket)?).ok_or(io::Error::from(io::ErrorKind::InvalidData));
    read().map_err(Failure::io(socket))
}

/// Reads the current counters of a daemon in Prometheus text format.
pub(super) fn counters(socket: &Path) -> io::Result<String> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    let mut text = String::new();
    stream.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}
