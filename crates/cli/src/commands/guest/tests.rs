use clap::Parser as _;

use super::*;
use crate::args::{Cli, Command};

/// Returns the module that the guest loads, or `None` if the options are refused.
fn module_of(options: &str) -> Option<String> {
    let words = "ringfence guest run".split(' ').chain(options.split(' '));
    let parsed = Cli::try_parse_from(words.chain(["--", "true"])).unwrap();
    let Command::Guest(GuestCommand::Run(args)) = parsed.command else {
        panic!("another command");
    };
    let iommu = args.devices.iommu;
    check_module(iommu, &args.module).ok()?;
    loaded_module(iommu, &args.module).map(str::to_owned)
}

/// A module with a paper's defects is loaded only by request, and only for its IOMMU.
#[test]
fn modules_as_published_are_loaded_by_request() {
    for (options, module) in [
        ("--iommu pviommu", Some("pviommu")),
        (
            "--iommu pviommu --as-published",
            Some("pviommu-as-published"),
        ),
        ("--iommu riommu --module-args mode=burst", Some("riommu")),
        ("--iommu riommu --as-published", Some("riommu-as-published")),
        ("--iommu virtio --as-published", None),
        ("--iommu riommu --as-published --module pooldma", None),
    ] {
        assert_eq!(module_of(options).as_deref(), module, "{options}");
    }
}
