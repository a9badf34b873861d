//! Resource limits of a device's process: setrlimit(2). The filter bounds what it asks for, these
//! bound how much.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::grants::{FIRST_FILE, MAX_FILES};
use super::sys;
use super::windows::{END, FIRST};

/// Addresses of the process beside the windows: program, libraries, heap, stacks, the board.
const PROCESS_BYTES: u64 = 1 << 30;
/// Bytes of memory that is the process's alone: heap and the threads' stacks.
const DATA_BYTES: u64 = 256 << 20;
/// Bytes of the first thread's stack.
const STACK_BYTES: u64 = 8 << 20;
/// A limit of 1 byte keeps core dumps from files and from programs that take them; 0 does not keep
/// them from programs (core(5)).
const CORE_BYTES: u64 = 1;

/// Bounds the calling process to a disk over `image`: none of its files grows beyond that one's
/// end.
///
/// Its threads have to be there already: no other can begin.
///
/// # Errors
/// The kernel refuses a limit, or the size of the image cannot be found.
pub(super) fn apply(mut image: &File) -> io::Result<()> {
    // Seeking finds the size of a block device as well, whose end the kernel knows itself.
    let image_bytes = image.seek(SeekFrom::End(0))?;
    // A write beyond the limit then fails with EFBIG, which the driver sees as an I/O error.
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
