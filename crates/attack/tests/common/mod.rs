//! Checks of single cells.

use ringfence_attack::{Cell, Class, Options, run};
use ringfence_lab::modes::Mode;

/// The successes and attempts of one variant on one mode.
pub(crate) type Row = (&'static str, u64, u64);

/// Runs a class on a mode and compares the variants of `rows`. Returns the cell.
pub(crate) fn check(class: &str, mode: &str, rows: &[Row]) -> Cell {
    let (found, name) = (Class::find(class).unwrap(), mode);
    let options = Options { scan_pages: 512 };
    let modes = [Mode::find(mode).unwrap()];
    let matrix = run(&modes, &[found], &options, |_| Ok(())).unwrap();
    let cell = &matrix.cells[0];
    for (variant, successes, attempts) in rows {
        let found = cell.executed.named(variant);
        let found = found.unwrap_or_else(|| panic!("{class} {name} {variant}"));
        assert_eq!(
            (found.successes, found.attempts),
            (*successes, *attempts),
            "{class} {name} {variant}"
        );
    }
    assert!(!cell.unexpected, "{cell:#?}");
    cell.clone()
}
