//! The guest's memory: which ranges are accepted and refused, and that a refused range leaves no
//! trace.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma, MemoryInUse};
use ringfence_live::virtio::blk::Blk;
use ringfence_live::{GuestRam, MemoryError, MemoryRules, RangeSource};
use ringfence_types::{Iova, IovaRange};
use ringfence_vfio_user::errno;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::GuestMemoryMmap;

use crate::rig::*;

const EACCES: u32 = 13;

fn map_file(
    client: &mut Client<impl ringfence_live::virtio::Device, impl ringfence_live::dma::Dma>,
    file: File,
) -> u32 {
    let body = [words(&[32, 3]), longs(&[0, 1 << 30, 4096])].concat();
    client
        .send_with(DMA_MAP, &body, vec![OwnedFd::from(file)])
        .errno
}

#[test]
fn memory_that_could_vanish_is_refused() {
    let mut client = ready();
    let unsealed = memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4096).unwrap();
    assert_eq!(map_file(&mut client, File::from(unsealed)), EACCES);
    assert_eq!(
        map_file(&mut client, File::open("/dev/zero").unwrap()),
        EACCES
    );
    assert_eq!(map_file(&mut client, File::open("/").unwrap()), EACCES);
    assert_eq!(map_file(&mut client, sealed(4096)), 0);
}

/// Only one file may be truncatable: the one at the configured path when the client shares it.
#[test]
fn a_file_that_was_vouched_for_is_taken_and_no_other() {
    let dir = tempfile::tempdir().unwrap().keep();
    let (named, other) = (dir.join("named"), dir.join("other"));
    let range = IovaRange::new(Iova::new(1 << 30), 8192).unwrap();
    let share = |ram: &mut GuestRam, path: &Path| {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let source = RangeSource {
            file: Some(file.into()),
            offset: 0,
            accessible: true,
        };
        ram.map(range, source)
    };
    let rules = MemoryRules {
        file: Some(named.clone()),
        ..MemoryRules::default()
    };
    let mut ram = GuestRam::new(rules);
    fs::write(&other, [7; 8192]).unwrap();
    let unsealed = Err(MemoryError::Unsealed { range });
    // The file does not exist yet; then it exists, but the client shares another one.
    assert_eq!(share(&mut ram, &other), unsealed);
    fs::write(&named, [9; 4096]).unwrap();
    assert_eq!(share(&mut ram, &other), unsealed);
    // The file is too short.
    assert_eq!(
        share(&mut ram, &named),
        Err(MemoryError::Unmappable { range })
    );
    fs::write(&named, [9; 8192]).unwrap();
    assert_eq!(share(&mut ram, &named), Ok(()));
    assert_eq!(ram.unmap(None), Ok(()));
    // The rules remain after an unmap.
    assert_eq!(share(&mut ram, &named), Ok(()));
    assert_eq!(ram.unmap(None), Ok(()));
    // The path now leads to another file.
    fs::rename(&other, &named).unwrap();
    assert_eq!(share(&mut ram, &named), Ok(()));
    let mut usual = GuestRam::default();
    assert_eq!(share(&mut usual, &named), unsealed);
    fs::remove_dir_all(&dir).unwrap();
}

/// A page of such a file is allocated at first touch. If that fails, the kernel kills the process,
/// even if the file is sealed.
#[test]
fn huge_pages_that_may_run_out_are_refused() {
    const BYTES: u64 = 2 << 20;
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(huge) = memfd_create("guest", flags) else {
        println!("not tried: this host has no huge pages");
        return;
    };
    ftruncate(&huge, BYTES).unwrap();
    fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let mut client = fresh();
    client.agree();
    let body = [words(&[32, 3]), longs(&[0, 0, BYTES])].concat();
    let errno = client.send_with(DMA_MAP, &body, vec![huge]).errno;
    assert_eq!(errno, EACCES);
    // The device does not touch the range either.
    client.begin(0);
    client.ring(0);
}

/// All devices share this process's address space.
#[test]
fn a_client_cannot_take_all_of_the_address_space() {
    let mut client = fresh();
    client.agree();
    client.ram = sealed(1 << 46);
    let mut at = 0;
    for shift in (12..=46).rev() {
        for _ in 0..2 {
            if client.map(at, 1 << shift, 0, 3).errno == 0 {
                at += 1 << shift;
            }
        }
    }
    let mut room = Vec::<u8>::new();
    assert!(room.try_reserve_exact(1 << 32).is_ok(), "{at:#x} are taken");
}

