//! Downloads packages of other Debian suites through an apt that shares nothing with the host's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::GuestError;
use super::architecture::Architecture;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR_VARIABLE: &str = "DEBIAN_MIRROR";

/// An apt for some suites. Dropping it removes its working directory.
#[derive(Debug)]
pub(super) struct Apt {
    dir: PathBuf,
    log: PathBuf,
    architecture: Architecture,
}

impl Apt {
    /// Reads the package lists of `suites` for amd64. Works in `cache`/apt and appends apt's output
    /// to `cache`/apt.log.
    pub(super) fn new(cache: &Path, suites: &[&str]) -> Result<Self, GuestError> {
        Self::of(Architecture::Amd64, cache, suites)
    }

    /// As [`new`](Self::new), for `architecture`.
    pub(super) fn of(
        architecture: Architecture,
        cache: &Path,
        suites: &[&str],
    ) -> Result<Self, GuestError> {
        let dir = cache.join("apt");
        let log = cache.join("apt.log");
        let _ = fs::remove_dir_all(&dir);
        let apt = Self {
            dir,
            log,
            architecture,
        };
        for part in ["state/lists/partial", "cache/archives/partial"] {
            let path = apt.dir.join(part);
            fs::create_dir_all(&path).map_err(GuestError::io(&path))?;
        }
        apt.put("state/status", "")?;
        let mirror = mirror()?;
        let sources: String = suites
            .iter()
            .map(|suite| {
                format!("deb [arch={architecture} signed-by={KEYRING}] {mirror} {suite} main\n")
            })
            .collect();
        apt.put("sources.list", &sources)?;
        apt.run(
            &format!("the package lists of {}", suites.join(" and ")),
            "apt-get",
            &["update"],
        )?;
        Ok(apt)
    }

    fn put(&self, name: &str, text: &str) -> Result<(), GuestError> {
        let path = self.dir.join(name);
        fs::write(&path, text).map_err(GuestError::io(&path))
    }

    fn command(&self, program: &'static str) -> Command {
        let mut command = Command::new(program);
        let dir = self.dir.display();
        command.arg("-q");
        for option in [
            format!("Dir::State={dir}/state"),
            format!("Dir::State::status={dir}/state/status"),
            format!("Dir::Cache={dir}/cache"),
            format!("Dir::Etc::SourceList={dir}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            format!("APT::Architecture={}", self.architecture),
            format!("APT::Architectures={}", self.architecture),
            "APT::Install-Recommends=false".into(),
            "Acquire::Languages=none".into(),
            // apt's sandbox user cannot read users' directories.
            "APT::Sandbox::User=root".into(),
            "Debug::NoLocking=1".into(),
        ] {
            command.arg("-o").arg(option);
        }
        command.current_dir(&self.dir).stdin(Stdio::null());
        command
    }

    /// Runs a program for its effect; its output goes to the log.
    fn run(&self, what: &str, program: &'static str, arguments: &[&str]) -> Result<(), GuestError> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .map_err(GuestError::io(&self.log))?;
        let copy = log.try_clone().map_err(GuestError::io(&self.log))?;
        let status = self
            .command(program)
            .args(arguments)
            .stdout(log)
            .stderr(copy)
            .status();
        match status {
            Ok(status) if status.success() => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(GuestError::Missing {
                    program,
                    package: "apt",
                })
            }
            _ => Err(GuestError::Fetch {
                what: what.to_owned(),
                log: self.log.clone(),
            }),
        }
    }

    /// Runs apt-cache and returns its output, which is empty on failure.
    fn output(&self, arguments: &[&str]) -> String {
        let output = self
            .command("apt-cache")
            .args(arguments)
            .stderr(Stdio::null())
            .output();
        output.map_or_else(
            |_| String::new(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    }

    /// Returns the names of packages that match a regular expression.
    pub(super) fn names(&self, pattern: &str) -> Vec<String> {
        self.output(&["search", "--names-only", pattern])
            .lines()
            .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
            .collect()
    }

    /// Returns the direct dependencies of `package`.
    pub(super) fn depends(&self, package: &str) -> Vec<String> {
        self.output(&["depends", package])
            .lines()
            .filter_map(|line| Some(line.trim().strip_prefix("Depends: ")?.to_owned()))
            .collect()
    }

    /// Unpacks these packages into `to`, without their dependencies.
    pub(super) fn unpack(&self, packages: &[String], to: &Path) -> Result<(), GuestError> {
        let mut arguments = vec!["download"];
        arguments.extend(packages.iter().map(String::as_str));
        self.run(&packages.join(", "), "apt-get", &arguments)?;
        self.unpack_all(&self.dir, to)
    }

    /// Unpacks packages of `suite` and all their dependencies into `to`.
    pub(super) fn unpack_with_dependencies(
        &self,
        suite: &str,
        packages: &[&str],
        to: &Path,
    ) -> Result<(), GuestError> {
        let mut arguments = vec!["-y", "--download-only", "-t", suite, "install"];
        arguments.extend(packages);
        self.run(&packages.join(", "), "apt-get", &arguments)?;
        self.unpack_all(&self.dir.join("cache/archives"), to)
    }

    fn unpack_all(&self, from: &Path, to: &Path) -> Result<(), GuestError> {
        fs::create_dir_all(to).map_err(GuestError::io(to))?;
        for entry in fs::read_dir(from).map_err(GuestError::io(from))? {
            let path = entry.map_err(GuestError::io(from))?.path();
            if path.extension().is_none_or(|end| end != "deb") {
                continue;
            }
            let status = Command::new("dpkg-deb")
                .arg("-x")
                .arg(&path)
                .arg(to)
                .status();
            match status {
                Ok(status) if status.success() => {}
                Ok(_) => {
                    return Err(GuestError::Fetch {
                        what: path.display().to_string(),
                        log: self.log.clone(),
                    });
                }
                Err(_) => {
                    return Err(GuestError::Missing {
                        program: "dpkg-deb",
                        package: "dpkg",
                    });
                }
            }
            let _ = fs::remove_file(&path);
        }
        Ok(())
    }
}

impl Drop for Apt {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Returns the host's own mirror, unless `DEBIAN_MIRROR` names another.
fn mirror() -> Result<String, GuestError> {
    if let Ok(mirror) = std::env::var(MIRROR_VARIABLE) {
        return Ok(mirror);
    }
    if !Path::new(KEYRING).is_file() {
        return Err(GuestError::Missing {
            program: KEYRING,
            package: "debian-archive-keyring",
        });
    }
    let missing = GuestError::Missing {
        program: "a Debian package source",
        package: "apt sources, or set DEBIAN_MIRROR to one",
    };
    let output = Command::new("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI)"])
        .output();
    let Ok(output) = output else {
        return Err(missing);
    };
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .find(|line| line.trim_end_matches('/').ends_with("/debian"))
        .map(str::to_owned)
        .ok_or(missing)
}
