//! Guests that write page tables: Debian's kernels of all architectures, each with an initramfs
//! that uses emulated devices behind the machine's IOMMU. `tests/qemu` boots them.

use std::fs;
use std::path::{Path, PathBuf};

use super::GuestError;
use super::architecture::Architecture;
use super::cpio::Archive;
use super::initramfs::save;
use super::kernel::Kernel;
use super::module::build_module;

/// The guest's only process.
const INIT: &[u8] = include_bytes!("linux_init.sh");

/// Path of the command in a guest that has it.
const COMMAND: &str = "bin/ringfence";

/// Drivers of the devices; those without a module are built into the kernel.
const MODULES: &[&str] = &[
    "pci-host-generic",
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "nvme",
    "e1000e",
    "sd_mod",
    "ahci",
];

/// The module that maps pages for devices on kernels without a DMA layer for IOMMUs.
const MAP_PAGES: &str = "map_pages";

/// Downloads the kernel of `architecture` and its busybox, unless `cache` has them, and builds the
/// initramfs. Returns the directory with both: `kernel` and `initramfs`. Passes progress messages
/// to `say`. The directory `module_source` has the sources of the module `map_pages`, which the
/// guest on riscv64 needs.
///
/// # Errors
/// [`GuestError`] names the missing part.
pub fn prepare_linux(
    architecture: Architecture,
    module_source: &Path,
    cache: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<PathBuf, GuestError> {
    let dir = cache.join("linux").join(architecture.name());
    let root = dir.join("root");
    let mut prepare = || {
        let kernel = Kernel::with_busybox(architecture, cache, &root, say)?;
        // Debian's riscv64 kernels lack CONFIG_IOMMU_DMA: nothing in them maps for devices.
        let module = (architecture == Architecture::Riscv64)
            .then(|| build_module(&kernel, MAP_PAGES, module_source, cache, say))
            .transpose()?;
        Ok((kernel, module))
    };
    let (kernel, module) = match prepare() {
        // The archive can have dropped the headers of a kernel in the cache.
        Err(GuestError::NoHeaders { .. } | GuestError::Fetch { .. }) => {
            Kernel::forget(&root);
            prepare()?
        }
        prepared => prepared?,
    };
    let image = dir.join("kernel");
    fs::copy(&kernel.image, &image).map_err(GuestError::io(&image))?;
    save(
        &dir.join("initramfs"),
        &initramfs(&kernel, module.as_deref())?,
    )?;
    Ok(dir)
}

/// Returns an archive that adds the command to a guest. Append it to the guest's initramfs: Linux
/// unpacks one archive after the other.
pub fn archive_with_command(command: &[u8]) -> Vec<u8> {
    let mut archive = Archive::default();
    archive.program(COMMAND, command);
    archive.finish()
}

fn initramfs(kernel: &Kernel, module: Option<&[u8]>) -> Result<Vec<u8>, GuestError> {
    let busybox = kernel.root().join("usr/bin/busybox");
    let program = fs::read(&busybox).map_err(GuestError::io(&busybox))?;
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.directory(directory);
    }
    archive.program("bin/busybox", &program);
    archive.program("init", INIT);
    let mut order = String::new();
    for module in kernel.modules(MODULES)? {
        archive.program(&format!("modules/{}.ko", module.name), &module.bytes);
        order.push_str(&module.name);
        order.push('\n');
    }
    archive.program("modules/order", order.as_bytes());
    if let Some(bytes) = module {
        archive.program(&format!("modules/{MAP_PAGES}.ko"), bytes);
    }
    Ok(archive.finish())
}
