//! The SVG shapes of the plots.

use std::fmt::Write;

/// The part of a text that its coordinates refer to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Width of the narrowest bar that is drawn, in units of the image.
const MIN_WIDTH: f64 = 0.05;
/// Average advance of a 12 px letter; titles are larger.
const LETTER_WIDTH: f64 = 6.7;

/// An SVG image under construction.
pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Width from which an image is too detailed for a narrow screen.
const WIDE: f64 = 500.0;

/// An image within a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InlineSvg(String);

impl InlineSvg {
    /// Returns the element `svg`.
    pub(crate) fn markup(&self) -> &str {
        &self.0
    }
}

/// Colours of the components (classes `c0` and up, filled) and of the series (`s0` and up, drawn),
/// in the order of Paul Tol's "bright" scheme. The grey is darker than in the scheme, so that lines
/// are visible on white.
pub(super) const COLOURS: [&str; 7] = [
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#818b98",
];

/// All other classes. Text, `.ground`, `.grid`, `.axis` and `.gap` adapt to the reader's colour
/// scheme.
const STYLE: &str = "\
text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#24292f}\
.title{font-size:15px;font-weight:600}.faint{fill:#59636e}.strong{font-weight:600}\
.ground{fill:#fff}.grid{stroke:#d1d9e0;stroke-width:1}.axis{stroke:#59636e;stroke-width:1}\
.thin{stroke:#818b98;stroke-width:.8;fill:none}\
.band{fill:#818b98;fill-opacity:.12}.gap{stroke:#fff;stroke-width:3;fill:none}\
.modelled{fill:#e08a2e}.measured{fill:#4477aa}\
.strict{fill:#228833}.own-pool{fill:#4477aa}.bounded{fill:#e08a2e}.none{fill:#cc3311}\
.series{fill:none;stroke-width:1.8;stroke-linejoin:round}\
.hollow{fill:none;stroke:#4477aa;stroke-width:2}.join{stroke:#4477aa;stroke-width:2}\
@media(prefers-color-scheme:dark){\
text{fill:#e6edf3}.faint{fill:#9198a1}.ground{fill:#0d1117}.grid{stroke:#2b323b}\
.axis{stroke:#9198a1}.gap{stroke:#0d1117}}";

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self {
            width,
            height,
            body: String::new(),
        }
    }

    fn push(&mut self, shape: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.body, "{shape}");
    }

    pub(super) fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &'static str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let text = escape(text);
        self.push(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{text}</text>"#
        ));
    }

    /// Draws a bar, unless it is narrower than [`MIN_WIDTH`].
    pub(super) fn bar(&mut self, x: f64, y: f64, width: f64, height: f64, class: &str) {
        if width > MIN_WIDTH {
            self.push(format_args!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
                class=\"{class}\"/>"
            ));
        }
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(format_args!(
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        ));
    }

    pub(super) fn circle(&mut self, x: f64, y: f64, radius: f64, class: &str) {
        self.push(format_args!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius:.1}" class="{class}"/>"#
        ));
    }

    pub(super) fn polygon(&mut self, points: &[(f64, f64)], class: &str) {
        let points = points_attribute(points);
        self.push(format_args!(
            r#"<polygon points="{points}" class="{class}"/>"#
        ));
    }

    /// Draws points joined by lines; draws nothing for fewer than two.
    pub(super) fn polyline(&mut self, points: &[(f64, f64)], class: &str) {
        if points.len() < 2 {
            return;
        }
        let points = points_attribute(points);
        self.push(format_args!(
            r#"<polyline points="{points}" class="{class}"/>"#
        ));
    }

    /// Begins shapes that are drawn with dashes of these lengths.
    pub(super) fn begin_dashes(&mut self, dashes: &str) {
        self.push(format_args!(r#"<g stroke-dasharray="{dashes}">"#));
    }

    /// Ends the shapes of [`begin_dashes`](Self::begin_dashes).
    pub(super) fn end_dashes(&mut self) {
        self.push(format_args!("</g>"));
    }

    /// Draws the break mark of a bar that exceeds its scale.
    pub(super) fn break_mark(&mut self, x: f64, y: f64, height: f64) {
        for shift in [0.0, 5.0] {
            let (x, half) = (x + shift, height / 2.0);
            self.push(format_args!(
                r#"<path d="M{:.1} {:.1}l4 {:.1}l-4 {:.1}" class="gap"/>"#,
                x,
                y - 1.0,
                half + 1.0,
                half + 1.0
            ));
        }
    }

    /// Returns the image for a page whose style sheet has the classes. Screen readers read
    /// `about`.
    pub(super) fn finish_inline(self, about: &str) -> InlineSvg {
        let Self {
            width,
            height,
            body,
        } = self;
        let about = escape(about);
        let size = if width > WIDE { "chart wide" } else { "chart" };
        InlineSvg(format!(
            "<svg class=\"{size}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
            role=\"img\">\n<title>{about}</title>\n{body}</svg>\n"
        ))
    }

    /// Returns the file. Screen readers read `about`. Control characters are removed from it, as
    /// from all texts.
    pub(super) fn finish(self, about: &str) -> String {
        let Self {
            width,
            height,
            body,
        } = self;
        let about = escape(about);
        let colours = colour_classes();
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
            width=\"{width:.0}\" height=\"{height:.0}\" \
            role=\"img\">\n<title>{about}</title>\n<style>{STYLE}{colours}</style>\n\
             <rect x=\"0\" y=\"0\" width=\"{width:.0}\" height=\"{height:.0}\" \
             class=\"ground\"/>\n{body}</svg>\n"
        )
    }
}

