//! Lines that are not events: comments, headers and the kernel's reports of lost events.

use super::cursor::Cursor;
use crate::error::Malformed;

/// Contents of a line without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NonEvent {
    /// The line is not about events.
    Nothing,
    /// The kernel lost this many events here; 1 if the line gives no number.
    Lost(u64),
    /// From the header's `entries-in-buffer/entries-written`: number of overwritten events.
    Overwritten(u64),
}

/// Parses a line that may not be an event; `None` if it looks like an event.
#[inline]
pub(super) fn parse(line: &[u8]) -> Result<Option<NonEvent>, Malformed> {
    let mut text = Cursor::new(line);
    text.skip_spaces();
    match text.rest {
        [] => Ok(Some(NonEvent::Nothing)),
        [b'#', comment @ ..] => Ok(Some(entries(comment))),
        [b'C', b'P', b'U', b':', rest @ ..] => match lost(rest) {
            Some(lost) => lost.map(Some),
            None => Ok(None),
        },
        // Lines of trace-cmd (`CPU 1 is empty`, `cpus=2`) and of a stack trace (` => function`).
        [b'C', b'P', b'U', b' ', rest @ ..] if rest.ends_with(b"is empty") => {
            Ok(Some(NonEvent::Nothing))
        }
        [b'c', b'p', b'u', b's', b'=', ..] | [b'=', b'>', b' ', ..] => Ok(Some(NonEvent::Nothing)),
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', b'=', ..] => Ok(Some(NonEvent::Nothing)),
        _ => Ok(None),
    }
}

/// Parses `1 [LOST 123 EVENTS]` (tracefs), `1 [123 EVENTS DROPPED]` and `1 [EVENTS DROPPED]`
/// (trace-cmd); `None` if the line has none of these forms (a task can be called `CPU:`).
fn lost(rest: &[u8]) -> Option<Result<NonEvent, Malformed>> {
    let mut text = Cursor::new(rest);
    text.decimal()?;
    text.skip_spaces();
    if !text.literal(b"[") {
        return None;
    }
    if text.literal(b"EVENTS DROPPED]") {
        return Some(Ok(NonEvent::Lost(1)));
    }
    if text.literal(b"LOST ") {
        let count = text.decimal().filter(|_| text.literal(b" EVENTS]"));
        return Some(count.map(NonEvent::Lost).ok_or(Malformed::BadLost));
    }
    let count = text.decimal().filter(|_| text.literal(b" EVENTS DROPPED]"));
    // Any other text in brackets is not a CPU number, so the line is not an event.
    Some(count.map(NonEvent::Lost).ok_or(Malformed::BadLost))
}

/// Parses ` entries-in-buffer/entries-written: 360693/360693   #P:2`.
fn entries(comment: &[u8]) -> NonEvent {
    let mut text = Cursor::new(comment);
    text.skip_spaces();
    if !text.literal(b"entries-in-buffer/entries-written:") {
        return NonEvent::Nothing;
    }
    text.skip_spaces();
    let in_buffer = text.decimal();
    let written = if text.literal(b"/") {
        text.decimal()
    } else {
        None
    };
    match (in_buffer, written) {
        (Some(in_buffer), Some(written)) if written > in_buffer => {
            NonEvent::Overwritten(written - in_buffer)
        }
        _ => NonEvent::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asides() {
        use NonEvent::{Lost, Nothing, Overwritten};
        let cases: [(&str, Result<Option<NonEvent>, Malformed>); 14] = [
            ("", Ok(Some(Nothing))),
            ("   ", Ok(Some(Nothing))),
            ("# tracer: nop", Ok(Some(Nothing))),
            (
                "# entries-in-buffer/entries-written: 10/10   #P:2",
                Ok(Some(Nothing)),
            ),
            (
                "# entries-in-buffer/entries-written: 10/17   #P:2",
                Ok(Some(Overwritten(7))),
            ),
            ("CPU:1 [LOST 123 EVENTS]", Ok(Some(Lost(123)))),
            ("CPU:0 [9 EVENTS DROPPED]", Ok(Some(Lost(9)))),
            ("CPU:0 [EVENTS DROPPED]", Ok(Some(Lost(1)))),
            ("CPU:1 [LOST many EVENTS]", Err(Malformed::BadLost)),
            ("CPU:1 [LOST 12", Err(Malformed::BadLost)),
            ("CPU 1 is empty", Ok(Some(Nothing))),
            ("cpus=2", Ok(Some(Nothing))),
            (" => ret_from_fork", Ok(Some(Nothing))),
            ("CPU:x-7  [000] .... 1.0: e: p", Ok(None)),
        ];
        for (line, expected) in cases {
            assert_eq!(parse(line.as_bytes()), expected, "{line}");
        }
    }
}
