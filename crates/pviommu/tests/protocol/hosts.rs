//! Hosts that violate the protocol, and the frontend's reaction.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::MapRequest;
use ringfence_pviommu::frontend::{
    Channel, ChannelFailure, ChannelOptions, Queue, QueueFull, RemoteTable, RequestId,
    SharedChannel, UnmapCompletions, Used,
};
use ringfence_pviommu::wire::Status;
use ringfence_types::{
    Access, Direction, Iova, Nanos, Permissions, Pfn, PfnRange, PhysAddr, PhysRange,
};

use crate::guest::{MAX_EMPTY_POLLS, buffer, guest};
use crate::machine::{Machine, SPACE, Table};
use crate::rig::{DISK, MEMORY, NIC, PAGE, WINDOW};

/// A host's manipulation of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trick {
    /// Answers after this many polls.
    Late(u32),
    Never,
    Twice,
    /// Answers a request that was never made.
    Foreign,
    /// Answers after the next request's answer.
    Swapped,
    /// Answers with this status, whatever it did.
    Says(u8),
}

/// A queue that manipulates the n-th answer.
pub(crate) struct Host<Q> {
    pub(crate) honest: Q,
    trick: Option<(u64, Trick)>,
    answers: u64,
    held: VecDeque<(u32, Used)>,
}

impl<Q: Queue> Host<Q> {
    pub(crate) fn new(honest: Q, trick: Option<(u64, Trick)>) -> Self {
        Self {
            honest,
            trick,
            answers: 0,
            held: VecDeque::new(),
        }
    }
}

impl<Q: Queue> Queue for Host<Q> {
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull> {
        self.honest.add(request)
    }

    fn kick(&mut self) {
        self.honest.kick();
    }

    fn poll(&mut self) -> Option<Used> {
        if let Some((polls, used)) = self.held.front_mut() {
            if *polls > 0 {
                *polls -= 1;
                return None;
            }
            let used = *used;
            self.held.pop_front();
            return Some(used);
        }
        let used = self.honest.poll()?;
        let number = self.answers;
        self.answers += 1;
        let Some((_, trick)) = self.trick.filter(|(nth, _)| *nth == number) else {
            return Some(used);
        };
        match trick {
            Trick::Late(polls) => {
                self.held.push_back((polls, used));
                None
            }
            Trick::Never => {
                self.held.push_back((u32::MAX, used));
                None
            }
            Trick::Twice => {
                self.held.push_back((0, used));
                Some(used)
            }
            Trick::Foreign => Some(Used {
                id: RequestId(used.id.0.wrapping_add(1000)),
                ..used
            }),
            Trick::Swapped => {
                let next = self.honest.poll();
                self.held.push_back((0, used));
                next.or_else(|| self.held.pop_front().map(|(_, used)| used))
            }
            Trick::Says(status) => Some(Used { status, ..used }),
        }
    }
}

