//! `ringfence guest`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ringfence_live::guest::{Boot, Initramfs, Kernel, Machine, Qemu, boot, build_initramfs};

use super::serve::{devices, quote, start};
use crate::args::{GuestArgs, GuestCommand, GuestPrepareArgs, GuestRunArgs};
use crate::failure::Failure;
use crate::output::print;

/// What drivers the guest needs for the devices there are, and for a file system.
const MODULES: &[&str] = &[
    "virtio_iommu",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "crc32c_generic",
    "ext4",
];
/// Bytes of the disk if none is named.
const SCRATCH_BYTES: u64 = 64 << 20;

/// Does what is asked with guests; the exit code is the guest's.
pub(crate) fn guest(command: &GuestCommand) -> Result<ExitCode, Failure> {
    match command {
        GuestCommand::Run(args) => run(args),
        GuestCommand::Prepare(args) => prepare(args).map(|()| ExitCode::SUCCESS),
    }
}

/// What a guest needs, found or fetched.
struct Prepared {
    qemu: Qemu,
    kernel: Kernel,
    initramfs: Vec<u8>,
}

impl Prepared {
    fn new(args: &GuestArgs) -> Result<Self, Failure> {
        let mut say = |text: &str| eprintln!("ringfence: {text}");
        fs::create_dir_all(&args.cache).map_err(Failure::io(&args.cache))?;
        let cache = fs::canonicalize(&args.cache).map_err(Failure::io(&args.cache))?;
        let qemu = Qemu::prepare(&cache, &mut say)?;
        let kernel = Kernel::prepare(&args.kernel, &cache, &mut say)?;
        let initramfs = build_initramfs(
            &kernel,
            &Initramfs {
                modules: MODULES,
                command: &args.command,
                files: &[],
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
    let prepared = Prepared::new(&args.guest)?;
    let path = &args.initramfs;
    fs::write(path, &prepared.initramfs).map_err(Failure::io(path))?;
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
    let line = format!("{} {}", Machine::kernel_line(!args.lazy), args.append);
    line.trim_end().to_owned()
}

fn run(args: &GuestRunArgs) -> Result<ExitCode, Failure> {
    let prepared = Prepared::new(&args.guest)?;
    let dir = Directory::new(args.dir.as_deref())?;
    let disk = match &args.devices.blk {
        Some(path) => path.clone(),
        None => scratch(&dir.path)?,
    };
    let devices = devices(&args.devices, Some(&disk));
    let mut daemon = start(&dir.path, &devices, &args.devices)?;
    let ended = boot(&Boot {
        machine: daemon.machine(),
        qemu: &prepared.qemu,
        kernel: &prepared.kernel.image,
        initramfs: &prepared.initramfs,
        kernel_line: &kernel_line(&args.guest),
        limit: Duration::from_secs(args.limit),
    });
    if args.metrics {
        eprint!("{}", daemon.metrics());
    }
    daemon.stopper().stop();
    daemon.join().map_err(Failure::io(&dir.path))?;
    let code = ended?;
    dir.done();
    Ok(ExitCode::from(code))
}

fn scratch(dir: &Path) -> Result<PathBuf, Failure> {
    let path = dir.join("disk.img");
    let file = fs::File::create(&path).map_err(Failure::io(&path))?;
    file.set_len(SCRATCH_BYTES).map_err(Failure::io(&path))?;
    Ok(path)
}

/// Where a guest's sockets are: paths of sockets are short, so not below the cache.
struct Directory {
    path: PathBuf,
    temporary: bool,
}

impl Directory {
    fn new(named: Option<&Path>) -> Result<Self, Failure> {
        let temporary = named.is_none();
        let path = named.map_or_else(
            || std::env::temp_dir().join(format!("ringfence-{}", std::process::id())),
            Path::to_owned,
        );
        fs::create_dir_all(&path).map_err(Failure::io(&path))?;
        let path = fs::canonicalize(&path).map_err(Failure::io(&path))?;
        Ok(Self { path, temporary })
    }

    fn done(self) {
        if self.temporary {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
