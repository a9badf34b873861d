//! `ringfence modes`: prints the protection modes and the axes that compose them.

use ringfence_lab::modes::Mode;
use ringfence_report::{axes_table, mode_rows, modes_table};

use super::json;
use crate::args::ModesArgs;
use crate::failure::Failure;
use crate::output::{print, table_style};

/// Prints the table of modes.
pub(crate) fn modes(args: &ModesArgs) -> Result<(), Failure> {
    let modes = Mode::named();
    if args.json {
        print(&json(&mode_rows(&modes)))
    } else {
        let look = table_style();
        let named = modes_table(&modes, look);
        let choices = axes_table(look);
        print(&format!(
            "{named}\nChoices for compare --mode alloc=A,table=T,flush=F[,owner=O] (eiovar-K: \
            freelists of at most K):\n{choices}"
        ))
    }
}
