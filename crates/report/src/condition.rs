//! Conditions on rows, for `--fail-if`.
//!
//! The form is `[MODE:]FIELD OP NUMBER`; commas join several conditions. FIELD is a field of a JSON
//! row. A dot selects a nested value (`violations.stale`, `components.map_table_cycles`,
//! `walk_cache_hit_rate.0`). The name of an object with a `total` means that total.

use serde_json::Value;

use ringfence_lab::compose::hint;
use ringfence_lab::row::Row;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
    NotEqual,
}

/// Operators. Longer ones first, so that the parser does not read `<=` as `<`.
const OPS: &[(&str, Op)] = &[
    ("<=", Op::LessOrEqual),
    (">=", Op::GreaterOrEqual),
    ("==", Op::Equal),
    ("!=", Op::NotEqual),
    ("<", Op::Less),
    (">", Op::Greater),
    ("=", Op::Equal),
];

/// A condition on rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    mode: Option<String>,
    field: String,
    op: Op,
    number: f64,
    text: String,
}

/// The reason why a text is not a condition, or does not apply to a report.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConditionError {
    /// The text has no `FIELD OP NUMBER` form.
    #[error("{0:?} is not a condition; write [MODE:]FIELD OP NUMBER, as in fence:violations>0")]
    Syntax(String),
    /// The right side is not a number.
    #[error("{condition:?}: {given:?} is not a number")]
    NotANumber {
        /// Text of the condition.
        condition: String,
        /// Its right side.
        given: String,
    },
    /// Rows have no such field, or the field is not a number.
    #[error("no numeric field is named {field:?}; {}", known_fields(field, known))]
    NoSuchField {
        /// Field that the user gave.
        field: String,
        /// Fields that a condition can compare.
        known: Vec<String>,
    },
    /// The field has no number in a row, because the run did not measure it.
    #[error("{condition:?}: the field was not measured{}; {advice}", for_row(row.as_ref()))]
    NotMeasured {
        /// Text of the condition.
        condition: String,
        /// Trace and mode of the row; `None` before the run.
        row: Option<(String, String)>,
        /// Advice to the user on measuring the field.
        advice: &'static str,
    },
    /// A row covers no map, so the condition would check nothing.
    #[error(
        "{condition:?}: mode {mode} maps nothing in {trace}; give a trace with maps, or select a \
        mode with MODE:"
    )]
    NoMaps {
        /// Text of the condition.
        condition: String,
        /// Name of the trace.
        trace: String,
        /// Name of the mode.
        mode: String,
    },
    /// The condition names a mode that did not run.
    #[error(
        "mode {mode:?} was not replayed; {}the replayed modes are {}",
        hint(mode, ran), ran.join(", ")
    )]
    NoSuchMode {
        /// Mode that the user gave.
        mode: String,
        /// Modes that ran.
        ran: Vec<String>,
    },
}

fn known_fields(field: &str, known: &[String]) -> String {
    match hint(field, known) {
        // The full list is longer than a screen line.
        hint if !hint.is_empty() => format!("{hint}docs/JSON.md lists all fields"),
        _ => format!("the fields are {}", known.join(", ")),
    }
}

fn for_row(row: Option<&(String, String)>) -> String {
    row.map_or_else(String::new, |(trace, mode)| format!(" for {trace}, {mode}"))
}

/// A row for which a condition holds.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{trace}, {mode}: {condition} (it is {value})")]
pub struct FailedCondition {
    /// Name of the trace.
    pub trace: String,
    /// Name of the mode.
    pub mode: String,
    /// The condition, as the user gave it.
    pub condition: String,
    /// Value of the condition's field.
    pub value: f64,
}

impl Condition {
    /// Parses conditions joined by commas.
    ///
    /// # Errors
    /// [`ConditionError::Syntax`], [`ConditionError::NotANumber`].
    pub fn parse_all(text: &str) -> Result<Vec<Self>, ConditionError> {
        text.split(',').map(Self::parse).collect()
    }

