//! Input JSON, made safe for a terminal.

use std::borrow::Cow;

use ringfence_trace::steers_terminal;
use serde::Serialize;

/// Returns indented JSON with a final newline, safe for a terminal.
pub fn json(value: &impl Serialize) -> String {
    // Our own types always serialise: keys are strings, and non-finite floats become null.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    printable_json(&text).into_owned()
}

/// Escapes characters that control a terminal as `\u`; JSON itself requires that only for C0. A
/// JSON parser reads the same text.
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let obeyed = |character: char| steers_terminal(character) && character != '\n';
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_meaning() {
        let name = "\x1b\u{9b}31m\u{202e}\u{61c}\n\u{7f}";
        let json = serde_json::to_string_pretty(&[name]).unwrap();
        let shown = printable_json(&json);
        assert!(!shown.contains(|c: char| steers_terminal(c) && c != '\n'));
        let back: [String; 1] = serde_json::from_str(&shown).unwrap();
        assert_eq!(back, [name]);
    }
}
