//! Where output goes and how it may look there.

use std::io::{self, ErrorKind, Write};

use console::Term;
use ringfence_report::TableStyle;
use ringfence_trace::printable_line;

use crate::failure::Failure;

/// As wide as the terminal and coloured there (unless `NO_COLOR` says no); plain in a pipe.
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
/// [`Failure::Closed`] when the reader has gone (`| head`), which is no failure; else the reason.
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

/// Says something on standard error, in a line. What an input has in it is not obeyed by a
/// terminal.
pub(crate) fn print_line(text: &str) {
    eprintln!("ringfence: {}", printable_line(text));
}
