//! A sandboxed process for tests: the shipped one, and hostile variants selected by the argument.
#![allow(missing_docs, unsafe_code)]

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;

use ringfence_live::sandbox::control_region::ControlRegion;
use ringfence_live::sandbox::sys::{end, make, request_calls};
use ringfence_live::sandbox::windows::{END, FIRST};
use ringfence_live::sandbox::{Call, SandboxedDevice, copy, enter, mapper, run_sandboxed_device};

/// Number of pages, from the first window on, in which the process searches for guest memory.
const LOOKED_AT: u64 = 64 * 1024;
/// Number of pages, from the first window on, to which the process writes in each round.
const WRITTEN_TO: u64 = 64;
const PAGE: u64 = 4096;
/// Offset of the last byte of the tests' disks. A process that waits does nothing while this byte
/// is zero.
const GATE: u64 = 256 * 512 - 1;

fn main() -> io::Result<()> {
    let behaviour = std::env::args().nth(1).unwrap_or_default();
    match behaviour.as_str() {
        "waits" => enter(mapper::follow)?.serve_after(|disk| {
            let mut gate = [0];
            while gate == [0] {
                let _ = disk.file().read_exact_at(&mut gate, GATE);
            }
        }),
        "delays_replies" => enter(delays_replies)?.serve(),
        "grows" => grows(&enter(mapper::follow)?),
        "complains" => break_out(|| {
            // Only reports of stopped accesses, without end.
            let words = [6u64, 0xdead_0000, 1, 0];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            while rustix::io::write(rustix::stdio::stdin(), &bytes).is_ok() {}
        }),
        "ignores" => enter(ignores)?.serve(),
        "answers-twice" => enter(answers_twice)?.serve(),
        "keeps" => enter(keeps)?.serve(),
        "maps-more" => enter(maps_more)?.serve(),
        "maps-for-writing" => enter(maps_for_writing)?.serve(),
        "maps-elsewhere" => enter(maps_elsewhere)?.serve(),
        "protects" => enter(protects)?.serve(),
        "opens" => break_out(|| drop(File::open("/etc/passwd"))),
        "connects" => break_out(|| drop(TcpStream::connect("127.0.0.1:1"))),
        "starts-a-thread" => break_out(|| drop(std::thread::spawn(|| {}))),
        // SAFETY: the filter kills the process at this call.
        "maps-itself" => break_out(|| unsafe {
            let rights = libc::PROT_READ;
            libc::mmap(std::ptr::null_mut(), 4096, rights, libc::MAP_SHARED, 64, 0);
        }),
        "reads-memory" => break_out(|| {
            // SAFETY: as above.
            unsafe { libc::pread(64, [0u8; 8].as_mut_ptr().cast(), 8, 0) };
        }),
        "talks" => break_out(|| {
            // Reports the same turn twice.
            let words = [3u64, 0, 1, 1, 0, 0, 0];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            (0..2).for_each(|_| wait());
            for _ in 0..2 {
                let _ = rustix::io::write(rustix::stdio::stdin(), &bytes);
            }
            (0..2).for_each(|_| wait());
        }),
        "babbles" => break_out(|| {
            let _ = rustix::io::write(rustix::stdio::stdin(), &[0xff; 13]);
            let _ = rustix::io::read(rustix::stdio::stdin(), &mut [0; 8]);
            let _ = rustix::io::read(rustix::stdio::stdin(), &mut [0; 8]);
        }),
        "keeps-a-thread" => {
            std::thread::spawn(|| {
                loop {
                    std::thread::park();
                }
            });
            enter(mapper::follow)?.serve()
        }
        "reads-all" => reads_all(&enter(mapper::follow)?),
        "goes-on" => goes_on(&enter(mapper::follow)?, true),
        "never-ends" => goes_on(&enter(mapper::follow)?, false),
        _ => run_sandboxed_device(),
    }
}

/// Confines the process, waits for the driver to start, and calls `how`.
fn break_out(how: impl FnOnce()) -> io::Result<()> {
    let simulator = enter(mapper::follow)?;
    wait();
    how();
    simulator.serve()
}

/// Reads the first word of a command.
fn wait() {
    let _ = rustix::io::read(rustix::stdio::stdin(), &mut [0; 8]);
}

