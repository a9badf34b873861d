//! `ringfence top`.

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

/// More than all counters of all devices take.
const MAX_BYTES: u64 = 1 << 20;
/// The daemon answers at once, or not at all.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Looks at the counters again and again. In a terminal the table stays in its place; elsewhere one
/// follows the other.
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
            // An error here is one of the terminal's; the next print says so.
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

/// The counters of a daemon as of now, as Prometheus's text.
pub(super) fn counters(socket: &Path) -> io::Result<String> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    let mut text = String::new();
    stream.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}
