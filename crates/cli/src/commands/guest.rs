//! `ringfence guest`: boots a Debian guest whose devices run in this process.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use ringfence_live::access::{SocketAccess, make_cache};
use ringfence_live::differential::{DifferentialReport, DifferentialSettings, DifferentialTest};
use ringfence_live::guest::{
    Boot, COUNTED_WORDS, GuestError, Initramfs, Kernel, OwnModule, Qemu, QemuArgs, READ_BYTES,
    bench_reads, boot, build_initramfs, build_module,
};

use super::serve::{check, devices, quote, start};
use crate::args::{
    GuestArgs, GuestBenchReadArgs, GuestCommand, GuestPrepareArgs, GuestRunArgs,
    GuestVerifyQemuArgs, ModuleArgs,
};
use crate::directory::PrivateDir;
use crate::failure::Failure;
use crate::out_file::{FileAccess, OutFile, write_into};
use crate::output::{print, print_line};

/// Driver of the standard IOMMU, virtio-iommu.
const VIRTIO_IOMMU: &str = "virtio_iommu";
/// Drivers that the guest needs for the devices and a file system.
const MODULES: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "crc32c_generic",
    "ext4",
];
/// Size of the disk in bytes if no disk is named.
const SCRATCH_BYTES: u64 = 64 << 20;

/// Delay of the disk when instructions are counted, so that the driver waits for it on every host.
/// It is about ten times the time that the driver needs to begin waiting.
const LATE: Duration = Duration::from_millis(1);

/// Runs a `guest` subcommand; the exit code is that of the guest.
pub(crate) fn guest(command: &GuestCommand) -> Result<ExitCode, Failure> {
    match command {
        GuestCommand::Run(args) => run(args),
        GuestCommand::VerifyQemu(args) => verify_qemu(args),
        GuestCommand::BenchRead(args) => bench_read(args).map(|()| ExitCode::SUCCESS),
        GuestCommand::Prepare(args) => prepare(args).map(|()| ExitCode::SUCCESS),
    }
}

/// The components of a guest, found or fetched.
struct Prepared {
    qemu: Qemu,
    kernel: Kernel,
    initramfs: Vec<u8>,
}

impl Prepared {
    fn new(
        args: &GuestArgs,
        module: Option<&ModuleArgs>,
        command: &[String],
        files: &[(String, Vec<u8>)],
    ) -> Result<Self, Failure> {
        let mut say = |text: &str| print_line(text);
        // The guest executes the contents of the cache.
        let cache = make_cache(&args.cache).map_err(Failure::io(&args.cache))?;
        let qemu = Qemu::prepare(&cache, &mut say)?;
        let kernel = Kernel::prepare(&args.kernel, &cache, &mut say)?;
        let mut build = |args: &ModuleArgs, name| {
            build_module(&kernel, name, &args.module_source, &cache, &mut say)
        };
        let mut own = Vec::new();
        let mut files = files.to_vec();
        if let Some((args, name)) = module.and_then(|args| Some((args, args.module.as_ref()?))) {
            own.push(OwnModule {
                bytes: build(args, name)?,
                name: name.clone(),
                parameters: args.module_args.clone(),
            });
        }
        if let Some((args, name)) = module.and_then(|a| Some((a, a.with_module.as_ref()?))) {
            files.push((format!("/modules/{name}.ko"), build(args, name)?));
        }
        let stock = own.is_empty().then_some(VIRTIO_IOMMU);
        let modules: Vec<&str> = stock.into_iter().chain(MODULES.iter().copied()).collect();
        let initramfs = build_initramfs(
            &kernel,
            &Initramfs {
                modules: &modules,
                own: &own,
                command,
                files: &files,
            },
        )?;
        Ok(Self {
            qemu,
            kernel,
            initramfs,
        })
    }
}

