//! Rules on sources that neither the compiler nor clippy checks, one rule per file.

mod core_crates;
mod examples;
mod language;
mod layers;
mod modules;
mod panics;
mod sizes;
mod temporary;
mod tokens;
mod unsafe_code;

use anyhow::bail;

use crate::lines;
use crate::output;
use crate::repo::Repo;
use crate::source::Source;
use crate::violation::Violation;

/// Crates that kernels embed: `no_std`, without unsafe code, without panics.
pub(crate) const CORE: &[&str] = &[
    "types",
    "iova",
    "pgtable",
    "hw",
    "dma",
    "pviommu",
    "nvme-device",
    "riommu-device",
    "virtio-iommu",
    "virtio-iommu-driver",
    "vtd",
    "amd-vi",
    "riscv-iommu",
    "smmu-v3",
    "firmware",
];

/// Returns the core crate whose library contains `source`; `None` if there is no such crate.
fn core_crate(source: &Source) -> Option<&'static str> {
    let name = lines::crate_of(&source.path)?;
    CORE.iter().copied().find(|core| name == *core)
}

/// Returns true if `name` is a core crate.
pub(crate) fn is_core(name: &str) -> bool {
    CORE.contains(&name)
}

/// Checks that no crate depends on a higher layer.
pub(crate) fn layers(repo: &Repo) -> anyhow::Result<String> {
    verdict(&layers::check(&repo.packages()?))
}

/// Checks that the modules of a crate form no large cycle.
pub(crate) fn modules(repo: &Repo) -> anyhow::Result<String> {
    verdict(&modules::check(repo.sources()?))
}

/// Checks that core crates have their declarations and do not panic.
pub(crate) fn core_crates(repo: &Repo) -> anyhow::Result<String> {
    let sources = repo.sources()?;
    let mut found = core_crates::check(sources);
    found.extend(panics::check(sources));
    verdict(&found)
}

/// Checks that each library has an example that `cargo test` runs.
pub(crate) fn examples(repo: &Repo) -> anyhow::Result<String> {
    verdict(&examples::check(repo.sources()?))
}

/// Checks that unsafe code is only in listed files, with a reason.
pub(crate) fn unsafe_code(repo: &Repo) -> anyhow::Result<String> {
    verdict(&unsafe_code::check(repo.sources()?))
}

/// Checks that only permitted code makes attestations.
pub(crate) fn tokens(repo: &Repo) -> anyhow::Result<String> {
    verdict(&tokens::check(repo.sources()?))
}

/// Checks that temporary files are new and private.
pub(crate) fn temporary(repo: &Repo) -> anyhow::Result<String> {
    verdict(&temporary::check(repo.sources()?))
}

/// Checks that comments, lines and names follow the style.
pub(crate) fn language(repo: &Repo) -> anyhow::Result<String> {
    let mut found = language::check(repo.sources()?);
    for path in repo.files()? {
        if language::is_script_or_c(&path) {
            found.extend(language::long_lines(&path, &repo.read(&path)?));
        }
    }
    verdict(&found)
}

/// Checks that files are short.
pub(crate) fn sizes(repo: &Repo) -> anyhow::Result<String> {
    verdict(&sizes::check(repo.sources()?))
}

/// Prints the violations; an error if one of them is an error.
pub(crate) fn verdict(found: &[Violation]) -> anyhow::Result<String> {
    for violation in found {
        output::line(&violation.to_string());
    }
    let errors = found
        .iter()
        .filter(|violation| violation.is_error())
        .count();
    if errors > 0 {
        bail!("{errors} violations");
    }
    Ok(match found.len() {
        0 => String::new(),
        notes => format!("{notes} notes"),
    })
}

#[cfg(test)]
pub(crate) mod testing {
    use std::path::Path;

    use crate::source::Source;
    use crate::violation::Violation;

    pub(crate) fn source(path: &str, text: &str) -> Source {
        Source::parse(Path::new(path), text.to_owned()).unwrap()
    }

    /// Returns the violations as text, one per line.
    pub(crate) fn shown(found: &[Violation]) -> Vec<String> {
        found.iter().map(ToString::to_string).collect()
    }
}