/// Returns the classes of [`COLOURS`].
fn colour_classes() -> String {
    let numbered = COLOURS.iter().enumerate();
    numbered
        .map(|(number, colour)| format!(".c{number}{{fill:{colour}}}.s{number}{{stroke:{colour}}}"))
        .collect()
}

fn points_attribute(points: &[(f64, f64)]) -> String {
    let points: Vec<String> = points
        .iter()
        .map(|(x, y)| format!("{x:.1},{y:.1}"))
        .collect();
    points.join(" ")
}

fn escape(text: &str) -> String {
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    // XML 1.0 forbids most control characters, and these two (section 2.2, production 2).
    let is_allowed = |c: &char| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}');
    text.chars().filter(is_allowed).collect()
}

/// Returns the approximate width of a text.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * LETTER_WIDTH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(draw: impl FnOnce(&mut Svg)) -> String {
        let mut svg = Svg::new(10.0, 10.0);
        draw(&mut svg);
        svg.body
    }

    #[test]
    fn a_component_and_a_series_of_one_number_have_one_colour() {
        let classes = colour_classes();
        for (number, colour) in COLOURS.iter().enumerate() {
            for class in [
                format!(".c{number}{{fill:{colour}}}"),
                format!(".s{number}{{stroke:{colour}}}"),
            ] {
                assert_eq!(classes.matches(&class).count(), 1, "{class} in {classes}");
            }
            assert!(!COLOURS[..number].contains(colour), "{colour}");
        }
        assert!(Svg::new(1.0, 1.0).finish("").contains(&classes));
        // The page has the same colours.
        let page = include_str!("../page/page.css");
        let rules = classes.split_inclusive('}');
        rules.for_each(|rule| assert!(page.contains(&format!(".chart {rule}")), "{rule}"));
    }

    #[test]
    fn shapes_too_small_to_see_are_not_drawn() {
        for width in [-1.0, 0.0, MIN_WIDTH, f64::NAN] {
            assert_eq!(body(|svg| svg.bar(0.0, 0.0, width, 5.0, "c0")), "");
        }
        assert!(body(|svg| svg.bar(0.0, 0.0, 0.1, 5.0, "c0")).starts_with("<rect "));
        assert_eq!(body(|svg| svg.polyline(&[(1.0, 2.0)], "s0")), "");
        let line = body(|svg| svg.polyline(&[(1.0, 2.0), (3.0, 4.25)], "s0"));
        assert!(line.contains("points=\"1.0,2.0 3.0,4.2\""), "{line}");
    }

    #[test]
    fn a_text_cannot_leave_its_element() {
        let hostile = "a<b>&c\u{1b}\u{fffe}\u{ffff}\n";
        let text = body(|svg| svg.text(1.0, 2.0, Anchor::Start, "", hostile));
        assert!(text.ends_with(">a&lt;b&gt;&amp;c</text>\n"), "{text}");
        let file = Svg::new(1.0, 1.0).finish("</title>");
        assert!(file.contains("<title>&lt;/title&gt;</title>"), "{file}");
    }

    /// Two zigzags, each as high as the bar and a unit more at both ends.
    #[test]
    fn a_break_mark_crosses_its_bar() {
        let mark = body(|svg| svg.break_mark(100.0, 20.0, 16.0));
        for path in ["M100.0 19.0l4 9.0l-4 9.0", "M105.0 19.0l4 9.0l-4 9.0"] {
            assert!(mark.contains(path), "{mark}");
        }
    }
}
