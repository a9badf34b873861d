//! The Debian package of a release.

use std::path::Path;

use anyhow::Context;

use super::Release;
use super::tree::Tree;
use crate::process;
use crate::repo::Repo;

/// Writes the package to `to`.
pub(super) fn package(
    repo: &Repo,
    files: Tree,
    release: &Release,
    stage: &Path,
    to: &Path,
) -> anyhow::Result<()> {
    let mut files = files;
    files.add("share/doc/ringfence/copyright", copyright(repo)?);
    files.add("share/doc/ringfence/changelog", changelog(release)?);
    files.compress(stage, |path| {
        path.starts_with("share/man/") || path.ends_with("/changelog")
    })?;
    let root = stage.join("package");
    files.write(&root.join("usr"))?;
    let mut control = Tree::default();
    control.add("control", control_file(release, &files)?);
    control.write(&root.join("DEBIAN"))?;
    process::capture(
        process::command(stage, "dpkg-deb")
            .args(["--root-owner-group", "-Zgzip", "-z6", "--build", "package"])
            .arg(std::path::absolute(to)?)
            .env("SOURCE_DATE_EPOCH", release.epoch.to_string()),
    )?;
    Ok(())
}

fn control_file(release: &Release, files: &Tree) -> anyhow::Result<String> {
    let program = files
        .content("bin/ringfence")
        .context("the package has no command")?;
    Ok(format!(
        "Package: ringfence\n\
         Version: {}\n\
         Architecture: {}\n\
         Maintainer: The Ringfence authors\n\
         Installed-Size: {}\n\
         Depends: {}\n\
         Suggests: dkms, qemu-system-x86, trace-cmd\n\
         Section: utils\n\
         Priority: optional\n\
         Description: cost and exposure of DMA protection\n \
         Replays recorded DMA traces through modes of IOMMU protection, and serves virtio\n \
         devices to a QEMU behind a virtio-iommu. The sources of its kernel modules are in\n \
         /usr/src, for DKMS; the package builds none.\n",
        release.version,
        release.debian_arch,
        files.size().div_ceil(1024),
        depends(program),
    ))
}

/// Returns the packages of the shared libraries that `program` uses. The version of the C library
/// is the newest of those whose symbols it names.
fn depends(program: &[u8]) -> String {
    const SYMBOLS: &[u8] = b"GLIBC_2.";
    let minor = program
        .windows(SYMBOLS.len())
        .enumerate()
        .filter(|(_, window)| *window == SYMBOLS)
        .filter_map(|(at, _)| {
            let digits = program[at + SYMBOLS.len()..]
                .iter()
                .take_while(|byte| byte.is_ascii_digit())
                .copied()
                .collect();
            String::from_utf8(digits).ok()?.parse::<u32>().ok()
        })
        .max();
    match minor {
        Some(minor) => format!("libc6 (>= 2.{minor}), libgcc-s1"),
        None => "libc6, libgcc-s1".to_owned(),
    }
}

fn changelog(release: &Release) -> anyhow::Result<String> {
    Ok(format!(
        "ringfence ({}) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n \
         -- The Ringfence authors  {}\n",
        release.version,
        release.date("--rfc-email")?
    ))
}

/// Returns the copyright file in the form of Debian's copyright-format 1.0.
fn copyright(repo: &Repo) -> anyhow::Result<String> {
    let mit = repo.read("LICENSE-MIT")?;
    let holder = mit
        .lines()
        .find_map(|line| line.strip_prefix("Copyright (c) "))
        .context("LICENSE-MIT names no holder")?;
    let mut text = String::new();
    for line in mit.lines() {
        text.push_str(if line.is_empty() { " ." } else { " " });
        text.push_str(line);
        text.push('\n');
    }
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: ringfence\n\
         Comment: The licences of the crates that the command links are in THIRD-PARTY.\n\n\
         Files: *\n\
         Copyright: {holder}\n\
         License: MIT or Apache-2.0\n\n\
         Files: usr/src/*\n\
         Copyright: {holder}\n\
         License: GPL-2\n\n\
         License: MIT\n{text}\n\
         License: Apache-2.0\n \
         /usr/share/common-licenses/Apache-2.0 has the text.\n\n\
         License: GPL-2\n \
         Version 2 only. /usr/share/common-licenses/GPL-2 has the text.\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_the_newest_c_library_that_it_names() {
        let program = b"..GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.2.5\0";
        assert_eq!(depends(program), "libc6 (>= 2.34), libgcc-s1");
        assert_eq!(depends(b"#!/bin/sh"), "libc6, libgcc-s1");
    }
}
