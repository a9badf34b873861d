//! The debug kernel of guest tests: Debian's kernel source with a small configuration that checks
//! locks, memory, contexts and the DMA API.
//!
//! The build runs in a root directory below the cache, like the build of modules, and stays there
//! as the kernel's headers. It takes minutes, so its name has a digest of the configuration.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::GuestError;
use super::apt::Apt;
use super::initramfs::save;
use super::kernel::{DEBUG_KERNEL, DEBUG_MARK};
use super::module;

const SUITE: &str = "trixie";
const SOURCE: &str = "linux-source-6.12";
/// Directory of the build, in the root. It moves to `linux-headers-RELEASE` at the end.
const BUILD: &str = "usr/src/debug";

/// Packages that the build needs besides those of [`module::TOOLS`].
const TOOLS: &[&str] = &[
    "gcc",
    "libc6-dev",
    "flex",
    "bison",
    "bc",
    "libelf-dev",
    "tar",
    "lz4",
    "xz-utils",
    "diffutils",
];

/// Unpacks the source without what no configuration of x86 compiles here, and configures it. $1 is
/// the file name of the archive. `allnoconfig` switches off all that the file does not name.
const CONFIGURE: &str = r#"
rm -rf /usr/src/debug && mkdir /usr/src/debug && cd /usr/src/debug &&
xz -dc "/usr/src/$1.tar.xz" | tar -x --strip-components=1 --wildcards \
    --exclude="$1/arch/[!x]*.[chS]" --exclude="$1/arch/*.dts*" \
    --exclude='*/Documentation/*.rst' --exclude='*/Documentation/*.yaml' \
    --exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/media/*.[ch]' \
    --exclude='*/drivers/infiniband/*.[ch]' --exclude='*/drivers/staging/*.[ch]' \
    --exclude='*/drivers/net/wireless/*.[ch]' --exclude='*/drivers/scsi/*.c' \
    --exclude='*/sound/*.[ch]' --exclude='*/tools/perf/*' --exclude='*/tools/testing/*' &&
rm "/usr/src/$1.tar.xz" && mv /usr/src/debug.config .debug.config &&
make -s KCONFIG_ALLCONFIG=.debug.config allnoconfig &&
make -s kernelrelease >/usr/src/debug.release
"#;

/// Builds the kernel and its modules, then removes what the build of other modules does not need.
const BUILD_ALL: &str = r#"
cd /usr/src/debug && make -s -j"$(nproc)" bzImage modules &&
rm -rf /out && mkdir /out && cp arch/x86/boot/bzImage System.map .config /out &&
find . -name '*.ko' -exec cp '{}' /out ';' &&
find . '(' -path ./scripts -o -path ./tools ')' -prune -o -type f \
    '(' -name '*.[coSa]' -o -name '*.ko' -o -name '.*.cmd' -o -name vmlinux -o -name bzImage ')' \
    -exec rm '{}' +
"#;

/// Builds the debug kernel with the configuration `fragment`, unless `cache` has it. Returns its
/// directory, the kernel [`DEBUG_KERNEL`] of the cache. Passes progress messages to `say`.
///
/// # Errors
/// [`GuestError`] names the missing part; [`GuestError::Build`] if the compiler reports an error;
/// [`GuestError::Configuration`] if the kernel lacks an option of the fragment.
pub fn prepare_debug_kernel(
    fragment: &str,
    cache: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<PathBuf, GuestError> {
    let dir = cache.join("kernels").join(DEBUG_KERNEL);
    let base = cache.join("modules");
    let root = base.join(module::DEBUG_ROOT);
    fs::create_dir_all(&root).map_err(GuestError::io(&root))?;
    let lock = base.join("lock-debug");
    let held = File::create(&lock).map_err(GuestError::io(&lock))?;
    flock(&held, FlockOperation::LockExclusive).map_err(|e| GuestError::io(&lock)(e.into()))?;

    let digest = digest(&[fragment, CONFIGURE, BUILD_ALL]);
    let complete = dir.join("complete");
    if fs::read_to_string(&complete).is_ok_and(|built| built == digest) {
        return Ok(dir);
    }
    fetch(cache, &root, say)?;
    let log = base.join("log-debug");
    let local = format!("{fragment}\nCONFIG_LOCALVERSION=\"{DEBUG_MARK}{digest}\"\n");
    save(&root.join("usr/src/debug.config"), local.as_bytes())?;
    module::run_in(&root, CONFIGURE, &[SOURCE], &log)?;
    let configuration = root.join(BUILD).join(".config");
    let made = fs::read_to_string(&configuration).map_err(GuestError::io(&configuration))?;
    let missing = missing(&local, &made);
    if !missing.is_empty() {
        return Err(GuestError::Configuration { missing });
    }
    say("building the debug kernel (several minutes)");
    module::run_in(&root, BUILD_ALL, &[], &log)?;
    install(&root, &dir)?;
    save(&complete, digest.as_bytes())?;
    Ok(dir)
}

/// Downloads the compiler and the kernel's source into `root`.
fn fetch(cache: &Path, root: &Path, say: &mut dyn FnMut(&str)) -> Result<(), GuestError> {
    let tools = root.join("tools");
    say("fetching the debug kernel's source (150 MB), and its compiler (80 MB) once");
    let apt = Apt::new(cache, &[SUITE])?;
    if !tools.is_file() {
        let packages: Vec<&str> = [module::TOOLS, TOOLS].concat();
        apt.unpack_with_dependencies(SUITE, &packages, root)?;
        save(&tools, b"")?;
    }
    apt.unpack(&[SOURCE.to_owned()], root)
}

/// Moves the image, the modules and the headers to where the parts of Debian's kernels are.
fn install(root: &Path, dir: &Path) -> Result<(), GuestError> {
    let release = root.join("usr/src/debug.release");
    let release = fs::read_to_string(&release).map_err(GuestError::io(&release))?;
    let release = release.trim();
    let _ = fs::remove_dir_all(dir);
    let boot = dir.join("boot");
    let modules = dir.join("usr/lib/modules").join(release);
    for new in [&boot, &modules] {
        fs::create_dir_all(new).map_err(GuestError::io(new))?;
    }
    let out = root.join("out");
    for entry in fs::read_dir(&out).map_err(GuestError::io(&out))? {
        let from = entry.map_err(GuestError::io(&out))?.path();
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let to = match &*name {
            "bzImage" => boot.join(format!("vmlinuz-{release}")),
            ".config" => boot.join(format!("config-{release}")),
            "System.map" => boot.join(format!("System.map-{release}")),
            module => modules.join(module),
        };
        fs::rename(&from, &to).map_err(GuestError::io(&to))?;
    }
    let headers = root.join(format!("usr/src/linux-headers-{release}"));
    let _ = fs::remove_dir_all(&headers);
    fs::rename(root.join(BUILD), &headers).map_err(GuestError::io(&headers))?;
    save(&module::marker(root, release), b"")
}

/// Returns the lines of `wanted` that the configuration `made` lacks.
fn missing(wanted: &str, made: &str) -> Vec<String> {
    let options = wanted.lines().filter(|line| line.starts_with("CONFIG_"));
    options
        .filter(|option| !made.lines().any(|line| line == *option))
        .map(str::to_owned)
        .collect()
}

/// Returns a digest of some texts (FNV-1a, 32 bits), which is short enough for a release name.
fn digest(texts: &[&str]) -> String {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    let hash = bytes.fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_were_not_taken_are_missing() {
        let wanted = "# a comment\nCONFIG_A=y\nCONFIG_B=m\n\nCONFIG_C=17\n";
        let made = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=170\n";
        assert_eq!(missing(wanted, made), ["CONFIG_B=m", "CONFIG_C=17"]);
        assert_eq!(missing(wanted, wanted), [""; 0]);
    }

    #[test]
    fn each_text_changes_the_digest() {
        // The first is the published value of FNV-1a for the byte 0.
        assert_eq!(digest(&[""]), "050c5d1f");
        assert_ne!(digest(&["a", "b"]), digest(&["ab", ""]));
        assert_ne!(digest(&["a", "b"]), digest(&["a", "c"]));
    }

    #[test]
    fn a_kernel_of_the_same_configuration_is_built_once() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("kernels/debug");
        fs::create_dir_all(&dir).unwrap();
        let built = digest(&["CONFIG_A=y\n", CONFIGURE, BUILD_ALL]);
        fs::write(dir.join("complete"), built).unwrap();
        let say = &mut |text: &str| panic!("{text}");
        let found = prepare_debug_kernel("CONFIG_A=y\n", scratch.path(), say).unwrap();
        assert_eq!(found, dir);
    }
}
