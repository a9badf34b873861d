//! Arguments of `attack`.

use clap::Args;
use ringfence_attack::Class;
use ringfence_lab::compose::compose;
use ringfence_lab::modes::Mode;

use super::values::{attack_class, named_mode};

pub(super) const ATTACK_LONG: &str = "\
Execute attack classes on protection modes under the oracle; print which succeed.

A class is a small driver and a malicious device. Each cell runs the class on a mode's own mapping \
layer and modelled hardware. The oracle judges every access by the physical bytes that it reaches. \
A cell is succeeded, stopped, not applicable (with the reason), or not executed (with the reason). \
Windows after an unmap are measured with three attackers: passive, replayer and racer.

The expected outcome of a cell follows from the mode's axes. The command fails with code 3 if a \
mode that promises own-pool, strict or byte-granular safety has an unexpected outcome. \
docs/ATTACKS.md describes the classes.";

const ATTACK_EXAMPLES: &str = "\
Examples:
  ringfence attack                                    all classes, 12 modes
  ringfence attack --all-modes
  ringfence attack --modes linux-strict,linux-lazy --classes A02,A05,A17
  ringfence attack --modes riommu-paper,riommu --classes A19,A26,A27
  ringfence attack --mode alloc=magazine,table=radix,flush=burst
  ringfence attack --modes fence --classes A01,A02,A03 --fail-on-success
  ringfence attack --json > attacks.json              for programs; see docs/ATTACKS.md
  ringfence attack --html > attacks.html

Exit codes: 0 done, 1 error, 2 wrong usage, 3 a mode that promises strict safety has an unexpected \
outcome or, with --fail-on-success, an attack succeeds.";

/// Arguments of `attack`.
#[derive(Debug, Args)]
#[command(after_help = ATTACK_EXAMPLES)]
pub(crate) struct AttackArgs {
    /// Names of modes, in the order of the matrix [default: 12 that can be used today, with riommu]
    #[arg(
        long,
        value_name = "MODE,...",
        value_delimiter = ',',
        value_parser = named_mode,
    )]
    pub modes: Vec<Mode>,

    /// Attack all modes that `ringfence modes` lists
    #[arg(long, conflicts_with = "modes")]
    pub all_modes: bool,

    /// An additional composed mode; `ringfence modes` lists the choices. May be repeated
    #[arg(
        long = "mode",
        value_name = "alloc=A,table=T,flush=F[,owner=O]",
        value_parser = |mode: &str| compose(mode),
    )]
    pub composed: Vec<Mode>,

    /// Classes to execute, A01 to A38 [default: all]
    #[arg(
        long,
        value_name = "CLASS,...",
        value_delimiter = ',',
        value_parser = attack_class,
    )]
    pub classes: Vec<&'static Class>,

    /// Exit with code 3 if any attack succeeds, expected or not
    #[arg(long)]
    pub fail_on_success: bool,

    /// Form of the output.
    #[command(flatten)]
    pub form: AttackForm,
}

/// Form of the matrix.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct AttackForm {
    /// Print one JSON object (docs/ATTACKS.md)
    #[arg(long, help_heading = "Output")]
    pub json: bool,
    /// Print a self-contained HTML page
    #[arg(long, help_heading = "Output")]
    pub html: bool,
    /// Print tables in Markdown
    #[arg(long, help_heading = "Output")]
    pub markdown: bool,
}
