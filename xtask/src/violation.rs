//! Findings of the rules.

use std::fmt;
use std::path::{Path, PathBuf};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// The finding fails the run.
    Error,
    /// The finding is only printed.
    Note,
}

/// A line or a file that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    severity: Severity,
    file: PathBuf,
    /// Line, from 1; 0 for the file as a whole.
    line: usize,
    message: String,
}

impl Violation {
    pub(crate) fn error(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self {
            severity: Severity::Error,
            file: file.to_owned(),
            line,
            message: message.into(),
        }
    }

    pub(crate) fn note(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self {
            severity: Severity::Note,
            ..Self::error(file, line, message)
        }
    }

    pub(crate) fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Note => "note",
        };
        write!(f, "{severity}: {}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.message)
    }
}
