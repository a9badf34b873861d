//! A progress bar on standard error if that is a terminal; otherwise no output.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ringfence_trace::printable_line;

/// Progress through one trace.
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    /// Returns true if a bar is visible.
    pub(crate) fn is_visible() -> bool {
        std::io::stderr().is_terminal()
    }

    /// Creates a bar for a trace of `lines` lines, or a counter if the number is unknown.
    pub(crate) fn new(name: &str, lines: Option<u64>) -> Self {
        Self::of_units(name, lines, "lines")
    }

    /// Like [`new`](Self::new), for steps that are named `units`.
    pub(crate) fn of_units(name: &str, lines: Option<u64>, units: &str) -> Self {
        if !Self::is_visible() {
            return Self(None);
        }
        let (bar, template) = match lines {
            Some(lines) => (
                ProgressBar::new(lines),
                format!(
                    "{{prefix}} {{bar:30}} {{percent:>3}}%  {{human_pos}} {units}  {{eta}} left"
                ),
            ),
            None => (
                ProgressBar::new_spinner(),
                format!("{{prefix}} {{spinner}} {{human_pos}} {units}  {{elapsed}}"),
            ),
        };
        bar.set_draw_target(ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.set_prefix(printable_line(name).into_owned());
        bar.tick();
        Self(Some(bar))
    }

    /// Sets the number of processed lines.
    pub(crate) fn update(&self, lines: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(lines);
            bar.tick();
        }
    }
}

impl Drop for Progress {
    /// Clears the bar from the screen on every path out.
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
