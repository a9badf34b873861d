//! `ringfence modes`.

use ringfence_lab::modes::Mode;
use ringfence_lab::report::{mode_rows, modes_table};

use super::json;
use crate::args::ModesArgs;
use crate::failure::Failure;
use crate::output::{look, print};

/// Prints the table of modes.
pub(crate) fn modes(args: &ModesArgs) -> Result<(), Failure> {
    let modes = Mode::named();
    if args.json {
        print(&json(&mode_rows(&modes)))
    } else {
        print(&modes_table(&modes, look()))
    }
}
