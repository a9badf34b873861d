//! Escapes input text for display on a terminal.

use std::borrow::Cow;

/// Escapes the characters of `text` that control a terminal, except tabs and line feeds. Control
/// characters (C0, DEL, C1) and characters that change the text direction become `\u{1b}` and the
/// like. A name in a trace, a report or a file system must not control the terminal that shows it.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, &['\t', '\n'])
}

/// Like [`printable`], and escapes tabs and line feeds too.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let escapes = |char: char| steers_terminal(char) && !kept.contains(&char);
    if !text.contains(escapes) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        match escapes(char) {
            true => out.extend(char.escape_default()),
            false => out.push(char),
        }
    }
    Cow::Owned(out)
}

/// Returns true if a terminal interprets `char` instead of showing it.
pub fn steers_terminal(char: char) -> bool {
    match char {
        '\u{61c}' | '\u{200e}' | '\u{200f}' => true,
        '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        other => other.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_escaped() {
        let cases = [
            ("0000:00:03.0", "0000:00:03.0"),
            (
                "m\u{fc}\u{df}ig \u{8bbe}\u{5907}",
                "m\u{fc}\u{df}ig \u{8bbe}\u{5907}",
            ),
            ("\u{1b}]0;owned\u{7}", "\\u{1b}]0;owned\\u{7}"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("a\u{202e}b\u{2066}", "a\\u{202e}b\\u{2066}"),
            ("a\u{61c}b\u{2028}", "a\\u{61c}b\\u{2028}"),
            ("a\tb\nc\r", "a\tb\nc\\r"),
        ];
        for (text, shown) in cases {
            assert_eq!(printable(text), shown);
            assert_eq!(printable(&printable(text)), shown);
        }
        assert_eq!(printable_line("a\tb\nc\r\u{1b}"), "a\\tb\\nc\\r\\u{1b}");
    }
}