/// Maps and unmaps a buffer with a host that manipulates the first answer (the map's) or the
/// second.
#[test]
fn a_host_that_breaks_the_rules_is_found_out() {
    let first = RequestId(0);
    for (nth, trick, broken) in [
        (0, Trick::Late(20), None),
        (1, Trick::Late(20), None),
        (0, Trick::Never, Some(ChannelFailure::Silent)),
        (1, Trick::Never, Some(ChannelFailure::Silent)),
        (
            0,
            Trick::Late(MAX_EMPTY_POLLS as u32 + 20),
            Some(ChannelFailure::Silent),
        ),
        (0, Trick::Twice, Some(ChannelFailure::UnknownReply(first))),
        (
            1,
            Trick::Twice,
            Some(ChannelFailure::UnknownReply(RequestId(1))),
        ),
        (
            0,
            Trick::Foreign,
            Some(ChannelFailure::UnknownReply(RequestId(1000))),
        ),
        (
            1,
            Trick::Foreign,
            Some(ChannelFailure::UnknownReply(RequestId(1001))),
        ),
        (0, Trick::Says(7), None),
        (0, Trick::Says(0xff), None),
        (
            1,
            Trick::Says(8),
            Some(ChannelFailure::UnmapRefused(Status::Failed)),
        ),
        (
            1,
            Trick::Says(6),
            Some(ChannelFailure::UnmapRefused(Status::NotMapped)),
        ),
        (
            1,
            Trick::Says(0x80),
            Some(ChannelFailure::UnmapRefused(Status::Failed)),
        ),
    ] {
        let what = format!("answer {nth}: {trick:?}");
        let mut guest = guest(Some((nth, trick)));
        let mut cpu = guest.dma.cpu();
        let memory = buffer(MEMORY, 2 * PAGE);
        let direction = Direction::ToDevice;
        let mapped = guest.dma.map_single(
            &mut cpu,
            &mut guest.machine,
            &guest.at,
            0,
            memory,
            direction,
        );
        let refused = nth == 0 && !matches!(trick, Trick::Late(20) | Trick::Twice);
        if refused {
            assert!(mapped.is_err(), "{what}");
        }
        let mut taken = Vec::new();
        if let Ok((mapping, _)) = mapped {
            let iova = mapping.iova().get();
            let unmapped = guest
                .dma
                .unmap_single(&mut cpu, &mut guest.machine, &guest.at, mapping);
            let confirmed = broken.is_none() || matches!((nth, trick), (1, Trick::Twice));
            assert_eq!(unmapped.is_ok(), confirmed, "{what}");
            if !confirmed {
                taken = vec![iova, iova + PAGE];
            }
        }
        guest.link.with(Channel::poll);
        assert_eq!(guest.broken(), broken, "{what}");
        // Addresses that the device may still access are never reused.
        let left = guest.left();
        for iova in &taken {
            assert!(!left.contains(iova), "{what}: {iova:#x}");
        }
        let may_be_mapped: Vec<u64> = (0..SPACE)
            .map(|page| WINDOW + page * PAGE)
            .filter(|iova| guest.reach(*iova, Access::Read).is_some())
            .collect();
        for iova in may_be_mapped {
            assert!(
                !left.contains(&iova) || matches!(trick, Trick::Says(_)) && nth == 0,
                "{what}: {iova:#x} is mapped and free"
            );
        }
        if broken.is_some() {
            let again = guest.dma.map_single(
                &mut cpu,
                &mut guest.machine,
                &guest.at,
                0,
                memory,
                direction,
            );
            assert!(again.is_err(), "{what}");
        }
    }
}

/// Answers of a list in another order than its requests break the channel.
#[test]
fn answers_out_of_order_break_the_channel() {
    let mut guest = guest(Some((1, Trick::Swapped)));
    let mut cpu = guest.dma.cpu();
    let pieces: Vec<PhysRange> = (0..4)
        .map(|n| buffer(MEMORY + n * 2 * PAGE, PAGE))
        .collect();
    let refused = guest.map_list(&mut cpu, &pieces, Direction::ToDevice);
    assert!(refused.is_err());
    assert_eq!(
        guest.broken(),
        Some(ChannelFailure::UnknownReply(RequestId(2)))
    );
}

/// The frontend counts patience per request, and only while one is in flight.
#[test]
fn silence_is_counted_for_each_answer_alone() {
    let guest = guest(Some((0, Trick::Late(MAX_EMPTY_POLLS as u32 - 10))));
    for _ in 0..3 * MAX_EMPTY_POLLS {
        guest.link.with(Channel::poll);
    }
    assert_eq!(guest.broken(), None, "nobody waits");
    let mut machine = guest.machine;
    let table: Table<_> = RemoteTable::new(Rc::clone(&guest.link), NIC, guest.at.domain());
    for page in 0..4 {
        guest.link.with(|channel| {
            let host = channel.queue();
            host.trick = Some((host.answers, Trick::Late(MAX_EMPTY_POLLS as u32 - 10)));
        });
        let mapped = table.map(&mut table.per_cpu(), &mut machine, request(page, 0));
        assert!(mapped.is_ok(), "{page}");
    }
}

fn request(page: u64, pa: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(WINDOW + page * PAGE),
        pa: PhysAddr::new(pa),
        pages: 1,
        permissions: Permissions::READ,
    }
}