/// Reads and writes each page that it can access, and writes the result to its disk. Each page of
/// guest memory begins with its own number.
fn reads_all(simulator: &SandboxedDevice) -> io::Result<()> {
    // Wait for the rings and the doorbell.
    (0..3).for_each(|_| wait());
    let (mut pages, mut written) = (0u64, 0u64);
    for at in 0..LOOKED_AT {
        let mut page = [0u8; PAGE as usize];
        let window = FIRST + at * PAGE;
        if copy::read(window, &mut page).is_ok() {
            pages += 1;
            simulator
                .disk
                .file()
                .write_all_at(&page[..8], 512 + 8 * pages)?;
        }
        written += u64::from(copy::write(window + 8, &[1; 8]).is_ok());
    }
    assert!(copy::read(END - PAGE, &mut [0; 8]).is_err());
    let found = [pages.to_le_bytes(), written.to_le_bytes()].concat();
    simulator.disk.file().write_all_at(&found, 0)?;
    // Reports the end of the turn.
    let words = [3u64, 0, 1, 0, 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let _ = rustix::io::write(rustix::stdio::stdin(), &bytes);
    wait();
    end(0)
}

/// Writes to every window that it finds, in rounds, and ignores all messages. After each round it
/// writes the round's number and the number of pages written to its disk. With `says` it first
/// reports the end of its turn.
fn goes_on(simulator: &SandboxedDevice, says: bool) -> io::Result<()> {
    (0..3).for_each(|_| wait());
    if says {
        let words = [3u64, 0, 1, 0, 0, 0, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let _ = rustix::io::write(rustix::stdio::stdin(), &bytes);
    }
    for round in 1u64.. {
        let windows = (0..WRITTEN_TO).map(|at| FIRST + at * PAGE);
        let written = windows.filter(|window| copy::write(*window, &round.to_le_bytes()).is_ok());
        let log = [round.to_le_bytes(), (written.count() as u64).to_le_bytes()].concat();
        simulator.disk.file().write_all_at(&log, 0)?;
    }
    end(0)
}

/// Writes across the end of its disk and far beyond it. The first words of the disk have the
/// kernel's results: bytes written, or a negative error number.
fn grows(simulator: &SandboxedDevice) -> io::Result<()> {
    (0..3).for_each(|_| wait());
    let file = simulator.disk.file();
    let answer = |written: io::Result<usize>| match written {
        Ok(bytes) => bytes as i64,
        Err(error) => -i64::from(error.raw_os_error().unwrap_or(0)),
    };
    let answers = [GATE - 511, GATE + 1, 1 << 30]
        .map(|at| answer(file.write_at(&[0xaa; 1024], at)))
        .map(i64::to_le_bytes);
    file.write_all_at(answers.as_flattened(), 0)?;
    let words = [3u64, 0, 1, 0, 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let _ = rustix::io::write(rustix::stdio::stdin(), &bytes);
    wait();
    end(0)
}

/// Executes each unmap late, but each single answer is within its limit.
fn delays_replies(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        if call.number == libc::SYS_munmap {
            let begun = std::time::Instant::now();
            while begun.elapsed() < std::time::Duration::from_millis(700) {
                std::hint::spin_loop();
            }
        }
        true
    })
}

/// Executes the calls of one request after `change` has modified each.
fn round(board: &ControlRegion, done: u64, change: impl Fn(&mut Call) -> bool) -> u64 {
    let Ok(count) = usize::try_from(request_calls(done, 0)) else {
        end(0);
    };
    for at in 0..count {
        let Some(mut call) = board.call(at) else {
            end(1);
        };
        if change(&mut call) {
            // SAFETY: a wrong call can only harm this process, which exists for that.
            unsafe { make(&call) };
        }
    }
    count as u64
}

fn rounds(board: &ControlRegion, change: impl Fn(&mut Call) -> bool) -> ! {
    let mut done = 0;
    loop {
        done = round(board, done, &change);
    }
}

/// Executes maps, and spins forever at an unmap.
fn ignores(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        if call.number == libc::SYS_munmap {
            loop {
                std::hint::spin_loop();
            }
        }
        true
    })
}

/// Acknowledges unmaps without executing them.
fn keeps(board: &ControlRegion) -> ! {
    rounds(board, |call| call.number != libc::SYS_munmap)
}

/// Makes each call twice.
fn answers_twice(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        // SAFETY: as in `round`.
        unsafe { make(call) };
        true
    })
}

/// Maps twice as many pages as granted.
fn maps_more(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        call.arguments[1] *= 2;
        true
    })
}

/// Maps read-only grants as writable.
fn maps_for_writing(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        if call.number == libc::SYS_mmap {
            call.arguments[2] = 3;
        }
        true
    })
}

/// Maps the pages after the granted ones.
fn maps_elsewhere(board: &ControlRegion) -> ! {
    rounds(board, |call| {
        call.arguments[5] += PAGE;
        true
    })
}

/// Makes a call that the mapping thread may never make.
fn protects(board: &ControlRegion) -> ! {
    round(board, 0, |_| true);
    // SAFETY: the filter kills the process at this call.
    unsafe { libc::mprotect(FIRST as *mut _, PAGE as usize, 3) };
    end(1)
}
