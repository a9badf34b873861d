//! Standard output and standard error, and the style of tables.

use std::io::{self, ErrorKind, Write};

use console::Term;
use ringfence_report::TableStyle;
use ringfence_trace::printable_line;

use crate::failure::Failure;

/// Returns the style for standard output: the terminal's width and colours (unless `NO_COLOR`
/// disables them), or plain in a pipe.
pub(crate) fn table_style() -> TableStyle {
    let term = Term::stdout();
    if !term.is_term() {
        return TableStyle::PLAIN;
    }
    TableStyle {
        width: term.size_checked().map(|(_, columns)| usize::from(columns)),
        colour: console::colors_enabled(),
    }
}

/// Writes to standard output.
///
/// # Errors
/// [`Failure::Closed`] if the reader has closed the pipe (`| head`), which does not count as a
/// failure; otherwise the error of the write.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    written.map_err(|source| match source.kind() {
        ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Io {
            path: "standard output".into(),
            source,
        },
    })
}

/// Writes to standard output, as [`print`] does, for a command that then writes files or ends with
/// a verdict: both are independent of the reader. Returns false if the reader has closed the pipe.
///
/// # Errors
/// The errors of the write, except that of a closed pipe.
pub(crate) fn print_unless_closed(text: &str) -> Result<bool, Failure> {
    match print(text) {
        Ok(()) => Ok(true),
        Err(Failure::Closed) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes `ringfence: ` and `text` as one line to standard error, with terminal control characters
/// escaped. Ignores errors: a closed pipe or a full disk must not end a replay or a device.
pub(crate) fn print_status(text: &str) {
    print_error_line(&format!("ringfence: {text}"));
}

/// Writes one line to standard error, as [`print_status`] does, without the prefix.
pub(crate) fn print_error_line(text: &str) {
    // One write, so that lines of several processes do not mix.
    let line = format!("{}\n", printable_line(text));
    let _ = io::stderr().write_all(line.as_bytes());
}
