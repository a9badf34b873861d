//! Text of a trace, fit to be shown on a terminal.

use std::borrow::Cow;

/// `text` with its control characters escaped, tabs and line ends aside, and with those that
/// change the direction of writing: a name in a trace must not steer the terminal that shows it.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(steers) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        match steers(char) {
            true => out.extend(char.escape_unicode()),
            false => out.push(char),
        }
    }
    Cow::Owned(out)
}

fn steers(char: char) -> bool {
    match char {
        '\t' | '\n' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' => true,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        other => other.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        let cases = [
            ("0000:00:03.0", "0000:00:03.0"),
            ("\u{1b}]0;owned\u{7}", "\\u{1b}]0;owned\\u{7}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\u{202e}b", "a\\u{202e}b"),
            ("a\tb\nc\r", "a\tb\nc\\u{d}"),
            ("\u{e9}\u{4e16}", "\u{e9}\u{4e16}"),
        ];
        for (text, shown) in cases {
            assert_eq!(printable(text), shown);
        }
    }
}