/// Prints assignments for a shell.
fn prepare(args: &GuestPrepareArgs) -> Result<(), Failure> {
    let prepared = Prepared::new(&args.guest, Some(&args.module), &args.guest.command, &[])?;
    let path = &args.initramfs;
    let mut out = OutFile::create(path, FileAccess::Umask)?;
    out.write_all(&prepared.initramfs)
        .map_err(Failure::io(path))?;
    out.finish()?;
    let path = fs::canonicalize(path).map_err(Failure::io(path))?;
    let mut words = Vec::new();
    if let Some((name, value)) = prepared.qemu.environment() {
        words.push("env".to_owned());
        words.push(format!("{name}={}", value.display()));
    }
    words.extend(prepared.qemu.words());
    let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
    let mut text = String::new();
    for (name, value) in [
        ("QEMU", words.join(" ")),
        ("KERNEL", prepared.kernel.image.display().to_string()),
        ("APPEND", kernel_line(&args.guest)),
        ("INITRAMFS", path.display().to_string()),
    ] {
        text.push_str(&format!("{name}={}\n", quote(&value)));
    }
    print(&text)
}

fn kernel_line(args: &GuestArgs) -> String {
    let line = format!("{} {}", QemuArgs::kernel_line(!args.lazy), args.append);
    line.trim_end().to_owned()
}

fn run(args: &GuestRunArgs) -> Result<ExitCode, Failure> {
    // Check before anything is fetched. The disk always exists.
    let disk = args.devices.blk.clone().unwrap_or_default();
    let mut devices = devices(&args.devices, Some(&disk))?;
    devices.paravirtual = args.module.module.is_some();
    check(&devices)?;
    let files = if args.with_ringfence {
        itself()?
    } else {
        Vec::new()
    };
    let prepared = Prepared::new(&args.guest, Some(&args.module), &args.guest.command, &files)?;
    let dir = Directory::new(args.dir.as_deref(), devices.access)?;
    if args.devices.blk.is_none() {
        devices.disk = Some(scratch(dir.path())?);
    }
    let mut line = kernel_line(&args.guest);
    if let Some(iommu) = args.devices.vhost_user {
        line = format!("{line} {}", iommu.kernel_words());
    }
    if args.icount {
        line = format!("{line} {COUNTED_WORDS}");
    }
    // A device in a separate process, or one behind QEMU, is slow enough.
    if args.icount && devices.sandbox.is_none() && devices.vhost_user.is_none() {
        devices.delay = Some(LATE);
    }
    let mut daemon = start(dir.path(), &devices, &args.devices)?;
    daemon.machine().icount = args.icount;
    let ended = boot(&Boot {
        machine: daemon.machine(),
        qemu: &prepared.qemu,
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        kernel_line: &line,
        limit: Duration::from_secs(args.timeout),
    });
    if args.metrics {
        eprint!("{}", daemon.metrics());
    }
    daemon.stopper().stop();
    daemon.join().map_err(Failure::io(dir.path()))?;
    let code = dir.keep_on_error(ended)?;
    Ok(ExitCode::from(code))
}

/// Returns this program and its libraries, for the guest.
fn itself() -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let own = std::env::current_exe().map_err(Failure::io("ringfence".as_ref()))?;
    let mut files = vec![(PathBuf::from("/bin/ringfence"), own.clone())];
    let ldd = "ldd".as_ref();
    let output = Command::new("ldd").arg(&own).output();
    let output = output.map_err(Failure::io(ldd))?;
    for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        if word.starts_with('/') {
            files.push((word.into(), word.into()));
        }
    }
    let read = |(to, from): (PathBuf, PathBuf)| {
        let content = fs::read(&from).map_err(Failure::io(&from))?;
        Ok((to.display().to_string(), content))
    };
    files.into_iter().map(read).collect()
}

