//! Finds a QEMU with `vfio-user-pci`: the host's if it is new enough, otherwise Debian's. Debian's
//! runs with its own dynamic loader and libraries, so that the host's C library does not matter.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::GuestError;
use super::apt::Apt;

const PROGRAM: &str = "qemu-system-x86_64";
const SUITE: &str = "trixie-backports";

/// Debian's packages, each with a program that it contains.
const SYSTEMS: [(&str, &str); 3] = [
    ("qemu-system-x86", PROGRAM),
    ("qemu-system-arm", "qemu-system-aarch64"),
    ("qemu-system-riscv", "qemu-system-riscv64"),
];

/// A suitable QEMU.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The program and its first arguments.
    command: Vec<OsString>,
    /// Directory of the loadable modules, if not the built-in one.
    modules: Option<PathBuf>,
}

impl Qemu {
    /// Finds a suitable QEMU on the host, or downloads one into `cache`. Passes progress messages
    /// to `report`.
    ///
    /// # Errors
    /// [`GuestError`] names the missing part.
    pub fn prepare(cache: &Path, report: &mut dyn FnMut(&str)) -> Result<Self, GuestError> {
        let host = Self {
            command: vec![PROGRAM.into()],
            modules: None,
        };
        if host.has_vfio_user_pci() {
            return Ok(host);
        }
        let root = cache.join("qemu");
        let downloaded = Self::in_root(&root);
        if !downloaded.has_vfio_user_pci() {
            report("fetching QEMU (40 MB)");
            let _ = std::fs::remove_dir_all(&root);
            let apt = Apt::new(cache, &["trixie", SUITE])?;
            apt.unpack_with_dependencies(SUITE, &["qemu-system-x86"], &root)?;
        }
        if downloaded.has_vfio_user_pci() {
            Ok(downloaded)
        } else {
            Err(GuestError::Fetch {
                what: "a QEMU with vfio-user-pci".into(),
                log: cache.join("apt.log"),
            })
        }
    }

    /// Downloads the QEMUs for x86, Arm and RISC-V into `cache`, unless they are there, and returns
    /// the directory with the unpacked packages. Passes progress messages to `report`.
    ///
    /// # Errors
    /// [`GuestError`] names the missing part.
    pub fn prepare_all(cache: &Path, report: &mut dyn FnMut(&str)) -> Result<PathBuf, GuestError> {
        let root = cache.join("root");
        let programs = root.join("usr/bin");
        if SYSTEMS
            .iter()
            .all(|(_, name)| programs.join(name).is_file())
        {
            return Ok(root);
        }
        report("fetching QEMU for x86, Arm and RISC-V (56 MB)");
        let _ = std::fs::remove_dir_all(&root);
        let apt = Apt::new(cache, &["trixie", SUITE])?;
        apt.unpack_with_dependencies(SUITE, &SYSTEMS.map(|(package, _)| package), &root)?;
        Ok(root)
    }

    fn in_root(root: &Path) -> Self {
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        Self {
            command: vec![
                root.join("usr/lib64/ld-linux-x86-64.so.2").into(),
                "--library-path".into(),
                libraries.clone().into(),
                root.join("usr/bin").join(PROGRAM).into(),
                "-L".into(),
                root.join("usr/share/qemu").into(),
                "-L".into(),
                root.join("usr/share/seabios").into(),
            ],
            modules: Some(libraries.join("qemu")),
        }
    }

    /// Returns the program and its first arguments, for display.
    pub fn command_line(&self) -> Vec<String> {
        self.command
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    /// Returns the environment variable that this QEMU needs to find its modules.
    pub fn environment(&self) -> Option<(&'static str, &Path)> {
        Some(("QEMU_MODULE_DIR", self.modules.as_deref()?))
    }

    /// Returns a command that starts QEMU through the wrapper `before`, such as `timeout`.
    pub(super) fn command(&self, before: &[&str]) -> Command {
        let words = before
            .iter()
            .map(OsString::from)
            .chain(self.command.iter().cloned());
        let words: Vec<OsString> = words.collect();
        let (first, rest) = words
            .split_first()
            .map_or((OsString::from(PROGRAM), &[][..]), |(f, r)| (f.clone(), r));
        let mut command = Command::new(first);
        command.args(rest);
        if let Some((name, value)) = self.environment() {
            command.env(name, value);
        }
        command
    }

    /// Returns true if this QEMU has the device. Older versions exit with success but list no
    /// options.
    fn has_vfio_user_pci(&self) -> bool {
        let output = self
            .command(&[])
            .args(["-M", "none", "-device", "vfio-user-pci,help"])
            .stdin(Stdio::null())
            .output();
        output.is_ok_and(|output| {
            output.status.success() && output.stdout.starts_with(b"vfio-user-pci options")
        })
    }
}
