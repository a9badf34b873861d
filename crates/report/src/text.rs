//! Text of an input, made fit for a terminal.

use std::borrow::Cow;

/// Shows `text` without what a terminal would obey: control characters (C0, DEL, C1) and characters that
/// change the direction of writing appear as `\u{1b}`. Names in traces, reports and file systems are not
/// ours: whoever chose them must not move the cursor or set the title of the window.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

/// [`visible`], line by line: line feeds stay.
pub fn visible_lines(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n'])
}

fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let obeyed = |character: char| is_obeyed(character) && !kept.contains(&character);
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if obeyed(character) {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

/// JSON in which what [`visible`] escapes is a `\u` escape, too: JSON itself demands that of C0 only.
/// A reader of the JSON gets the same text.
pub fn visible_json(json: &str) -> Cow<'_, str> {
    let obeyed = |character: char| is_obeyed(character) && character != '\n';
    if !json.contains(obeyed) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len() + 16);
    for character in json.chars() {
        if obeyed(character) {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_nothing_of_an_input() {
        let title = "\x1b]0;owned\x07";
        for (text, shown) in [
            ("0000:00:03.0", "0000:00:03.0"),
            ("müßig 设备", "müßig 设备"),
            (title, "\\u{1b}]0;owned\\u{7}"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("a\u{202e}b\u{2066}", "a\\u{202e}b\\u{2066}"),
        ] {
            assert_eq!(visible(text), shown);
            assert_eq!(visible(&visible(text)), shown);
        }
        assert_eq!(visible_lines("a\x1b\nb\n"), "a\\u{1b}\nb\n");
    }

    #[test]
    fn json_keeps_its_meaning() {
        let name = "\x1b\u{9b}31m\u{202e}\n\u{7f}";
        let json = serde_json::to_string_pretty(&[name]).unwrap();
        let shown = visible_json(&json);
        assert!(!shown.contains(|c: char| is_obeyed(c) && c != '\n'));
        let back: [String; 1] = serde_json::from_str(&shown).unwrap();
        assert_eq!(back, [name]);
    }
}
