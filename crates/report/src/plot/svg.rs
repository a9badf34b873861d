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

/// Series and component colours follow Paul Tol's "bright" scheme. Text, `.ground`, `.grid`,
/// `.axis` and `.gap` adapt to the reader's colour scheme.
const STYLE: &str = "\
text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#24292f}\
.title{font-size:15px;font-weight:600}.faint{fill:#59636e}.strong{font-weight:600}\
.ground{fill:#fff}.grid{stroke:#d1d9e0;stroke-width:1}.axis{stroke:#59636e;stroke-width:1}\
.thin{stroke:#818b98;stroke-width:.8;fill:none}\
.band{fill:#818b98;fill-opacity:.12}.gap{stroke:#fff;stroke-width:3;fill:none}\
.c0{fill:#4477aa}.c1{fill:#66ccee}.c2{fill:#ee6677}.c3{fill:#aa3377}\
.c4{fill:#228833}.c5{fill:#ccbb44}.c6{fill:#a0a4ab}\
.modelled{fill:#e08a2e}.measured{fill:#4477aa}\
.strict{fill:#228833}.own-pool{fill:#4477aa}.bounded{fill:#e08a2e}.none{fill:#cc3311}\
.s0,.s1,.s2,.s3,.s4,.s5,.s6{fill:none;stroke-width:1.8;stroke-linejoin:round}\
.s0{stroke:#4477aa}.s1{stroke:#ee6677}.s2{stroke:#228833}\
.s3{stroke:#ccbb44}.s4{stroke:#66ccee}.s5{stroke:#aa3377}.s6{stroke:#818b98}\
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

    pub(super) fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
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

    /// Returns the file. Screen readers read `about`.
    pub(super) fn finish(self, about: &str) -> String {
        let Self {
            width,
            height,
            body,
        } = self;
        let about = escape(about);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
            width=\"{width:.0}\" height=\"{height:.0}\" \
            role=\"img\">\n<title>{about}</title>\n<style>{STYLE}</style>\n\
             <rect x=\"0\" y=\"0\" width=\"{width:.0}\" height=\"{height:.0}\" \
             class=\"ground\"/>\n{body}</svg>\n"
        )
    }
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
    // Removes control characters; XML 1.0 forbids most of them.
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Returns the approximate width of a text.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * LETTER_WIDTH
}