    fn parse(text: &str) -> Result<Self, ConditionError> {
        let text = text.trim();
        let syntax = || ConditionError::Syntax(text.to_owned());
        let at = text.find(['<', '>', '=', '!']).ok_or_else(syntax)?;
        let (left, right) = text.split_at(at);
        let (sign, op) = OPS
            .iter()
            .find(|(sign, _)| right.starts_with(sign))
            .ok_or_else(syntax)?;
        let right = right.get(sign.len()..).unwrap_or_default().trim();
        let number = right
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite());
        let number = number.ok_or_else(|| ConditionError::NotANumber {
            condition: text.to_owned(),
            given: right.to_owned(),
        })?;
        let (mode, field) = match left.rsplit_once(':') {
            Some((mode, field)) => (Some(mode.trim().to_owned()), field.trim()),
            None => (None, left.trim()),
        };
        if field.is_empty() || mode.as_ref().is_some_and(String::is_empty) {
            return Err(syntax());
        }
        Ok(Self {
            mode,
            field: field.to_owned(),
            op: *op,
            number,
            text: text.to_owned(),
        })
    }

    /// Returns the rows for which the condition holds.
    ///
    /// # Errors
    /// The rows lack the field or the mode, the run did not measure the number, or a row has no
    /// map. Such a condition checks nothing, which its author did not intend.
    pub fn matching_rows(&self, rows: &[Row]) -> Result<Vec<FailedCondition>, ConditionError> {
        let mut found = Vec::new();
        let mut seen = false;
        for row in rows {
            if self.mode.as_ref().is_some_and(|mode| *mode != row.mode) {
                continue;
            }
            seen = true;
            let object = serde_json::to_value(row).unwrap_or_default();
            if row.maps == 0 {
                return Err(ConditionError::NoMaps {
                    condition: self.text.clone(),
                    trace: row.trace.clone(),
                    mode: row.mode.clone(),
                });
            }
            let value = number(&object, &self.field);
            let value = value.ok_or_else(|| self.no_number(Some(row)))?;
            if self.compare(value) {
                found.push(FailedCondition {
                    trace: row.trace.clone(),
                    mode: row.mode.clone(),
                    condition: self.text.clone(),
                    value,
                });
            }
        }
        match &self.mode {
            Some(mode) if !seen => Err(ConditionError::NoSuchMode {
                mode: mode.clone(),
                ran: rows.iter().map(|row| row.mode.clone()).collect(),
            }),
            _ => Ok(found),
        }
    }

    /// Checks before a run of `modes` that its rows will have the field and the mode. `timed` is
    /// true for a run with repetitions, `attack` for one with the attack pass.
    ///
    /// # Errors
    /// As for [`Condition::matching_rows`].
    pub fn check(&self, modes: &[String], timed: bool, attack: bool) -> Result<(), ConditionError> {
        if let Some(mode) = self.mode.as_ref().filter(|mode| !modes.contains(mode)) {
            return Err(ConditionError::NoSuchMode {
                mode: mode.clone(),
                ran: modes.to_vec(),
            });
        }
        match self.has_number(timed, attack) {
            true => Ok(()),
            false => Err(self.no_number(None)),
        }
    }

    fn has_number(&self, timed: bool, attack: bool) -> bool {
        number(&object(timed, attack), &self.field).is_some()
    }

    /// Returns the reason why `row` lacks the number; `None` stands for all rows.
    fn no_number(&self, row: Option<&Row>) -> ConditionError {
        if !self.has_number(true, true) {
            let mut known = Vec::new();
            names(&object(true, true), "", &mut known);
            return ConditionError::NoSuchField {
                field: self.field.clone(),
                known,
            };
        }
        ConditionError::NotMeasured {
            condition: self.text.clone(),
            row: row.map(|row| (row.trace.clone(), row.mode.clone())),
            advice: if !self.has_number(false, true) {
                "--repeat N measures cycles of a trace with maps and unmaps"
            } else if !self.has_number(true, false) {
                "omit --no-attack"
            } else {
                "select a mode that has it with MODE:"
            },
        }
    }

    fn compare(&self, value: f64) -> bool {
        match self.op {
            Op::Less => value < self.number,
            Op::LessOrEqual => value <= self.number,
            Op::Greater => value > self.number,
            Op::GreaterOrEqual => value >= self.number,
            Op::Equal => value == self.number,
            Op::NotEqual => value != self.number,
        }
    }
}

/// Returns a row of a run in its JSON form.
fn object(timed: bool, attack: bool) -> Value {
    serde_json::to_value(Row::of_run(timed, attack)).unwrap_or_default()
}

/// Returns the number at a dotted path.
pub(super) fn number(object: &Value, path: &str) -> Option<f64> {
    let mut at = object;
    for step in path.split('.') {
        at = match at {
            Value::Array(items) => items.get(step.parse::<usize>().ok()?)?,
            _ => at.get(step)?,
        };
    }
    at.as_f64().or_else(|| at.get("total")?.as_f64())
}

