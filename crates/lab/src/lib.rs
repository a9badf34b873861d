//! Modes, replay, oracle, meter and reports.
