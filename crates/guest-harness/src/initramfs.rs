//! The guest's user space: busybox, modules, and an init process that runs one command.

use std::fs;
use std::path::{Path, PathBuf};

use super::GuestError;
use super::cpio::Archive;
use super::kernel::Kernel;

/// Contents of an initramfs.
#[derive(Clone, Debug)]
pub struct Initramfs<'a> {
    /// Names of kernel modules; their dependencies are added.
    pub modules: &'a [&'a str],
    /// Modules from other sources, loaded before the kernel's.
    pub own: &'a [OwnModule],
    /// The command and its arguments. Empty for a shell.
    pub command: &'a [String],
    /// Further files: path in the guest, and contents.
    pub files: &'a [(String, Vec<u8>)],
}

/// A module that is not part of the kernel's package.
#[derive(Clone, Debug)]
pub struct OwnModule {
    /// Name of the module.
    pub name: String,
    /// Contents of the module file.
    pub bytes: Vec<u8>,
    /// Parameters, in the syntax of `insmod`.
    pub parameters: String,
}

/// The init script. Kernel messages go to the first serial port, the command's input and output to
/// the second, and its exit code to the third.
const INIT: &str = concat!(
    r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/ TERM=linux
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /tmp /mnt
mount -t devpts pts /dev/pts
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
while read -r module parameters; do insmod "/modules/$module.ko" $parameters "#,
    r#"|| echo "init: $module does not load"; done </modules/order
# Disks come a little after their driver.
for _ in $(seq 100); do [ -b /dev/vda ] || [ -b /dev/nvme0n1 ] && break; "#,
    r#"[ -e /sys/bus/virtio/drivers/virtio_blk/virtio* ] || [ -d /sys/module/nvme ] || break; "#,
    r#"usleep 50000; done
ip link set lo up
[ -e /interactive ] || stty -F /dev/ttyS1 raw -echo
# When the leader of a session ends, its terminal is hung up, and what it has not "#,
    r#"sent is dropped: so the leader waits for that first.
setsid -c sh -c 'sh /command; code=$?; stty raw; exit $code' </dev/ttyS1 >/dev/ttyS1 2>&1
echo "status $?" >/dev/ttyS2
sync
poweroff -f
"#
);

/// Builds the initramfs.
///
/// # Errors
/// [`GuestError`] names the missing part.
pub fn build(kernel: &Kernel, what: &Initramfs<'_>) -> Result<Vec<u8>, GuestError> {
    let busybox = busybox()?;
    let program = fs::read(&busybox).map_err(GuestError::io(&busybox))?;
    if is_dynamic(&program) {
        return Err(GuestError::DynamicBusybox { path: busybox });
    }
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.directory(directory);
    }
    archive.program("bin/busybox", &program);
    archive.program("init", INIT.as_bytes());
    let mut order = String::new();
    for module in what.own {
        archive.program(&format!("modules/{}.ko", module.name), &module.bytes);
        order.push_str(&format!("{} {}\n", module.name, module.parameters));
    }
    for module in kernel.modules(what.modules)? {
        archive.program(&format!("modules/{}.ko", module.name), &module.bytes);
        order.push_str(&module.name);
        order.push('\n');
    }
    archive.program("modules/order", order.as_bytes());
    archive.program("command", script(what.command).as_bytes());
    if what.command.is_empty() {
        archive.program("interactive", b"");
    }
    for (path, content) in what.files {
        let path = path.trim_start_matches('/');
        for (at, _) in path.match_indices('/') {
            archive.directory(path.get(..at).unwrap_or(path));
        }
        archive.program(path, content);
    }
    Ok(archive.finish())
}

fn script(command: &[String]) -> String {
    if command.is_empty() {
        return "exec sh -i\n".into();
    }
    let words: Vec<String> = command
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")))
        .collect();
    format!("exec {}\n", words.join(" "))
}

fn busybox() -> Result<PathBuf, GuestError> {
    ["/usr/bin/busybox", "/bin/busybox"]
        .iter()
        .map(PathBuf::from)
        .find(|path| path.is_file())
        .ok_or(GuestError::Missing {
            program: "busybox",
            package: "busybox-static",
        })
}

/// Returns true if an ELF program names a dynamic loader.
fn is_dynamic(program: &[u8]) -> bool {
    const LOADER: &[u8] = b"ld-linux-x86-64.so.2\0";
    program
        .get(..4096.min(program.len()))
        .is_some_and(|start| start.windows(LOADER.len()).any(|part| part == LOADER))
}

/// Writes `bytes` to `path`.
pub(super) fn save(path: &Path, bytes: &[u8]) -> Result<(), GuestError> {
    fs::write(path, bytes).map_err(GuestError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_shell_as_they_are() {
        let command = ["sh", "-c", "echo 'a b' \"$x\""].map(str::to_owned);
        assert_eq!(
            script(&command),
            "exec 'sh' '-c' 'echo '\\''a b'\\'' \"$x\"'\n"
        );
        assert_eq!(script(&[]), "exec sh -i\n");
    }
}
