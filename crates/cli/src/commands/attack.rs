//! `ringfence attack`: executes attack classes on modes.

use ringfence_attack::{CLASSES, Cell, Class, Options, Status, run};
use ringfence_lab::modes::Mode;
use ringfence_report::{attack_markdown, attack_page, attack_terminal};

use super::json;
use crate::args::AttackArgs;
use crate::failure::Failure;
use crate::output::{print_unless_closed, table_style};
use crate::progress::Progress;

/// Executes the classes on the modes and prints the matrix.
pub(crate) fn attack(args: &AttackArgs) -> Result<(), Failure> {
    let modes = modes(args);
    let classes: Vec<&'static Class> = match args.classes.is_empty() {
        true => CLASSES.iter().collect(),
        false => args.classes.clone(),
    };
    let cells = (modes.len() * classes.len()) as u64;
    let bar = Progress::of_units("attack", Some(cells), "cells");
    let matrix = run(&modes, &classes, &Options::default(), |done| {
        bar.update(done);
        Ok(())
    })?;
    drop(bar);
    let text = if args.form.json {
        json(&matrix)
    } else if args.form.html {
        attack_page(&matrix)
    } else if args.form.markdown {
        attack_markdown(&matrix)
    } else {
        attack_terminal(&matrix, table_style())
    };
    print_unless_closed(&text)?;
    let describe = |cell: &Cell| {
        format!(
            "{} {}: {} of {} attempts",
            cell.class, cell.mode, cell.total.successes, cell.total.attempts
        )
    };
    let (failed, failure): (Vec<String>, fn(_) -> _) = if args.fail_on_success {
        let all = matrix.cells.iter();
        let succeeded = all.filter(|cell| cell.status == Status::Succeeded);
        (succeeded.map(describe).collect(), Failure::AttacksSucceed)
    } else {
        let unexpected = matrix.broken_promises().map(describe);
        (unexpected.collect(), Failure::Unexpected)
    };
    if failed.is_empty() {
        Ok(())
    } else {
        Err(failure(failed))
    }
}

fn modes(args: &AttackArgs) -> Vec<Mode> {
    let mut modes = if args.all_modes {
        Mode::named()
    } else if args.modes.is_empty() && args.composed.is_empty() {
        Mode::default_selection()
    } else {
        args.modes.clone()
    };
    modes.extend(args.composed.iter().cloned());
    modes
}