/// Appends the paths of all numbers in an object to `out`.
pub(super) fn names(value: &Value, prefix: &str, out: &mut Vec<String>) {
    let join = |key: &str| match prefix {
        "" => key.to_owned(),
        _ => format!("{prefix}.{key}"),
    };
    match value {
        Value::Object(fields) => {
            if fields.contains_key("total") {
                out.push(prefix.to_owned());
            }
            for (key, value) in fields {
                names(value, &join(key), out);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                names(value, &join(&index.to_string()), out);
            }
        }
        Value::Number(_) => out.push(prefix.to_owned()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_lab::row::Violations;

    fn row(mode: &str, violations: u64) -> Row {
        Row {
            trace: "t".into(),
            mode: mode.into(),
            maps: 1,
            relative_throughput: Some(0.25),
            violations: Some(Violations {
                stale: violations,
                total: violations,
                ..Violations::default()
            }),
            ..Row::of_run(true, true)
        }
    }

    fn failing(text: &str) -> Vec<String> {
        let rows = [row("fence", 0), row("defer", 3)];
        let conditions = Condition::parse_all(text).unwrap();
        conditions
            .iter()
            .flat_map(|condition| condition.matching_rows(&rows).unwrap())
            .map(|unmet| unmet.mode)
            .collect()
    }

    #[test]
    fn conditions_select_rows() {
        let cases: [(&str, &[&str]); 9] = [
            ("violations>0", &["defer"]),
            ("violations.stale >= 3", &["defer"]),
            ("violations.stale>3", &[]),
            ("fence:violations > 0", &[]),
            (
                "defer:violations!=0, fence:violations==0",
                &["defer", "fence"],
            ),
            ("relative_throughput<=0.25", &["fence", "defer"]),
            ("relative_throughput < 2.5e-1", &[]),
            ("walk_cache_hit_rate.2=0", &["fence", "defer"]),
            ("components.map_table_cycles<-1", &[]),
        ];
        for (text, expected) in cases {
            assert_eq!(failing(text), expected, "{text}");
        }
    }

    #[test]
    fn unmeasured_is_not_zero() {
        let one = |text: &str| Condition::parse_all(text).unwrap().remove(0);
        let untimed = Row {
            maps: 1,
            ..Row::of_run(false, true)
        };
        let error = one("map_cycles>=0").matching_rows(&[row("fence", 0), untimed]);
        assert!(
            matches!(error, Err(ConditionError::NotMeasured { row: Some(_), .. })),
            "{error:?}"
        );
        let without_maps = Row {
            maps: 0,
            ..row("fence", 0)
        };
        let error = one("violations>0").matching_rows(std::slice::from_ref(&without_maps));
        assert!(
            matches!(error, Err(ConditionError::NoMaps { .. })),
            "{error:?}"
        );
        // A condition on another row ignores this one.
        let rows = [without_maps, row("defer", 3)];
        assert_eq!(
            one("defer:violations>0")
                .matching_rows(&rows)
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn unsatisfiable_conditions_are_rejected() {
        for text in ["", "violations", ">0", ":x>0", "violations>0,", "a!b"] {
            let got = Condition::parse_all(text);
            assert!(
                matches!(got, Err(ConditionError::Syntax(_))),
                "{text}: {got:?}"
            );
        }
        for text in ["violations>", "violations>none", "x>nan", "x>>1"] {
            let got = Condition::parse_all(text);
            assert!(
                matches!(got, Err(ConditionError::NotANumber { .. })),
                "{text}"
            );
        }
        let one = |text: &str| Condition::parse_all(text).unwrap().remove(0);
        let modes = ["fence".to_owned()];
        assert!(one("fence:colocated>0").check(&modes, true, true).is_ok());
        for text in ["violation>0", "mode>0", "walk_cache_hit_rate.3>0"] {
            let error = one(text).check(&modes, true, true).unwrap_err();
            assert!(
                matches!(error, ConditionError::NoSuchField { .. }),
                "{text}"
            );
        }
        for (text, timed, attack) in [
            ("map_cycles>0", false, true),
            ("components.measured_cycles>0", false, true),
            ("violations>0", true, false),
            ("violations.stale>=0", true, false),
            ("attack_accesses==0", true, false),
        ] {
            let error = one(text).check(&modes, timed, attack).unwrap_err();
            let advice = if timed { "--no-attack" } else { "--repeat" };
            assert!(error.to_string().contains(advice), "{text}: {error}");
            assert!(one(text).check(&modes, true, true).is_ok(), "{text}");
        }
        let error = one("strict:violations>0")
            .check(&modes, true, true)
            .unwrap_err();
        assert!(matches!(error, ConditionError::NoSuchMode { .. }));
    }
}
