//! Tests of the limits on accumulated waits and on reports.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use ringfence_types::{Access, Iova};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::grants::child::ChildProcess;
use crate::iommu::VirtioIommu;
use crate::limits::GuestLimits;

const SECTOR: u64 = 512;
/// Delay of each answer; within the time limit of a single one.
const LATE: Duration = Duration::from_millis(20);
/// Allowance instead of 20 s a minute.
const ALLOWANCE: Duration = Duration::from_millis(100);
/// Exceeds the number of waits that the allowance permits.
const ROUNDS: usize = 20;

/// Events that a proxy reported.
type Log = Arc<Mutex<Vec<String>>>;

/// Creates a proxy and returns the process's end of its socket.
fn proxy() -> (DiskProxy, Log, OwnedFd) {
    let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
    proxy_of(ChildProcess::new(child).unwrap())
}

fn proxy_of(child: ChildProcess) -> (DiskProxy, Log, OwnedFd) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SECTOR).unwrap();
    let counters = Arc::<DeviceCounters>::default();
    child.allow(Waiter::Device, ALLOWANCE);
    let pair = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    let (ours, theirs) = pair.unwrap();
    let link = SandboxLink {
        socket: ours,
        child: Arc::new(child),
        injected: 0,
    };
    let iommu = VirtioIommu::with_limits(&GuestLimits::default(), Arc::clone(&counters)).unwrap();
    let disk = Blk::new(file, false, Arc::clone(&counters)).unwrap();
    let events = Log::default();
    let tell = {
        let events = Arc::clone(&events);
        move |what: &ProxyEvent<'_>| events.lock().unwrap().push(format!("{what:?}"))
    };
    let proxy = DiskProxy::new(
        disk,
        link,
        GuestIommu::Virtio(iommu),
        RequesterId::new(32),
        counters,
        Box::new(tell),
    );
    (proxy, events, theirs)
}

/// Creates a proxy whose process answers each reset late.
fn late() -> (DiskProxy, Log, thread::JoinHandle<()>) {
    let (proxy, events, theirs) = proxy();
    let answers = move || {
        let mut bytes = [0; MAX_BYTES];
        while let Ok((got @ 1.., _)) = recv(&theirs, &mut bytes[..], RecvFlags::empty()) {
            let order = DeviceCommand::decode(bytes.get(..got).unwrap());
            if matches!(order, Some(DeviceCommand::Reset)) {
                thread::sleep(LATE);
                let _ = send(
                    &theirs,
                    &DeviceResponse::ResetDone.encode(),
                    SendFlags::NOSIGNAL,
                );
            }
        }
    };
    (proxy, events, thread::spawn(answers))
}

#[test]
fn resets_that_are_late_each_time_add_up() {
    let (mut proxy, events, answering) = late();
    let mut rounds = 0;
    while events.lock().unwrap().is_empty() {
        rounds += 1;
        assert!(rounds < ROUNDS, "still trusted");
        proxy.queues[0].configured = true;
        proxy.reset().unwrap();
    }
    let events = events.lock().unwrap().concat();
    // With no allowance left, every answer is late.
    let late = ["Late", "AllowanceExceeded"];
    assert!(late.iter().any(|why| events.contains(why)), "{events}");
    assert!(proxy.ended && proxy.queues[0].broken);
    drop(proxy);
    answering.join().unwrap();
}

/// The guest clears Bus Master Enable repeatedly while a turn never ends.
#[test]
fn a_bus_that_is_left_late_each_time_adds_up() {
    let (mut proxy, events, answering) = late();
    proxy.queues[0].busy = true;
    proxy.link.child.allow(Waiter::Device, LATE);
    proxy.clear_bus_master().unwrap();
    proxy.set_bus_master();
    assert!(
        events
            .lock()
            .unwrap()
            .concat()
            .contains("AllowanceExceeded")
    );
    assert!(proxy.ended);
    // The proxy waits no longer: the allowance is exhausted.
    assert_eq!(proxy.link.child.patience(Waiter::Device), Duration::ZERO);
    drop(proxy);
    answering.join().unwrap();
}

#[test]
fn reports_of_a_turn_have_a_limit() {
    let (mut proxy, events, theirs) = proxy();
    let stopped = DeviceResponse::Fault {
        iova: Iova::new(0xdead_0000),
        access: Access::Write,
        permission: false,
    };
    let too_long = DeviceResponse::TooLong { bytes: 9, most: 8 };
    let sizes = proxy.disk.queue_sizes().iter().copied();
    let most = sizes.map(u32::from).sum::<u32>() * REPORTS_PER_DESCRIPTOR;
    let reports = [stopped.encode(), too_long.encode()];
    for report in reports.iter().cycle().take(most as usize) {
        send(&theirs, report, SendFlags::NOSIGNAL).unwrap();
        assert!(proxy.receive());
        assert!(!proxy.ended, "{events:?}");
    }
    send(&theirs, &reports[0], SendFlags::NOSIGNAL).unwrap();
    proxy.receive();
    assert!(proxy.ended);
    assert_eq!(*events.lock().unwrap(), ["Ended(MalformedMessage)"]);
}

/// The source could not release the disk, and no process would serve the devices.
#[test]
fn a_disk_whose_process_is_stuck_is_not_handed_over() {
    let exited = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let child = Command::new("/bin/true").spawn().unwrap();
    let child = ChildProcess::stuck(child, exited.as_fd().try_clone_to_owned().unwrap());
    let (proxy, _events, _socket) = proxy_of(child.unwrap());
    for _ in 0..2 {
        let blocked = proxy.save().map(|_| ()).unwrap_err();
        assert!(
            matches!(blocked, HandOverBlocker::ProcessStuck),
            "{blocked}"
        );
    }
    rustix::io::write(&exited, &1u64.to_ne_bytes()).unwrap();
    assert!(proxy.save().is_ok(), "the process has exited");
}
