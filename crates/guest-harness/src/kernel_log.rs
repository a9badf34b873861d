//! Finds the reports of a kernel's own checks in its log.

use std::fs;
use std::path::Path;

use super::GuestError;

/// Word of the kernel's command line that makes warnings reach the console.
pub const LOG_WORDS: &str = "loglevel=5";

/// Number of lines of a console that are shown before and from the first report on.
const SHOWN: (usize, usize) = (2, 60);

/// Texts that begin or are part of a report.
const REPORTS: &[&str] = &[
    // Oopses, KASAN, SLUB, calls that sleep, soft lock-ups, preemption, spin locks, pages.
    "BUG: ",
    "kernel BUG at ",
    "Oops: ",
    "Kernel panic - ",
    "general protection fault",
    // WARN(): the DMA API, lists, reference counts, timers and work items. lockdep and RCU.
    "WARNING: ",
    "UBSAN: ",
    // Hung tasks, stalled RCU.
    "INFO: task ",
    "detected stall",
    "nobody cared",
    "page allocation failure",
    "unregister_netdevice: waiting for ",
    // A check that switched itself off finds nothing more.
    "INFO: trying to register non-static key",
    "turning off the locking correctness validator",
    "lockdep is turned off",
    "DMA-API: debugging out of memory",
];
/// Begins SLUB's reports: `BUG kmalloc-64 (Not tainted): Right Redzone overwritten`.
const SLUB: &str = "BUG ";
/// Precedes the message of a `WARN()`, or its first line if it has no message.
const CUT: &str = "[ cut here ]";
/// First line of a `WARN()` after its message.
const WARN: &str = "WARNING: CPU: ";
/// Heads a stack dump. The report above it is not known if it has no other line.
const TRACE: &str = "Call Trace:";

/// Checks the console of a guest that was booted with [`LOG_WORDS`], in the directory `dir` of its
/// machine. Returns how the guest `ended` if its kernel reported nothing. Passes the lines around
/// the first report to `say`.
///
/// # Errors
/// [`GuestError::Reported`] if the kernel reported a defect, whatever the end was.
pub fn check_kernel_log(
    dir: &Path,
    ended: Result<u8, GuestError>,
    say: &mut dyn FnMut(&str),
) -> Result<u8, GuestError> {
    let console = dir.join("console.log");
    let log = match fs::read(&console) {
        Ok(log) => log,
        Err(error) => return ended.and(Err(GuestError::io(&console)(error))),
    };
    let log = String::from_utf8_lossy(&log);
    let reports = reports(&log);
    if reports.is_empty() {
        return ended;
    }
    let first = log.lines().position(|line| is_report(message(line)));
    let from = first.unwrap_or(0).saturating_sub(SHOWN.0);
    for line in log.lines().skip(from).take(SHOWN.0 + SHOWN.1) {
        say(line.trim_end());
    }
    Err(GuestError::Reported { reports, console })
}

fn is_report(line: &str) -> bool {
    line.starts_with(SLUB) || REPORTS.iter().any(|text| line.contains(text))
}

/// Returns the first line of each report in the kernel's log `log`, without its time, once.
fn reports(log: &str) -> Vec<String> {
    let lines: Vec<&str> = log.lines().map(message).collect();
    let mut found: Vec<String> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let before = |n: usize| index.checked_sub(n).and_then(|at| lines.get(at).copied());
        if !is_report(line) {
            continue;
        }
        // The message of a WARN() says more than its address.
        let warned = before(1).filter(|_| line.starts_with(WARN));
        let first_line = match warned {
            Some(text) if before(2).is_some_and(|line| line.contains(CUT)) => text.to_owned(),
            _ => (*line).to_owned(),
        };
        if !found.contains(&first_line) {
            found.push(first_line);
        }
    }
    if found.is_empty() {
        found.extend(lines.iter().find(|line| line.contains(TRACE)).map(|_| {
            let text = "a stack dump without a known report";
            text.to_owned()
        }));
    }
    found
}

