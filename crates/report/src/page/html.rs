//! HTML whose texts are escaped.

use std::fmt::Write;

use ringfence_trace::printable_line;

use crate::plot::InlineSvg;

/// Longest text from a trace, in characters. A longer one is cut.
const LONGEST_TEXT: usize = 4000;
/// Longest name in a legend, in characters: what a line of a plot holds.
const LONGEST_LEGEND: usize = 48;
/// Longest name from a trace, in characters.
const LONGEST_NAME: usize = 80;

/// A page under construction. Markup comes from string literals of this program or from a plot;
/// everything else is escaped.
#[derive(Debug, Default)]
pub(super) struct Html {
    out: String,
}

impl Html {
    /// Appends markup of this program.
    pub(super) fn markup(&mut self, markup: &'static str) -> &mut Self {
        self.out.push_str(markup);
        self
    }

    /// Appends a text. Characters that control a terminal or reverse the reading direction are
    /// shown as escapes.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        escape(&printable_line(&cut(text, LONGEST_TEXT)), &mut self.out);
        self
    }

    /// Opens an element.
    pub(super) fn open(
        &mut self,
        tag: &'static str,
        attributes: &[(&'static str, &str)],
    ) -> &mut Self {
        self.out.push('<');
        self.out.push_str(tag);
        for (name, value) in attributes {
            self.out.push(' ');
            self.out.push_str(name);
            self.out.push_str("=\"");
            escape(&printable_line(&cut(value, LONGEST_TEXT)), &mut self.out);
            self.out.push('"');
        }
        self.out.push('>');
        self
    }

    /// Closes an element.
    pub(super) fn close(&mut self, tag: &'static str) -> &mut Self {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "</{tag}>");
        self
    }

    /// Appends an element that holds only a text.
    pub(super) fn element(
        &mut self,
        tag: &'static str,
        attributes: &[(&'static str, &str)],
        text: &str,
    ) -> &mut Self {
        self.open(tag, attributes).text(text).close(tag)
    }

    /// Appends a list of texts; nothing without texts.
    pub(super) fn list(&mut self, lines: &[String]) {
        if lines.is_empty() {
            return;
        }
        self.markup("<ul>\n");
        for line in lines {
            self.element("li", &[], line);
        }
        self.markup("</ul>\n");
    }

    /// Appends a plot. A narrow screen scrolls it, and a keyboard can reach it to do so.
    pub(super) fn plot(&mut self, label: &str, plot: &InlineSvg) {
        self.open(
            "div",
            &[
                ("class", "scroll"),
                ("tabindex", "0"),
                ("role", "region"),
                ("aria-label", label),
            ],
        );
        self.out.push_str(plot.markup());
        self.close("div");
    }

    /// Returns the page.
    pub(super) fn finish(self) -> String {
        self.out
    }
}

fn escape(text: &str, out: &mut String) {
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
}

fn cut(text: &str, longest: usize) -> std::borrow::Cow<'_, str> {
    match text.char_indices().nth(longest) {
        None => text.into(),
        Some((end, _)) => format!("{}\u{2026}", &text[..end]).into(),
    }
}

/// Returns a name for the legend of a plot.
pub(super) fn short_name(text: &str) -> String {
    shown(text, LONGEST_LEGEND)
}

/// Returns a name from a trace, cut to a length that a table can show.
pub(super) fn name(text: &str) -> String {
    shown(text, LONGEST_NAME)
}

/// Returns the start of a text for a plot or a table. A plot escapes only markup.
fn shown(text: &str, longest: usize) -> String {
    cut(&printable_line(&cut(text, longest)), longest).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stays_a_text_in_elements_and_attributes() {
        let hostile = "</script><img src=x onerror='a()'> \"&amp;\" \u{202e}\u{1b}[31m";
        let mut html = Html::default();
        html.element("p", &[("title", hostile)], hostile);
        let out = html.finish();
        assert_eq!(out.matches('<').count(), 2, "{out}");
        assert_eq!(out.matches('"').count(), 2, "{out}");
        assert!(!out.contains(['\'', '\u{202e}', '\u{1b}']), "{out}");
        assert!(out.contains("&lt;/script&gt;&lt;img"), "{out}");
        assert!(out.contains("&amp;amp;"), "{out}");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(name(&"ä".repeat(80)), "ä".repeat(80));
        assert_eq!(name(&"ä".repeat(81)), format!("{}\u{2026}", "ä".repeat(80)));
        let mut html = Html::default();
        html.text(&"&".repeat(1 << 20));
        assert!(html.finish().len() <= 5 * LONGEST_TEXT + 3);
    }
}
