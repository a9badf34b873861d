//! Guests for X21: each configuration with each kind of device, booted by this program's own `guest run`, and what they say read.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use ringfence_lab::experiments::guests::{Configuration, GuestCell, GuestCounts, Guests, Kind};

use super::said::{Said, read};
use crate::args::ReproduceGuestArgs;
use crate::failure::Failure;

/// Operations of the two guests of a cell; what differs between the two is counted.
const OPERATIONS: [u32; 2] = [96, 352];
/// As many processors and pairs of queues has the guest with many queues.
const PAIRS: u32 = 4;

/// Maps and unmaps in a row, then reads of the disk.
const READS: &str = "insmod /modules/dma_count.ko device=0000:00:04.0; dmesg | grep dma_count:
ringfence guest reads /dev/vda --count $1
grep -r . /sys/kernel/debug/pviommu 2>/dev/null; true";

/// The same, then a frame a round trip's time to a neighbour that does not answer, on each processor and so on each queue.
const FRAMES: &str = "echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/eth0/disable_ipv6
ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up
insmod /modules/dma_count.ko device=0000:00:05.0; dmesg | grep dma_count:
for i in 0 1 2 3; do
    arp -s 10.9.0.$((i + 2)) 02:00:00:00:00:0$i
    taskset $((1 << i)) ping -q -c $(($1 / 4)) -i 0.01 -W 1 10.9.0.$((i + 2)) >/dev/null &
done; wait
grep -r . /sys/kernel/debug/pviommu 2>/dev/null; true";

/// Why a cell cannot be booted; `None` where it can.
fn lacks(kind: Kind, configuration: Configuration) -> Option<&'static str> {
    match (kind, configuration) {
        (_, Configuration::PviommuRtcHopt) => Some(
            "the daemon keeps all of its guest's memory, so its pool and its pointer have nothing to do; and no request, exit or instruction of the \
             guest depends on them",
        ),
        (Kind::Assigned, _) => {
            Some("no device of the daemon is translated by the model of the hardware yet")
        }
        (Kind::Simulated, Configuration::KvmBaseline) => Some(
            "a process that is granted nothing page by page has no baseline: the document's is a device in the process that has all memory",
        ),
        _ => None,
    }
}

/// What `guest run` is to be told for a cell.
fn words(kind: Kind, configuration: Configuration, dir: &Path) -> Vec<String> {
    let mut words: Vec<String> = match configuration {
        Configuration::KvmBaseline => vec!["--no-iommu"],
        Configuration::VirtioStrict => vec!["--strict"],
        Configuration::VirtioLazy => vec!["--lazy"],
        Configuration::Pviommu => vec!["--module", "pviommu", "--module-args", "cache=0"],
        Configuration::PviommuRtc | Configuration::PviommuRtcHopt => {
            vec!["--module", "pviommu", "--module-args", "cache=1"]
        }
    }
    .into_iter()
    .map(str::to_owned)
    .collect();
    match kind {
        Kind::Assigned | Kind::Emulated => {}
        Kind::Simulated => words.push("--isolate".into()),
        Kind::ManyQueue => {
            let (here, there) = (dir.join("here"), dir.join("there"));
            words.extend([
                "--cpus".into(),
                PAIRS.to_string(),
                "--net".into(),
                // Nobody is there: what is sent has left.
                format!(
                    "datagram={}:{},queues={PAIRS}",
                    here.display(),
                    there.display()
                ),
            ]);
        }
    }
    words
}

/// The name of the device of a kind, as counters have it, and its place on the guest's bus.
fn device(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::ManyQueue => ("net", "0000:00:05.0"),
        _ => ("blk", "0000:00:04.0"),
    }
}

/// A place to boot guests from.
struct Booth<'a> {
    program: PathBuf,
    dir: PathBuf,
    args: &'a ReproduceGuestArgs,
}

impl Booth<'_> {
    fn command(&self, which: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["guest", which, "--kernel", &self.args.guest_kernel]);
        command.arg("--cache").arg(&self.args.guest_cache);
        command.arg("--module-source").arg(&self.args.module_source);
        command.args(["--with-module", "dma_count"]);
        command.stdin(Stdio::null());
        command
    }

    /// Fetches and builds what all of them need, before they share it. The kernel's version.
    fn prepare(&self) -> Result<String, String> {
        let mut command = self.command("prepare");
        command.args(["--module", "pviommu", "--initramfs"]);
        command.arg(self.dir.join("initramfs"));
        let (assignments, _) = said(command.args(["--", "true"]))?;
        let version = kernel_version(&assignments);
        Ok(version.unwrap_or(&self.args.guest_kernel).to_owned())
    }

    /// One guest, and what was said.
    fn boot(
        &self,
        kind: Kind,
        configuration: Configuration,
        operations: u32,
    ) -> Result<Said, String> {
        let name = format!("{}-{}-{operations}", kind.name(), configuration.name());
        let dir = self.dir.join(name.replace(' ', "-"));
        let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
        fs::create_dir_all(&dir).map_err(failed)?;
        let mut command = self.command("run");
        command.args(words(kind, configuration, &dir));
        command.arg("--dir").arg(&dir);
        let limit = self.args.guest_limit.to_string();
        command.args(["--icount", "--metrics", "--limit", &limit]);
        let script = if kind == Kind::ManyQueue {
            FRAMES
        } else {
            command.arg("--with-ringfence");
            READS
        };
        command.args(["--", "sh", "-c", script, "count", &operations.to_string()]);
        let (name, place) = device(kind);
        let (out, metrics) = said(&mut command)?;
        read(&out, &metrics, name, place)
    }

    fn counted(&self, kind: Kind, configuration: Configuration) -> Result<GuestCounts, String> {
        if let Some(why) = lacks(kind, configuration) {
            return Err(why.into());
        }
        let [few, many] = OPERATIONS.map(|operations| self.boot(kind, configuration, operations));
        many?.beyond(&few?)
    }
}