/// Devices share a channel and use the same addresses. A late refusal for one device does not
/// affect the other.
#[test]
fn a_late_refusal_is_one_devices() {
    let guest = guest(None);
    let mut machine = guest.machine;
    let domain = guest.at.domain();
    let [nic_table, disk_table] = [NIC, DISK]
        .map(|device| -> Table<_> { RemoteTable::new(Rc::clone(&guest.link), device, domain) });
    let range = PfnRange::new(Pfn::containing(Iova::new(WINDOW)), 1).unwrap();
    let mut cpu = nic_table.per_cpu();
    assert!(
        nic_table
            .map(&mut cpu, &mut machine, request(0, MEMORY))
            .is_ok()
    );
    // Outside the memory of this machine.
    let mut disk_cpu = disk_table.per_cpu();
    let queued = disk_table.map_nosync(&mut disk_cpu, &mut machine, request(0, 512 << 20));
    assert!(queued.is_ok());
    disk_table.sync(&mut disk_cpu, &mut machine);
    assert!(disk_table.iotlb_sync_map(&mut machine, range).is_err());
    assert!(nic_table.iotlb_sync_map(&mut machine, range).is_ok());
    assert!(nic_table.unmap(&mut cpu, &mut machine, range).is_ok());
    guest.link.with(|channel| {
        channel.kick();
        channel.poll();
    });
    let mapped = |device| {
        guest
            .link
            .with(|channel| channel.queue().honest.backend().mapped_pages(device))
    };
    assert_eq!((mapped(NIC), mapped(DISK)), (0, 0));
    assert!(nic_table.is_empty(&machine));
    // The refused range still belongs to the other device until it unmaps it, which sends no
    // request.
    assert!(disk_table.unmap(&mut disk_cpu, &mut machine, range).is_ok());
    assert!(disk_table.iotlb_sync_map(&mut machine, range).is_ok());
    assert_eq!(guest.link.with(|channel| channel.failure()), None);
}

/// A host that falls silent may have mapped the pages: the table is not empty. One that refuses the
/// map has not.
#[test]
fn pages_that_the_host_may_have_mapped_are_counted() {
    let says = |status: Status| Trick::Says(status as u8);
    for (trick, empty) in [
        (Trick::Never, false),
        (Trick::Foreign, false),
        (says(Status::NoRoom), true),
    ] {
        let guest = guest(Some((0, trick)));
        let mut machine = guest.machine;
        let table: Table<_> = RemoteTable::new(Rc::clone(&guest.link), NIC, guest.at.domain());
        let mut cpu = table.per_cpu();
        let mapped = table.map(&mut cpu, &mut machine, request(0, MEMORY));
        assert!(mapped.is_err(), "{trick:?}");
        assert_eq!(table.is_empty(&machine), empty, "{trick:?}");
        // The same map as a part of a list, whose answer is awaited later.
        let mapped = table.map_nosync(&mut cpu, &mut machine, request(1, MEMORY));
        table.sync(&mut cpu, &mut machine);
        assert_eq!(mapped.is_ok(), empty, "{trick:?}");
    }
}

/// A full queue drains by polling; a queue that stays full breaks the channel.
#[test]
fn a_full_queue_is_waited_for() {
    let mut guest = guest(None);
    let mut cpu = guest.dma.cpu();
    // 80 requests through 64 chains.
    let pieces: Vec<PhysRange> = (0..80)
        .map(|n| buffer(MEMORY + n * 2 * PAGE, PAGE))
        .collect();
    let mapped = guest.map_list(&mut cpu, &pieces, Direction::ToDevice);
    assert_eq!((mapped.is_ok(), guest.live()), (true, 80));

    struct Full;
    impl Queue for Full {
        fn add(&mut self, _: &[u8]) -> Result<RequestId, QueueFull> {
            Err(QueueFull)
        }
        fn kick(&mut self) {}
        fn poll(&mut self) -> Option<Used> {
            None
        }
    }
    let options = ChannelOptions {
        pages_max: 16,
        max_empty_polls: MAX_EMPTY_POLLS,
    };
    let link = Rc::new(SharedChannel::new(
        Channel::new(Full, options),
        RefCell::new,
    ));
    let table: Table<Full> = RemoteTable::new(Rc::clone(&link), NIC, guest.at.domain());
    let mut machine = Machine {
        memory: Arc::clone(&guest.machine.memory),
        frames: guest.machine.frames.clone(),
        answers: UnmapCompletions::new(Rc::clone(&link)),
        now: Nanos(0),
    };
    let refused = table.map(&mut table.per_cpu(), &mut machine, request(0, 0));
    assert!(refused.is_err());
    assert_eq!(
        link.with(|channel| channel.failure()),
        Some(ChannelFailure::Full)
    );
    assert!(table.is_empty(&machine));
}
