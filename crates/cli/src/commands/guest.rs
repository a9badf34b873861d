//! `ringfence guest`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ringfence_live::guest::{Boot, Initramfs, Kernel, Qemu, boot, build_initramfs};

use super::serve::{devices, start};
use crate::args::{GuestCommand, GuestRunArgs};
use crate::failure::Failure;

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
    }
}

fn run(args: &GuestRunArgs) -> Result<ExitCode, Failure> {
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

    let dir = Directory::new(args.dir.as_deref())?;
    let disk = match &args.devices.blk {
        Some(path) => path.clone(),
        None => scratch(&dir.path)?,
    };
    let devices = devices(&args.devices, Some(&disk));
    let mut daemon = start(&dir.path, &devices, &args.devices)?;
    let ended = boot(&Boot {
        machine: daemon.machine(),
        qemu: &qemu,
        kernel: &kernel.image,
        initramfs: &initramfs,
        strict: !args.lazy,
        append: &args.append,
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