#[test]
fn ranges_are_counted() {
    let mut client = fresh();
    client.agree();
    for at in 0..1024 {
        assert_eq!(client.map(at << 20, 4096, 0, 3).errno, 0);
    }
    assert_eq!(client.map(1 << 40, 4096, 0, 3).errno, 28, "ENOSPC");
    assert_eq!(client.unmap(0, 0, 2).errno, 0, "all of them");
    assert_eq!(client.map(1 << 40, 4096, 0, 3).errno, 0);
}

#[test]
fn one_unmap_takes_several_ranges() {
    let mut client = fresh();
    client.agree();
    for at in [0u64, 0x1000, 0x3000] {
        assert_eq!(client.map(at, 4096, 0, 3).errno, 0);
    }
    let reply = client.unmap(0, 0x3000, 0);
    assert_eq!(reply.errno, 0);
    assert_eq!(reply.body, [words(&[24, 0]), longs(&[0, 0x3000])].concat());
    assert_eq!(client.map(0, 0x3000, 0, 3).errno, 0);
    assert_eq!(client.map(0x3000, 4096, 0, 3).errno, 17, "the third stands");
}

/// A disk's queue in memory that the client unshares, shares again, and makes read-only.
#[test]
fn a_queue_without_memory_breaks_and_recovers_by_reset() {
    for (how, flags) in [
        ("gone", None),
        ("read-only", Some(1)),
        ("unreadable", Some(2)),
    ] {
        let mut client = ready();
        client.begin(0);
        assert_eq!(client.unmap(0, RAM_BYTES, 0).errno, 0);
        if let Some(flags) = flags {
            assert_eq!(client.map(0, RAM_BYTES, 0, flags).errno, 0);
        }
        client.ring(0);
        assert_eq!(client.register(0x14, 1) & 64, 64, "{how}: needs a reset");
        assert_eq!(client.counters.broken_queues.get(), 1, "{how}");
        // The device stays broken until a reset.
        client.ring(0);
        assert_eq!(client.counters.broken_queues.get(), 1, "{how}");
        client.unmap(0, 0, 2);
        client.share_memory();
        client.begin(0);
        assert_eq!(client.register(0x14, 1), 15, "{how}: again");
    }
}

#[test]
fn a_range_without_a_file_is_known_and_out_of_reach() {
    let mut client = fresh();
    client.agree();
    let body = [words(&[32, 1]), longs(&[0, 0, RAM_BYTES])].concat();
    assert_eq!(client.send(DMA_MAP, &body).errno, 0);
    assert_eq!(client.map(0, 4096, 0, 3).errno, 17);
    client.begin(0);
    client.ring(0);
    assert_eq!(client.counters.broken_queues.get(), 1);
    assert_eq!(client.unmap(0, RAM_BYTES, 0).errno, 0);
}

/// Memory that a stuck process keeps while `stuck` is set.
#[derive(Default)]
pub(crate) struct StuckMemory {
    pub(crate) direct: Direct,
    pub(crate) stuck: Arc<AtomicBool>,
    /// Set when the server has found the process dead.
    pub(crate) completed: Arc<AtomicBool>,
}

