//! `ringfence completions` and `ringfence man`: generated from the same definition as the command
//! line itself.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::Failure;
use crate::out_file::write_into;
use crate::output::print;

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "ringfence", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Prints the manual page, or writes one for each subcommand into a directory.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    match &args.dir {
        Some(dir) => {
            fs::create_dir_all(dir).map_err(Failure::io(dir))?;
            // The library follows existing links, so it writes to a directory that no other user
            // can access.
            let made = tempfile::tempdir().map_err(Failure::io(dir))?;
            let made = made.path();
            clap_mangen::generate_to(Cli::command(), made).map_err(Failure::io(dir))?;
            for page in fs::read_dir(made).map_err(Failure::io(dir))? {
                let page = page.map_err(Failure::io(dir))?;
                let content = fs::read(page.path()).map_err(Failure::io(dir))?;
                write_into(dir, &page.file_name().to_string_lossy(), &content)?;
            }
            Ok(())
        }
        None => {
            let mut page = Vec::new();
            let rendered = clap_mangen::Man::new(Cli::command()).render(&mut page);
            rendered.map_err(Failure::io(Path::new("manual page")))?;
            print(&String::from_utf8_lossy(&page))
        }
    }
}
