//! Downloads packages of other Debian suites through an apt that shares nothing with the host's.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::GuestError;
use super::architecture::Architecture;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const MIRROR_VARIABLE: &str = "DEBIAN_MIRROR";

/// Pauses before the second and later attempts after a temporary failure.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(30),
    Duration::from_secs(60),
];
/// Begins apt's message about a file that it could not fetch. The reason follows.
const NOT_FETCHED: &str = "E: Failed to fetch ";
/// Answers of a server that another attempt does not change. apt itself repeats no answer, so an
/// overloaded server fails it at once.
const REFUSALS: [&str; 4] = ["  401  ", "  403  ", "  404  ", "  410  "];

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
            // Otherwise an update without some of the lists succeeds.
            "APT::Update::Error-Mode=any".into(),
        ] {
            command.arg("-o").arg(option);
        }
        command.current_dir(&self.dir).stdin(Stdio::null());
        command
    }

    /// Runs a program for its effect; its output goes to the log. Repeats it after a temporary
    /// failure.
    fn run(&self, what: &str, program: &'static str, arguments: &[&str]) -> Result<(), GuestError> {
        if succeeds(&PAUSES, || self.run_once(program, arguments))? {
            return Ok(());
        }
        Err(GuestError::Fetch {
            what: what.to_owned(),
            log: self.log.clone(),
        })
    }

    /// Runs a program once. Returns its output if it failed.
    fn run_once(
        &self,
        program: &'static str,
        arguments: &[&str],
    ) -> Result<Option<String>, GuestError> {
        let failed = || GuestError::io(&self.log);
        let mut log = File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(&self.log)
            .map_err(failed())?;
        let begin = log.seek(SeekFrom::End(0)).map_err(failed())?;
        let status = self
            .command(program)
            .args(arguments)
            .stdout(log.try_clone().map_err(failed())?)
            .stderr(log.try_clone().map_err(failed())?)
            .status();
        match status {
            Ok(status) if status.success() => Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(GuestError::Missing {
                    program,
                    package: "apt",
                })
            }
            _ => {
                let mut output = Vec::new();
                log.seek(SeekFrom::Start(begin)).map_err(failed())?;
                log.read_to_end(&mut output).map_err(failed())?;
                Ok(Some(String::from_utf8_lossy(&output).into_owned()))
            }
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

/// Returns true if `attempt`, which returns the output of a failure, succeeds. Repeats it after
/// temporary failures, once after each of `pauses`.
fn succeeds<E>(
    pauses: &[Duration],
    mut attempt: impl FnMut() -> Result<Option<String>, E>,
) -> Result<bool, E> {
    let mut pauses = pauses.iter();
    while let Some(output) = attempt()? {
        match pauses.next() {
            Some(pause) if is_temporary(&output) => thread::sleep(*pause),
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// Returns true if files could not be fetched, and no server refused one.
fn is_temporary(output: &str) -> bool {
    let failed = output.lines().filter(|line| line.starts_with(NOT_FETCHED));
    let failed: Vec<&str> = failed.collect();
    let refused = |line: &&str| REFUSALS.iter().any(|answer| line.contains(answer));
    !failed.is_empty() && !failed.iter().any(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FETCH: &str = "E: Failed to fetch http://mirror/dists/trixie/InRelease";

    /// Returns the number of attempts of which the first `failures` fail so, and the result.
    fn attempts(failures: usize, error: &str) -> (usize, bool) {
        let mut made = 0;
        let output = format!("Reading package lists...\n{FETCH}  {error}\nE: Some index files\n");
        let done = succeeds::<()>(&[Duration::ZERO; 3], || {
            made += 1;
            Ok((made <= failures).then(|| output.clone()))
        });
        (made, done.unwrap())
    }

    #[test]
    fn a_temporary_failure_is_repeated_a_few_times() {
        for error in [
            "503  Service Unavailable [IP: 127.0.0.1 80]",
            "504  Gateway Time-out [IP: 127.0.0.1 80]",
            "Connection failed [IP: 127.0.0.1 80]",
            "Could not connect to mirror:80 (127.0.0.1), connection timed out",
            "Temporary failure resolving 'mirror'",
        ] {
            assert_eq!(attempts(0, error), (1, true), "{error}");
            assert_eq!(attempts(3, error), (4, true), "{error}");
            assert_eq!(attempts(9, error), (4, false), "{error}");
        }
    }

    #[test]
    fn a_refusal_is_final() {
        for error in ["404  Not Found [IP: 127.0.0.1 80]", "403  Forbidden"] {
            assert_eq!(attempts(1, error), (1, false), "{error}");
        }
        let one = format!("{FETCH}  503  Unavailable\n{FETCH}  404  Not Found\n");
        assert!(!is_temporary(&one), "one of two files");
        assert!(!is_temporary("E: Unable to locate package linux-image\n"));
    }
}