impl Dma for StuckMemory {
    type View<'a> = <Direct as Dma>::View<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&Self::View<'_>) -> R) -> R {
        self.direct.with(access)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        self.direct.set_memory(memory)?;
        let stuck = self.stuck.load(Ordering::Relaxed);
        if stuck { Err(MemoryInUse) } else { Ok(()) }
    }

    fn complete_set_memory(&mut self) -> Result<(), MemoryInUse> {
        if self.stuck.load(Ordering::Relaxed) {
            return Err(MemoryInUse);
        }
        self.completed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns a client with version negotiation whose memory a stuck process keeps while the returned
/// flag is set.
fn with_stuck_memory() -> (Client<Blk, StuckMemory>, Arc<AtomicBool>) {
    let counters = Arc::new(DeviceCounters::default());
    let disk = Blk::new(disk_file(), false, Arc::clone(&counters)).unwrap();
    let memory = StuckMemory::default();
    let stuck = Arc::clone(&memory.stuck);
    let mut client = Client::new(disk, memory, false, counters);
    client.agree();
    (client, stuck)
}

/// The client receives no success reply before the process has exited. Until then it can repeat the
/// request, and can map nothing else there.
#[test]
fn an_unmap_that_a_stuck_process_prevents() {
    const HALF: u64 = RAM_BYTES / 2;
    let (mut client, stuck) = with_stuck_memory();
    assert_eq!(client.map(0, HALF, 0, 3).errno, 0);
    stuck.store(true, Ordering::Relaxed);
    assert_eq!(client.map(HALF, HALF, HALF, 3).errno, 0, "takes nothing");
    for _ in 0..2 {
        assert_eq!(client.unmap(0, HALF, 0).errno, errno::EBUSY);
        assert_eq!(client.map(0, HALF, 0, 3).errno, errno::EEXIST);
    }
    stuck.store(false, Ordering::Relaxed);
    assert_eq!(client.unmap(0, HALF, 0).errno, 0);
    assert_eq!(client.map(0, HALF, 0, 3).errno, 0);
    stuck.store(true, Ordering::Relaxed);
    assert_eq!(client.unmap(0, 0, 2).errno, errno::EBUSY, "all ranges");
    assert_eq!(client.map(HALF, HALF, HALF, 3).errno, errno::EEXIST);
    stuck.store(false, Ordering::Relaxed);
    assert_eq!(client.unmap(0, 0, 2).errno, 0);
    assert_eq!(client.map(HALF, HALF, HALF, 3).errno, 0);
}

/// A client that does not repeat a refused unmap can map the range again once the process has
/// exited. A client that repeats it receives a success, once.
#[test]
fn a_refused_unmap_completes_when_the_process_has_exited() {
    const HALF: u64 = RAM_BYTES / 2;
    let (mut client, stuck) = with_stuck_memory();
    assert_eq!(client.map(0, HALF, 0, 3).errno, 0);
    stuck.store(true, Ordering::Relaxed);
    assert_eq!(client.unmap(0, HALF, 0).errno, errno::EBUSY);
    assert_eq!(client.map(4096, 4096, 0, 3).errno, errno::EEXIST);
    stuck.store(false, Ordering::Relaxed);
    // Another range, whose map looks at the process, and then part of the range itself.
    assert_eq!(client.map(HALF, HALF, HALF, 3).errno, 0);
    assert_eq!(client.unmap(0, HALF, 0).errno, 0, "the repeated request");
    assert_eq!(client.unmap(0, HALF, 0).errno, errno::ENOENT);

    assert_eq!(client.map(0, HALF, 0, 3).errno, 0);
    stuck.store(true, Ordering::Relaxed);
    assert_eq!(client.unmap(0, HALF, 0).errno, errno::EBUSY);
    stuck.store(false, Ordering::Relaxed);
    assert_eq!(client.map(4096, 4096, 0, 3).errno, 0, "part of the range");
    assert_eq!(client.unmap(0, 4096, 0).errno, errno::ENOENT);
    assert_eq!(client.unmap(4096, 4096, 0).errno, 0);
}

/// Ranges whose refused unmap has completed count neither as mapped nor for the limit.
#[test]
fn completed_unmaps_leave_room_for_as_many_ranges() {
    let (mut client, stuck) = with_stuck_memory();
    let most = ringfence_live::MAX_RANGES as u64;
    let range = |at: u64| (at * 4096, 4096);
    for first in [0, most, 2 * most] {
        for at in first..first + most {
            let body = [words(&[32, 0]), longs(&[0, range(at).0, range(at).1])].concat();
            assert_eq!(client.send(DMA_MAP, &body).errno, 0, "range {at}");
        }
        let body = [words(&[32, 0]), longs(&[0, 1 << 40, 4096])].concat();
        assert_eq!(client.send(DMA_MAP, &body).errno, errno::ENOSPC);
        stuck.store(true, Ordering::Relaxed);
        let all = (range(first).0, most * 4096);
        assert_eq!(client.unmap(all.0, all.1, 0).errno, errno::EBUSY);
        assert_eq!(client.send(DMA_MAP, &body).errno, errno::ENOSPC);
        stuck.store(false, Ordering::Relaxed);
        if first == most {
            // The full table has forgotten the completed unmaps.
            assert_eq!(client.unmap(0, most * 4096, 0).errno, errno::ENOENT);
        }
    }
}
