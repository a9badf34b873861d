//! Boots one guest of X21 with this program's own `guest run` and reads its devices' counters at
//! two checkpoints.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::thread;

use ringfence_experiments::guests::{Configuration, GuestCounts, Kind, Uncounted};
use ringfence_live::daemon::METRICS;

use super::super::top::counters;
use super::guest_counters::{GuestCounters, parse};
use super::interrupt::Interrupt;
use crate::args::ReproduceGuestArgs;

/// Operations before the first checkpoint, and between the two. The first ones fill caches of the
/// kernel and of the module.
const OPERATIONS: [u32; 2] = [32, 256];
/// Number of CPUs and queue pairs of the many-queue guest.
const PAIRS: u32 = 4;
/// Line that a guest prints at a checkpoint; it continues after it receives a line.
const MOMENT: &str = "ringfence: moment";

/// Script of a guest. It first counts maps and unmaps in a row, outside the device's other counts.
/// Then it runs operations twice, each time followed by the module's counters and a checkpoint. The
/// guest spins at a checkpoint: the icount clock of an idle guest would jump past the timeout of
/// the cache.
const COUNTED: &str =
    "for once in 1 2; do insmod /modules/dma_count.ko device=$ADDRESS; rmmod dma_count; done
dmesg | grep dma_count:
for operations in $*; do
    operate $operations
    grep -r . /sys/kernel/debug/pviommu 2>/dev/null
    echo 'ringfence: moment'
    until read -t 0; do :; done; read -r
done";

/// Reads of the disk.
const READS: &str = "ADDRESS=0000:00:04.0
operate() { ringfence guest bench-read /dev/vda --count $1; }";

/// Sends a frame per 10 ms to a neighbour that does not answer, on each CPU and thus on each queue.
const FRAMES: &str = "ADDRESS=0000:00:05.0
echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/eth0/disable_ipv6
ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up
for i in 0 1 2 3; do arp -s 10.9.0.$((i + 2)) 02:00:00:00:00:0$i; done
operate() {
    for i in 0 1 2 3; do
        taskset $((1 << i)) ping -q -c $(($1 / 4)) -i 0.01 -W 1 10.9.0.$((i + 2)) >/dev/null &
    done
    wait
}";