/// Times reads; runs inside the guest.
fn bench_read(args: &GuestBenchReadArgs) -> Result<(), Failure> {
    let count = usize::try_from(args.count).unwrap_or(usize::MAX);
    let times = bench_reads(&args.file, count).map_err(Failure::io(&args.file))?;
    let mut text = format!("{count} reads of {READ_BYTES} bytes\n");
    for (name, mut times) in [("waited", times.waited), ("at once", times.at_once)] {
        times.sort_unstable();
        let all = times.len();
        let (Some(cheapest), Some(median), Some(dearest)) =
            (times.first(), times.get(all / 2), times.last())
        else {
            continue;
        };
        text.push_str(&format!(
            "{name}: {all} of them, {median} ns of work the median, {cheapest} the cheapest, \
            {dearest} the dearest\n"
        ));
    }
    print(&text)
}

/// Reads and writes of several sizes, which map and unmap repeatedly.
const JUDGED: &str = "for n in $(seq 12); do
    dd if=/dev/vda of=/dev/null bs=4k count=4 iflag=direct
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct
    dd if=/dev/zero of=/dev/vda bs=16k count=2 oflag=direct
done 2>/dev/null";

fn verify_qemu(args: &GuestVerifyQemuArgs) -> Result<ExitCode, Failure> {
    let mut command = args.guest.command.clone();
    if command.is_empty() {
        command = ["sh", "-c", JUDGED].map(str::to_owned).to_vec();
    }
    let prepared = Prepared::new(&args.guest, None, &command, &[])?;
    let dir = Directory::new(None, SocketAccess::OwnUser)?;
    let disk = scratch(dir.path())?;
    let mut options = fs::File::options();
    let disk = options.read(true).write(true).open(&disk);
    let settings = DifferentialSettings {
        cases: args.cases,
        seed: args.seed,
    };
    let disk = disk.map_err(Failure::io(dir.path()))?;
    let judge =
        DifferentialTest::start(dir.path(), disk, settings).map_err(Failure::io(dir.path()))?;
    let line = format!(
        "{} {}",
        kernel_line(&args.guest),
        DifferentialTest::KERNEL_WORDS
    );
    let ended = boot(&Boot {
        machine: judge.machine(),
        qemu: &prepared.qemu,
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        kernel_line: &line,
        limit: Duration::from_secs(args.timeout),
    });
    let report = judge.finish().map_err(Failure::io(dir.path()))?;
    let DifferentialReport {
        allowed,
        rejected,
        write_only_reads: told_more,
        differing,
        most_mapped,
    } = &report;
    let mut text = format!(
        "seed {}: {} cases over at most {most_mapped} mappings: {allowed} let through by both to \
        the same bytes, {rejected} rejected by both, {told_more} reads of what QEMU told more of \
        than it grants, {} differ\n",
        args.seed,
        report.cases(),
        differing.len()
    );
    for one in differing.iter().take(20) {
        text.push_str(&format!("  {one}\n"));
    }
    print(&text)?;
    let code = dir.keep_on_error(ended)?;
    let passed = code == 0 && differing.is_empty() && report.cases() == args.cases;
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn scratch(dir: &Path) -> Result<PathBuf, Failure> {
    let path = write_into(dir, "disk.img", &[])?;
    let file = fs::File::options().write(true).open(&path);
    let sized = file.and_then(|file| file.set_len(SCRATCH_BYTES));
    sized.map_err(Failure::io(&path))?;
    Ok(path)
}

/// The directory of a guest's sockets. It is not below the cache, because socket paths must be
/// short.
enum Directory {
    /// A private directory, removed at the end.
    Private(PrivateDir),
    /// A directory named by the user.
    Named(PathBuf),
}

impl Directory {
    fn new(named: Option<&Path>, access: SocketAccess) -> Result<Self, Failure> {
        Ok(match named {
            None => Self::Private(PrivateDir::new()?),
            Some(path) => {
                let made = access.make_directory(path);
                Self::Named(made.map_err(Failure::io(path))?)
            }
        })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Private(dir) => dir.path(),
            Self::Named(path) => path,
        }
    }

    /// Ends the use of the directory. After a failure its files stay, because the error names its
    /// console.
    fn keep_on_error(self, ended: Result<u8, GuestError>) -> Result<u8, GuestError> {
        if let (Self::Private(dir), Err(_)) = (self, &ended) {
            dir.keep();
        }
        ended
    }
}
