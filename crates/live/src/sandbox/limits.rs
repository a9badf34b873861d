//! Resource limits of a sandbox process (setrlimit(2)). The seccomp filter restricts the calls;
//! these limits restrict amounts.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::grants::windows::{END, FIRST};
use crate::grants::{FIRST_FILE, MAX_FILES, sys};

/// Address space outside the windows: program, libraries, heap, stacks and control region.
const PROCESS_BYTES: u64 = 1 << 30;
/// Bytes of private memory: heap and thread stacks.
const DATA_BYTES: u64 = 256 << 20;
/// Bytes of the first thread's stack.
const STACK_BYTES: u64 = 8 << 20;
/// A limit of 1 byte disables core dumps to files and to pipe handlers. A limit of 0 does not
/// disable pipe handlers (core(5)).
const CORE_BYTES: u64 = 1;

/// Applies the limits to the calling process, whose disk is `image`. No file may grow beyond the
/// current end of the image.
///
/// All threads must exist already: the limits forbid new ones.
///
/// # Errors
/// The kernel refuses a limit, or the size of the image cannot be determined.
pub(super) fn apply(mut image: &File) -> io::Result<()> {
    // Seeking also finds the size of a block device. The kernel itself enforces a block device's
    // end.
    let image_bytes = image.seek(SeekFrom::End(0))?;
    // A write beyond the limit then fails with EFBIG; the driver sees an I/O error.
    sys::ignore_file_size_signal()?;
    let descriptors = FIRST_FILE.unsigned_abs() as u64 + MAX_FILES as u64;
    let windows = END.saturating_sub(FIRST);
    for (resource, most) in [
        (Resource::Fsize, image_bytes),
        (Resource::Core, CORE_BYTES),
        (Resource::Nofile, descriptors),
        (Resource::Nproc, 0),
        (Resource::As, windows.saturating_add(PROCESS_BYTES)),
        (Resource::Data, DATA_BYTES),
        (Resource::Stack, STACK_BYTES),
        (Resource::Memlock, 0),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit)?;
    }
    Ok(())
}