/// Removes the time and the end of a line: `[    1.234567] text\r`.
fn message(line: &str) -> &str {
    let line = line.trim();
    let time = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "));
    match time {
        Some((time, text)) if time.trim_start().starts_with(|c: char| c.is_ascii_digit()) => text,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_of_a_debug_kernel_is_recognised() {
        for line in [
            "BUG: KASAN: slab-out-of-bounds in broken_init+0x40/0x90 [broken]",
            "BUG kmalloc-64 (Tainted: G           OE     ): Right Redzone overwritten",
            "BUG: sleeping function called from invalid context at mm/slub.c:100",
            "BUG: scheduling while atomic: insmod/90/0x00000002",
            "BUG: using smp_processor_id() in preemptible [00000000] code: insmod/90",
            "BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [dd:90]",
            "kernel BUG at lib/list_debug.c:59!",
            "Oops: invalid opcode: 0000 [#1] PREEMPT SMP KASAN NOPTI",
            "Kernel panic - not syncing: Attempted to kill init!",
            "WARNING: possible circular locking dependency detected",
            "WARNING: inconsistent lock state",
            "WARNING: suspicious RCU usage",
            "UBSAN: array-index-out-of-bounds in broken.c:40:12",
            "INFO: task dd:90 blocked for more than 122 seconds.",
            "rcu: INFO: rcu_preempt self-detected stall on CPU",
            "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "irq 24: nobody cared (try booting with the \"irqpoll\" option)",
            "INFO: trying to register non-static key.",
            "turning off the locking correctness validator.",
            "DMA-API: debugging out of memory - disabling",
            "kworker/0:1: page allocation failure: order:4, mode:0x40cc0",
        ] {
            let log = format!("[    0.100000] Linux\r\n[   12.345678] {line}\r\n[   13.0] end\r\n");
            assert_eq!(reports(&log), [line], "{line}");
        }
    }

    #[test]
    fn a_log_without_a_report() {
        let log = "SeaBIOS (version 1.16.3)\n\
            [    0.000000] Linux version 6.12.117-debug-0a1b2c3d (user@host)\n\
            [    0.010000] Lock dependency validator: Copyright (c) 2006 Red Hat, Inc.\n\
            [    0.020000] kasan: KernelAddressSanitizer initialized\n\
            [    0.500000] DMA-API: preallocated 65536 debug entries\n\
            [    0.500001] DMA-API: debugging enabled by kernel config\n\
            [    3.000000] riommu 0000:00:03.0: 0000:00:04.0 was stopped: a write at 0xdead0000\n";
        assert_eq!(reports(log), [""; 0]);
    }

    #[test]
    fn a_warning_is_named_by_its_message() {
        let log = "[    3.0] ------------[ cut here ]------------\n\
            [    3.1] DMA-API: virtio-pci 0000:00:04.0: device driver tries to free DMA memory\n\
            [    3.2] WARNING: CPU: 0 PID: 90 at kernel/dma/debug.c:1011 check_unmap+0x1\n\
            [    3.3] Call Trace:\n\
            [    4.0] ------------[ cut here ]------------\n\
            [    4.1] WARNING: CPU: 1 PID: 91 at fs/a.c:1 b+0x1/0x2\n";
        assert_eq!(
            reports(log),
            [
                "DMA-API: virtio-pci 0000:00:04.0: device driver tries to free DMA memory",
                "WARNING: CPU: 1 PID: 91 at fs/a.c:1 b+0x1/0x2",
            ]
        );
    }

    /// Checks the console that consists of `log`, if any. Returns the message and the lines shown.
    fn check(log: Option<&str>, ended: Result<u8, GuestError>) -> (Result<u8, String>, String) {
        let scratch = tempfile::tempdir().unwrap();
        if let Some(log) = log {
            fs::write(scratch.path().join("console.log"), log).unwrap();
        }
        let mut shown = String::new();
        let checked = check_kernel_log(scratch.path(), ended, &mut |line| {
            shown.push_str(line);
            shown.push('|');
        });
        (checked.map_err(|error| error.to_string()), shown)
    }

    #[test]
    fn a_report_is_shown_with_its_lines_and_replaces_the_end() {
        let log = "[ 1.0] a\n[ 2.0] b\n[ 3.0] c\n[ 4.0] BUG: KASAN: d\r\n[ 5.0] UBSAN: e\n";
        for ended in [Ok(7), Err(GuestError::NoDebugKernel)] {
            let (error, shown) = check(Some(log), ended);
            let error = error.unwrap_err();
            let text = "the guest's kernel reported BUG: KASAN: d; UBSAN: e; its console is ";
            assert!(error.starts_with(text), "{error}");
            assert_eq!(
                shown,
                "[ 2.0] b|[ 3.0] c|[ 4.0] BUG: KASAN: d|[ 5.0] UBSAN: e|"
            );
        }
    }

    #[test]
    fn without_a_report_the_end_counts() {
        let none = String::new();
        assert_eq!(check(Some("[ 1.0] a\n"), Ok(7)), (Ok(7), none.clone()));
        let failed = || Err(GuestError::NoDebugKernel);
        let message = GuestError::NoDebugKernel.to_string();
        assert_eq!(
            check(Some(""), failed()),
            (Err(message.clone()), none.clone())
        );
        assert_eq!(check(None, failed()), (Err(message), none));
        // A console that cannot be read has not passed.
        assert!(check(None, Ok(0)).0.is_err());
    }

    #[test]
    fn a_stack_dump_alone_is_a_report() {
        let log = "[    3.0] something new\n[    3.1] Call Trace:\n[    3.2]  <TASK>\n";
        assert_eq!(reports(log), ["a stack dump without a known report"]);
    }
}