/// Returns the arguments of `guest run` for a cell.
fn words(kind: Kind, configuration: Configuration, dir: &Path) -> Vec<String> {
    let mut words: Vec<String> = match configuration {
        Configuration::KvmBaseline => vec!["--iommu", "none"],
        Configuration::VirtioStrict => vec!["--strict"],
        Configuration::VirtioLazy => vec!["--lazy"],
        Configuration::Pviommu => vec!["--iommu", "pviommu", "--module-args", "cache=0"],
        Configuration::PviommuRtc | Configuration::PviommuRtcHopt => {
            vec!["--iommu", "pviommu", "--module-args", "cache=1"]
        }
        Configuration::RtcAsPublished => {
            vec![
                "--iommu",
                "pviommu",
                "--as-published",
                "--module-args",
                "cache=1",
            ]
        }
    }
    .into_iter()
    .map(str::to_owned)
    .collect();
    if configuration == Configuration::PviommuRtcHopt {
        words.push("--host-page-pool".into());
    }
    let disk = |mode: &str| ["--disk".to_owned(), format!("mode={mode}")];
    match kind {
        Kind::Emulated => {}
        Kind::Assigned => words.extend(disk("assigned")),
        // The PVIOMMU paper's baseline of a simulated device has no separate process: its simulator
        // has all of the guest's memory (section 4.2).
        Kind::Simulated if configuration == Configuration::KvmBaseline => {}
        Kind::Simulated => words.extend(disk("sandbox")),
        Kind::ManyQueue => {
            let (here, there) = (dir.join("here"), dir.join("there"));
            words.extend([
                "--cpus".into(),
                PAIRS.to_string(),
                "--net".into(),
                // No peer listens; sent frames have left the device.
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

/// Returns the name of a kind's device in the counters, and its address on the guest's bus.
fn device(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::ManyQueue => ("net", "0000:00:05.0"),
        _ => ("blk", "0000:00:04.0"),
    }
}

/// Returns the command of a guest.
fn script(kind: Kind) -> String {
    let operate = match kind {
        Kind::ManyQueue => FRAMES,
        _ => READS,
    };
    format!("{operate}\n{COUNTED}")
}

/// Output of a guest up to a checkpoint, and its devices' counters at that time.
type Checkpoint = (String, String);

/// Boots guests in one directory.
pub(super) struct GuestRunner<'a> {
    pub(super) program: PathBuf,
    pub(super) dir: PathBuf,
    /// Kernel in the form of `guest run --kernel`.
    pub(super) kernel: &'a str,
    pub(super) args: &'a ReproduceGuestArgs,
    pub(super) stop: &'a Interrupt,
}

impl GuestRunner<'_> {
    pub(super) fn command(&self, which: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["guest", which, "--kernel", self.kernel]);
        command.arg("--cache").arg(&self.args.guest_cache);
        command.arg("--module-source").arg(&self.args.module_source);
        command.args(["--with-module", "dma_count"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Fetches and builds the shared components, with the driver of `iommu`, before guests run in
    /// parallel. Returns the kernel's version.
    pub(super) fn prepare(&self, iommu: &str) -> Result<String, String> {
        let mut command = self.command("prepare");
        command.args(["--iommu", iommu, "--initramfs"]);
        command.arg(self.dir.join("initramfs"));
        command.args(["--", "true"]).stdin(Stdio::null());
        let mut assignments = String::new();
        self.run(&mut command, |_, out| {
            out.read_to_string(&mut assignments).map(drop)
        })?;
        let version = kernel_version(&assignments);
        Ok(version.unwrap_or(self.kernel).to_owned())
    }

    /// Returns the counts per operation in a cell, or the reason for their absence.
    pub(super) fn count_operation(
        &self,
        kind: Kind,
        configuration: Configuration,
    ) -> Result<GuestCounts, Uncounted> {
        let moments = self.boot(kind, configuration);
        let said = moments.and_then(|moments| counters_at_checkpoints(kind, &moments));
        let [before, after] = said.map_err(Uncounted::Failed)?;
        after.since(&before, OPERATIONS[1], configuration)
    }

    /// Returns the command that boots the guest of a cell in `dir`.
    fn guest(&self, kind: Kind, configuration: Configuration, dir: &Path) -> Command {
        let mut command = self.command("run");
        command.args(words(kind, configuration, dir));
        command.arg("--dir").arg(dir);
        let limit = self.args.guest_timeout.to_string();
        command.args(["--icount", "--timeout", &limit]);
        if kind != Kind::ManyQueue {
            command.arg("--with-ringfence");
        }
        command.args(["--", "sh", "-c", &script(kind), "count"]);
        command.args(OPERATIONS.map(|operations| operations.to_string()));
        command.stdin(Stdio::piped());
        command
    }

    /// Boots one guest and returns its checkpoints.
    fn boot(&self, kind: Kind, configuration: Configuration) -> Result<Vec<Checkpoint>, String> {
        let name = format!("{}-{}", kind.word(), configuration.name());
        let dir = self.dir.join(name);
        let failed = |error: io::Error| format!("{}: {error}", dir.display());
        fs::create_dir_all(&dir).map_err(failed)?;
        let mut command = self.guest(kind, configuration, &dir);
        let socket = dir.join(METRICS);
        let mut moments = Vec::new();
        self.run(&mut command, |input, out| {
            let input = input.ok_or(io::ErrorKind::BrokenPipe)?;
            moments = watch(input, out, || counters(&socket))?;
            Ok(())
        })?;
        let _ = fs::remove_dir_all(&dir);
        Ok(moments)
    }

    /// Runs a command, passes its output to `reads`, and waits for its end. If the command fails,
    /// the error is its last message.
    pub(super) fn run(
        &self,
        command: &mut Command,
        reads: impl FnOnce(Option<ChildStdin>, &mut Output) -> io::Result<()>,
    ) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        let mut child = command.spawn().map_err(text)?;
        let input = child.stdin.take();
        let (Some(out), Some(error)) = (child.stdout.take(), child.stderr.take()) else {
            return Err("it has no output".into());
        };
        // Drain standard error in parallel, so that the pipe never fills.
        let says = thread::spawn(move || last_message(error));
        let running = self.stop.guard(child);
        let read = reads(input, &mut BufReader::new(out));
        let status = running.end(read.is_err()).map_err(text)?;
        let last = says.join().unwrap_or_default();
        match read {
            _ if self.stop.is_requested() => Err("interrupted".into()),
            // A guest that is ended because of its output has no message about that.
            Err(error) => Err(last.unwrap_or_else(|| text(error))),
            Ok(()) if status.success() => Ok(()),
            Ok(()) => Err(last.unwrap_or_else(|| format!("it ended with {status}"))),
        }
    }
}

/// Returns the counters at the two checkpoints of a guest.
fn counters_at_checkpoints(
    kind: Kind,
    moments: &[Checkpoint],
) -> Result<[GuestCounters; 2], String> {
    let (name, address) = device(kind);
    let said = moments
        .iter()
        .map(|(out, metrics)| parse(out, metrics, name, address));
    let said: Vec<GuestCounters> = said.collect::<Result<_, _>>()?;
    let count = said.len();
    said.try_into()
        .map_err(|_| format!("it had {count} moments, not two"))
}

type Output = BufReader<ChildStdout>;

/// Reads the output of a guest to its end. At each checkpoint, reads its counters and lets it
/// continue.
pub(super) fn watch(
    mut input: impl Write,
    out: &mut impl BufRead,
    counters: impl Fn() -> io::Result<String>,
) -> io::Result<Vec<Checkpoint>> {
    let mut moments = Vec::new();
    let mut written = String::new();
    let mut line = Vec::new();
    while out.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if text.trim_end() == MOMENT {
            moments.push((std::mem::take(&mut written), counters()?));
            input.write_all(b"\n")?;
        } else {
            written.push_str(&text);
        }
        line.clear();
    }
    Ok(moments)
}

/// Returns the last line that is not a counter, without this program's name.
fn last_message(from: impl Read) -> Option<String> {
    let lines = BufReader::new(from).split(b'\n').map_while(Result::ok);
    let lines = lines.map(|line| String::from_utf8_lossy(&line).trim_end().to_owned());
    let counter = |line: &String| line.starts_with('#') || line.starts_with("ringfence_");
    let last = lines
        .filter(|line| !line.is_empty() && !counter(line))
        .last()?;
    Some(last.trim_start_matches("ringfence: ").to_owned())
}

/// Returns the version of the kernel image in the output of `guest prepare`.
fn kernel_version(assignments: &str) -> Option<&str> {
    let image = assignments
        .lines()
        .find_map(|line| line.strip_prefix("KERNEL="))?;
    let (_, version) = image.rsplit_once("vmlinuz-")?;
    Some(version.trim_end_matches('\''))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_a_guest_of_its_kind() {
        use Configuration::*;
        let pviommu = ["--iommu", "pviommu", "--module-args"];
        let configurations = [
            (KvmBaseline, vec!["--iommu", "none"]),
            (VirtioStrict, vec!["--strict"]),
            (VirtioLazy, vec!["--lazy"]),
            (Pviommu, [&pviommu[..], &["cache=0"]].concat()),
            (PviommuRtc, [&pviommu[..], &["cache=1"]].concat()),
            (
                PviommuRtcHopt,
                [&pviommu[..], &["cache=1", "--host-page-pool"]].concat(),
            ),
            (
                RtcAsPublished,
                [
                    "--iommu",
                    "pviommu",
                    "--as-published",
                    "--module-args",
                    "cache=1",
                ]
                .to_vec(),
            ),
        ];
        assert_eq!(configurations.len(), Configuration::ALL.len());
        let (args, stop) = (args(), Interrupt::default());
        let runner = GuestRunner {
            program: "ringfence".into(),
            dir: "x".into(),
            kernel: "6.12",
            args: &args,
            stop: &stop,
        };
        let common = "guest run --kernel 6.12 --cache there/is/none --module-source kmod \
                      --with-module dma_count";
        let common: Vec<&str> = common.split_whitespace().collect();
        let run = ["--dir", "d", "--icount", "--timeout", "1"];
        let net = "datagram=d/here:d/there,queues=4";
        for (configuration, options) in configurations {
            for kind in Kind::ALL {
                let device = match kind {
                    Kind::Simulated if configuration != KvmBaseline => {
                        vec!["--disk", "mode=sandbox"]
                    }
                    Kind::Emulated | Kind::Simulated => vec![],
                    Kind::Assigned => vec!["--disk", "mode=assigned"],
                    Kind::ManyQueue => vec!["--cpus", "4", "--net", net],
                };
                // The disk's guests read with this program.
                let own = match kind {
                    Kind::ManyQueue => &[][..],
                    _ => &["--with-ringfence"],
                };
                let script = script(kind);
                let script = ["--", "sh", "-c", &script, "count", "32", "256"];
                let command = runner.guest(kind, configuration, Path::new("d"));
                assert_eq!(command.get_program(), "ringfence");
                let found: Vec<&str> = command
                    .get_args()
                    .map(|argument| argument.to_str().unwrap())
                    .collect();
                let parts = [&common[..], &options, &device, &run, own, &script];
                assert_eq!(found, parts.concat(), "{kind:?} {configuration:?}");
            }
        }
    }

    /// The module counts maps of the device whose counters are read.
    #[test]
    fn scripts_operate_the_device_that_is_counted() {
        for kind in Kind::ALL {
            let script = script(kind);
            let (name, address) = device(kind);
            let set = script.lines().find(|line| line.starts_with("ADDRESS="));
            assert_eq!(set, Some(&format!("ADDRESS={address}")[..]), "{kind:?}");
            let (operation, other) = match kind {
                Kind::ManyQueue => ("ping -q -c", "bench-read"),
                _ => ("ringfence guest bench-read /dev/vda --count $1;", "ping"),
            };
            assert!(
                script.contains(operation) && !script.contains(other),
                "{script}"
            );
            assert!(script.ends_with(COUNTED), "{script}");
            assert_eq!(
                name,
                if kind == Kind::ManyQueue {
                    "net"
                } else {
                    "blk"
                }
            );
        }
    }

    /// Each of the four CPUs sends a fourth of the frames to a neighbour of its own. The shell runs
    /// `operate` alone: the lines before it configure an interface.
    #[test]
    fn frames_leave_from_all_processors() {
        let (_, operate) = FRAMES.split_once("operate()").unwrap();
        let script = format!("taskset() {{ echo \"$@\" >&2; }}\noperate(){operate}\noperate 256");
        let out = Command::new("sh").args(["-c", &script]).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        let mut sent: Vec<&str> = text.lines().collect();
        sent.sort_unstable();
        // The masks of processors 0 to 3, in hexadecimal digits.
        let wanted = [("1", 2), ("2", 3), ("4", 4), ("8", 5)]
            .map(|(mask, host)| format!("{mask} ping -q -c 64 -i 0.01 -W 1 10.9.0.{host}"));
        assert_eq!(sent, wanted);
        assert_eq!(wanted.len() as u32, PAIRS);
    }

    /// The smaller of two means is shown: the script loads the module twice, and prints both.
    #[test]
    fn scripts_count_maps_and_unmaps_twice() {
        let first = "for once in 1 2; do insmod /modules/dma_count.ko device=$ADDRESS; \
                     rmmod dma_count; done\ndmesg | grep dma_count:\n";
        assert!(COUNTED.starts_with(first), "{COUNTED}");
    }

    #[test]
    fn the_kernel_is_called_by_its_version() {
        let text = "QEMU=qemu\nKERNEL='/c/kernels/boot/vmlinuz-6.12.107+deb13-amd64'\nAPPEND=x\n";
        assert_eq!(kernel_version(text), Some("6.12.107+deb13-amd64"));
        assert_eq!(kernel_version("KERNEL=elsewhere\n"), None);
    }

    #[test]
    fn counters_are_sampled_while_the_guest_waits() {
        assert!(COUNTED.contains(MOMENT));
        let mut sent = Vec::new();
        let mut out: &[u8] = b"a\r\n\xff\nringfence: moment\r\nb\nringfence: moment\nc";
        let count = std::cell::Cell::new(0);
        let moments = watch(&mut sent, &mut out, || {
            count.set(count.get() + 1);
            Ok(count.get().to_string())
        });
        let wanted = [("a\r\n\u{fffd}\n", "1"), ("b\n", "2")];
        let wanted = wanted.map(|(out, metrics)| (out.into(), metrics.into()));
        assert_eq!(moments.unwrap(), wanted);
        assert_eq!(sent, b"\n\n");
        let outcome = watch(&mut sent, &mut &b"ringfence: moment\n"[..], || {
            Err(io::ErrorKind::NotFound.into())
        });
        assert!(outcome.is_err());
    }

    fn args() -> ReproduceGuestArgs {
        ReproduceGuestArgs {
            guest_cache: "there/is/none".into(),
            guest_kernel: "6.12".into(),
            guest_timeout: 1,
            guest_kind: Vec::new(),
            guest_configuration: Vec::new(),
            module_source: "kmod".into(),
        }
    }

    #[test]
    fn last_line_of_a_command_is_the_reason() {
        let (args, stop) = (args(), Interrupt::default());
        let booth = GuestRunner {
            program: "sh".into(),
            dir: "d".into(),
            kernel: "6.12",
            args: &args,
            stop: &stop,
        };
        let why = |script: &str| {
            let mut command = Command::new("sh");
            let command = command.args(["-c", script]);
            let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut text = String::new();
            let ran = booth.run(command, |_, out| out.read_to_string(&mut text).map(drop));
            ran.map(|()| text)
        };
        assert_eq!(why("echo a; echo b >&2").unwrap(), "a\n");
        let failed = why("echo 'ringfence: no QEMU' >&2; echo 'ringfence_x 1' >&2; exit 1");
        assert_eq!(failed.unwrap_err(), "no QEMU");
        assert!(why("exit 1").is_err());
        // After a stop request, the runner does not wait for the command.
        stop.request();
        assert_eq!(why("exec sleep 600").unwrap_err(), "interrupted");
    }

    #[test]
    fn command_with_rejected_output_is_killed() {
        let (args, stop) = (args(), Interrupt::default());
        let booth = GuestRunner {
            program: "sh".into(),
            dir: "d".into(),
            kernel: "6.12",
            args: &args,
            stop: &stop,
        };
        let mut command = Command::new("sleep");
        let command = command.arg("600").stdout(Stdio::piped());
        let refused = booth.run(command.stderr(Stdio::piped()), |_, _| {
            Err(io::Error::other("no counters"))
        });
        assert_eq!(refused.unwrap_err(), "no counters");
    }
}