/// The version of the kernel whose image is named by what `guest prepare` prints.
fn kernel_version(assignments: &str) -> Option<&str> {
    let image = assignments
        .lines()
        .find_map(|line| line.strip_prefix("KERNEL="))?;
    let (_, version) = image.rsplit_once("vmlinuz-")?;
    Some(version.trim_end_matches('\''))
}

/// Standard output and standard error of a command that has ended well; otherwise the last thing that it said.
fn said(command: &mut Command) -> Result<(String, String), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    if output.status.success() {
        return Ok((out, error));
    }
    let counter = |line: &&str| !line.starts_with('#') && !line.starts_with("ringfence_");
    let last = error.lines().rfind(counter).unwrap_or("it said nothing");
    Err(last.trim_start_matches("ringfence: ").to_owned())
}

/// Boots a guest for every cell, as many at a time as there are processors. With `fetch` false nothing is fetched: if no guest has been booted before,
/// that is why there are none.
pub(super) fn count(args: &ReproduceGuestArgs, fetch: bool) -> Result<Guests, Failure> {
    if !fetch && !args.guest_cache.join("kernels").is_dir() {
        return Ok(Guests::None(format!(
            "there is no guest in {} yet; `ringfence reproduce X21` fetches what one needs, --guest-cache names another place",
            args.guest_cache.display()
        )));
    }
    let program = std::env::current_exe().map_err(Failure::io("ringfence".as_ref()))?;
    // Below the system's: paths of sockets are short.
    let dir = std::env::temp_dir().join(format!("ringfence-x21-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(Failure::io(&dir))?;
    let booth = Booth { program, dir, args };
    let guests = match booth.prepare() {
        Err(why) => Guests::None(why),
        Ok(kernel) => all(&booth, kernel),
    };
    let _ = fs::remove_dir_all(&booth.dir);
    Ok(guests)
}

fn all(booth: &Booth<'_>, kernel: String) -> Guests {
    let pairs = Kind::ALL
        .into_iter()
        .flat_map(|kind| Configuration::ALL.map(|one| (kind, one)));
    let cells = pairs.map(|(kind, configuration)| GuestCell {
        kind,
        configuration,
        counts: Err("its guest was not booted".into()),
    });
    let mut cells: Vec<GuestCell> = cells.collect();
    let count = cells.len();
    let next = Mutex::new(cells.iter_mut().enumerate());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers.min(count) {
            scope.spawn(|| {
                loop {
                    let taken = next.lock().ok().and_then(|mut next| next.next());
                    let Some((place, cell)) = taken else { break };
                    if std::io::stderr().is_terminal() {
                        let (kind, configuration) = (cell.kind.name(), cell.configuration.name());
                        eprintln!(
                            "ringfence: guests {}/{count} {kind}, {configuration}",
                            place + 1
                        );
                    }
                    cell.counts = booth.counted(cell.kind, cell.configuration);
                }
            });
        }
    });
    Guests::Counted { kernel, cells }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_booted_or_says_why_not() {
        for kind in Kind::ALL {
            for configuration in Configuration::ALL {
                let words = words(kind, configuration, Path::new("d"));
                let isolated = words.iter().any(|word| word == "--isolate");
                assert_eq!(isolated, kind == Kind::Simulated);
                // What `guest run` refuses is not asked of it.
                if lacks(kind, configuration).is_none() {
                    assert!(!isolated || !words.iter().any(|word| word == "--no-iommu"));
                }
            }
        }
    }

    #[test]
    fn the_kernel_is_called_by_its_version() {
        let text = "QEMU=qemu\nKERNEL='/c/kernels/boot/vmlinuz-6.12.107+deb13-amd64'\nAPPEND=x\n";
        assert_eq!(kernel_version(text), Some("6.12.107+deb13-amd64"));
        assert_eq!(kernel_version("KERNEL=elsewhere\n"), None);
    }

    #[test]
    fn nothing_is_fetched_unasked() {
        let args = ReproduceGuestArgs {
            guest_cache: "there/is/none".into(),
            guest_kernel: "6.12".into(),
            guest_limit: 1,
            module_source: "kmod".into(),
        };
        let Guests::None(why) = count(&args, false).unwrap() else {
            panic!("guests from nowhere");
        };
        assert!(
            why.contains("there/is/none") && why.contains("reproduce X21"),
            "{why}"
        );
        assert!(!args.guest_cache.exists());
    }

    #[test]
    fn what_a_command_says_last_is_why_it_failed() {
        let why = |script: &str| said(Command::new("sh").args(["-c", script]));
        assert_eq!(
            why("echo a; echo b >&2").unwrap(),
            ("a\n".into(), "b\n".into())
        );
        let failed = why("echo 'ringfence: no QEMU' >&2; echo 'ringfence_x 1' >&2; exit 1");
        assert_eq!(failed.unwrap_err(), "no QEMU");
        assert!(why("exit 1").is_err());
    }
}
