//! Privileges that a thread drops for good: capabilities(7), and those that an executed file could
//! grant.

use std::io;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Possible capability numbers. The kernel refuses numbers that it does not know.
const CAPABILITIES: u32 = 64;

/// Drops all capabilities of the calling thread, and all means to regain them. Threads and
/// processes that it starts later have none either.
///
/// # Errors
/// See [`drop_all_but`].
pub(crate) fn drop_all() -> io::Result<()> {
    drop_all_but(CapabilitySet::empty())
}

/// Like [`drop_all`], but the thread and the threads that it starts keep those capabilities of
/// `kept` that it has. Programs that it starts have none.
///
/// # Errors
/// The kernel refused. The bounding set remains if the thread may not change it (`CAP_SETPCAP`):
/// under `no_new_privs` no program gains capabilities from it.
pub(crate) fn drop_all_but(kept: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    match clear_ambient_capability_set() {
        // Kernels before 4.3 have no ambient set.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    for number in 0..CAPABILITIES {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let kept = capabilities(None)?.permitted & kept;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// Lines of `/proc/<pid>/status` of a thread that has dropped all privileges.
pub(crate) const NO_PRIVILEGES: [&str; 5] = [
    "CapInh:\t0000000000000000",
    "CapPrm:\t0000000000000000",
    "CapEff:\t0000000000000000",
    "CapAmb:\t0000000000000000",
    "NoNewPrivs:\t1",
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_and_those_that_it_starts_have_no_privileges() {
        let statuses = thread::spawn(|| {
            drop_all().unwrap();
            let own = fs::read_to_string("/proc/thread-self/status").unwrap();
            let of_another = || fs::read_to_string("/proc/thread-self/status").unwrap();
            [own, thread::spawn(of_another).join().unwrap()]
        });
        for status in statuses.join().unwrap() {
            for line in NO_PRIVILEGES {
                assert!(
                    status.lines().any(|other| other == line),
                    "{line}: {status}"
                );
            }
        }
    }

    #[test]
    fn only_the_kept_capabilities_remain() {
        let kept = CapabilitySet::IPC_LOCK;
        thread::spawn(move || {
            let before = capabilities(None).unwrap().permitted;
            drop_all_but(kept).unwrap();
            let after = capabilities(None).unwrap();
            assert_eq!(after.permitted, before & kept);
            assert_eq!(after.effective, before & kept);
            assert_eq!(after.inheritable, CapabilitySet::empty());
        })
        .join()
        .unwrap();
    }
}
