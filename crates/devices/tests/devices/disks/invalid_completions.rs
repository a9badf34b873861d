//! Invalid completions that a driver reads, and commands that a controller reads but no driver
//! wrote.

use ringfence_devices::api::DmaApi;
use ringfence_devices::block::ahci::AhciRegisters;
use ringfence_devices::block::nvme::{NvmeCommand, NvmeCompletion, NvmeStatus, Opcode};
use ringfence_devices::block::{
    BlockError, CompletedIo, DiskRequest, Operation, PAGE_BYTES, RamDisk,
};
use ringfence_devices::nic::Environment;
use ringfence_devices::ring::{CompletionFault, MalformedCompletion};
use ringfence_devices::{Pool, Transfer};
use ringfence_types::Iova;

use super::super::rig::{self, OracleChecked};
use super::{Ahci, Disk, Nvme, QUEUE};

#[test]
fn sizes_are_checked_before_anything_is_mapped() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(4 << 20), PAGE_BYTES).unwrap();
    let mut nvme = Nvme::open(&mut env, 4, 1);
    for (bytes, pages) in [
        (0, 0),
        (0, 1),
        (511, 1),
        (513, 1),
        (512, 0),
        (512, 2),
        (4608, 1),
        (514 * 4096, 514),
    ] {
        let buffers = (0..pages).map(|_| pool.alloc().unwrap()).collect();
        let io = DiskRequest {
            operation: Operation::Write,
            block: 0,
            bytes,
            buffers,
        };
        let rejected = nvme.queue.submit(&mut env.api(), io).unwrap_err();
        assert_eq!(rejected.error, BlockError::Size { bytes, pages });
        for buffer in rejected.buffers {
            pool.free(buffer).unwrap();
        }
    }
    assert_eq!((pool.in_use(), env.judge().maps), (0, 0));
    Disk::close(nvme, &mut env, |_| {});
}

#[test]
fn failing_disk_reports_errors() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(8);
    let mut nvme = Nvme::open(&mut env, 4, 1);
    let mut ahci = Ahci::open(&mut env, 1);
    let mut io = || DiskRequest {
        operation: Operation::Read,
        block: 8,
        bytes: 512,
        buffers: vec![pool.alloc().unwrap()],
    };
    Disk::submit(&mut nvme, &mut env, io()).unwrap();
    Disk::submit(&mut ahci, &mut env, io()).unwrap();
    let done = [
        nvme.work(&mut env, &mut disk),
        ahci.work(&mut env, &mut disk),
    ];
    for done in done {
        assert_eq!(done.len(), 1);
        assert!(!done[0].succeeded);
        assert_eq!(done[0].buffers.len(), 1);
    }
    let fis = {
        let api = env.api();
        ahci.driver.set_device_bits(api.memory()).unwrap()
    };
    assert_eq!(fis, [0xa1, 0x40, 0x41, 0, 1, 0, 0, 0]);
    Disk::close(nvme, &mut env, |_| {});
    Disk::close(ahci, &mut env, |_| {});
}

#[test]
fn invalid_completions_of_a_controller_have_their_errors() {
    let done = |queue, id| NvmeCompletion {
        result: 0,
        head: 0xffff,
        queue,
        id,
        status: 0,
    };
    let found = |id| CompletionFault::NotOutstanding { command: id };
    for (lie, kind) in [
        (done(QUEUE + 1, 0), CompletionFault::Queue(QUEUE + 1)),
        (done(QUEUE, 1), found(1)),
        (done(QUEUE, 0xffff), found(0xffff)),
    ] {
        let mut env = rig::strict();
        let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
        let mut nvme = Nvme::open(&mut env, 4, 1);
        let io = DiskRequest {
            operation: Operation::Write,
            block: 0,
            bytes: 512,
            buffers: vec![pool.alloc().unwrap()],
        };
        Disk::submit(&mut nvme, &mut env, io).unwrap();
        let mut raw = lie.encode();
        raw[14] |= 1;
        let at = nvme.queue.addresses().completions.entry(0);
        env.bus().write(rig::NIC, at, &raw).unwrap();
        for _ in 0..2 {
            let result = nvme
                .queue
                .complete(&mut env.api(), 9, |_| panic!("nothing is done"));
            assert!(matches!(
                result,
                Err(BlockError::Device(MalformedCompletion { kind: k, .. })) if k == kind
            ));
        }
        all_back(nvme, &mut env, &mut pool, 1);
    }
}

/// The other slots of the registers are handled first.
#[test]
fn an_active_bit_of_an_empty_slot_is_invalid() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut ahci = Ahci::open(&mut env, 1);
    let io = DiskRequest {
        operation: Operation::Read,
        block: 0,
        bytes: 512,
        buffers: vec![pool.alloc().unwrap()],
    };
    assert_eq!(Disk::submit(&mut ahci, &mut env, io).unwrap(), 0);
    let registers = AhciRegisters {
        active: 1 << 31,
        failed: 0,
    };
    let mut done = Vec::new();
    let result = ahci
        .driver
        .complete(&mut env.api(), registers, |io| done.push(io.tag));
    let kind = CompletionFault::NotOutstanding { command: 31 };
    assert!(matches!(
        result,
        Err(BlockError::Device(MalformedCompletion { kind: k, .. })) if k == kind
    ));
    assert_eq!(done, [0]);
    Disk::close(ahci, &mut env, |_| panic!("nothing was outstanding"));
}

/// A driver that issues several slots with one write of the registers may poll before that.
#[test]
fn a_slot_completes_only_after_it_was_issued() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut ahci = Ahci::open(&mut env, 1);
    let mut disk = RamDisk::new(8);
    let mut io = || DiskRequest {
        operation: Operation::Read,
        block: 0,
        bytes: 512,
        buffers: vec![pool.alloc().unwrap()],
    };
    let tags = |done: Vec<CompletedIo>| done.iter().map(|io| io.tag).collect::<Vec<_>>();
    Disk::submit(&mut ahci, &mut env, io()).unwrap();
    assert_eq!(ahci.driver.submit(&mut env.api(), io()).unwrap(), 1);
    assert_eq!(tags(ahci.work(&mut env, &mut disk)), [0]);
    assert_eq!(tags(ahci.work(&mut env, &mut disk)), []);
    assert_eq!(ahci.driver.outstanding(), 1 << 1);
    let slots = ahci.driver.sync_map(&mut env.api());
    ahci.port.issue(slots);
    assert_eq!(tags(ahci.work(&mut env, &mut disk)), [1]);
    // The end of the port returns the buffers of a slot that was never issued.
    ahci.driver.submit(&mut env.api(), io()).unwrap();
    let mut back = 0;
    Disk::close(ahci, &mut env, |_| back += 1);
    assert_eq!(back, 1);
}

/// A controller executes whatever is in memory, even if its driver did not write it.
#[test]
fn malformed_commands_end_with_a_status() {
    let read = NvmeCommand {
        opcode: Opcode::Read as u8,
        id: 0,
        prp1: Iova::new(0x5000),
        prp2: Iova::ZERO,
        block: 0,
        blocks_less_one: 0,
    };
    let cases = [
        (NvmeCommand { opcode: 9, ..read }, NvmeStatus::InvalidOpcode),
        (
            NvmeCommand {
                block: u64::MAX,
                ..read
            },
            NvmeStatus::LbaOutOfRange,
        ),
        (
            NvmeCommand {
                prp1: Iova::new(0x5001),
                ..read
            },
            NvmeStatus::PrpOffsetInvalid,
        ),
        (
            NvmeCommand {
                prp1: Iova::new(0x5ffc),
                prp2: Iova::new(0x6004),
                ..read
            },
            // The first page is not mapped.
            NvmeStatus::DataTransferError,
        ),
        (read, NvmeStatus::DataTransferError),
    ];
    for (command, status) in cases {
        let mut env = rig::strict();
        let nvme = Nvme::open(&mut env, 4, 1);
        let at = nvme.queue.addresses();
        let mut controller = nvme.controller;
        let entry = at.submissions.entry(0);
        env.bus().write(rig::NIC, entry, &command.encode()).unwrap();
        controller.submission_doorbell(1);
        let mut disk = RamDisk::new(64);
        assert_eq!(controller.run(&mut env.bus(), &mut disk), Ok(1));
        let mut raw = [0; 16];
        env.bus()
            .read(rig::NIC, at.completions.entry(0), &mut raw)
            .unwrap();
        assert_eq!(NvmeCompletion::decode(&raw).status, status as u16);
        nvme.queue.close(&mut env.api(), |_| {}).unwrap();
    }
}

/// Closes the queue. `count` buffers, which are all, are returned, and nothing stays mapped.
fn all_back<W: OracleChecked + Environment<Handle = H>, H>(
    nvme: Nvme<H>,
    env: &mut W,
    pool: &mut Pool,
    count: usize,
) {
    let mut back = 0;
    nvme.queue
        .close(&mut env.api(), |buffer| {
            pool.free(buffer).unwrap();
            back += 1;
        })
        .unwrap();
    assert_eq!((back, pool.in_use(), env.judge().live()), (count, 0, 0));
}

/// A read of one block.
fn read(pool: &mut Pool) -> DiskRequest {
    DiskRequest {
        operation: Operation::Read,
        block: 0,
        bytes: 512,
        buffers: vec![pool.alloc().unwrap()],
    }
}

/// Writes a completion of command `id` with a chosen phase into an entry.
fn forge<W: Environment<Handle = H>, H>(
    env: &mut W,
    nvme: &Nvme<H>,
    (entry, phase): (u32, u8),
    id: u16,
) {
    let done = NvmeCompletion {
        result: 0,
        head: 0,
        queue: QUEUE,
        id,
        status: 0,
    };
    let mut raw = done.encode();
    raw[14] = (raw[14] & !1) | phase;
    let at = nvme.queue.addresses().completions.entry(entry);
    env.bus().write(rig::NIC, at, &raw).unwrap();
}

/// A controller, like a real one, does not overwrite entries that the driver has not released.
#[test]
fn a_controller_does_not_overrun_its_completions() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(8);
    let mut nvme = Nvme::open(&mut env, 4, 1);
    let mut done = Vec::new();
    for round in 0..3 {
        for _ in 0..3 {
            Disk::submit(&mut nvme, &mut env, read(&mut pool)).unwrap();
        }
        let tail = nvme.queue.sync_map(&mut env.api());
        nvme.controller.submission_doorbell(tail);
        // The driver has handled the completions, but has not written the doorbell.
        let wanted = if round == 0 { 3 } else { 0 };
        assert_eq!(nvme.controller.run(&mut env.bus(), &mut disk), Ok(wanted));
        if round > 0 {
            let result = nvme
                .queue
                .complete(&mut env.api(), 9, |_| panic!("not done"));
            assert_eq!(result, Ok(0));
            let head = nvme.queue.completion_head();
            nvme.controller.completion_doorbell(head);
            assert_eq!(nvme.controller.run(&mut env.bus(), &mut disk), Ok(3));
        }
        let each = |request| done.push(request);
        assert_eq!(nvme.queue.complete(&mut env.api(), 9, each), Ok(3));
    }
    assert_eq!(done.len(), 9);
    for request in done {
        assert!(request.succeeded);
        request
            .buffers
            .into_iter()
            .for_each(|buffer| pool.free(buffer).unwrap());
    }
    Disk::close(nvme, &mut env, |_| panic!("nothing was outstanding"));
    assert_eq!((pool.in_use(), env.judge().live()), (0, 0));
}

/// A controller overwrites completions that the driver has not read. Only these completions are
/// lost: no command is mistaken for another, and closing returns every buffer.
#[test]
fn a_controller_that_overruns_loses_its_own_completions() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut nvme = Nvme::open(&mut env, 4, 1);
    for _ in 0..3 {
        Disk::submit(&mut nvme, &mut env, read(&mut pool)).unwrap();
    }
    // A lap of four, then the first entry again.
    for (turn, id) in [0, 1, 2, 0, 1].into_iter().enumerate() {
        let (entry, lap) = (turn as u32 % 4, turn / 4);
        forge(&mut env, &nvme, (entry, [1, 0][lap]), id);
    }
    let result = nvme
        .queue
        .complete(&mut env.api(), 9, |_| panic!("not this lap's"));
    assert_eq!(result, Ok(0));
    all_back(nvme, &mut env, &mut pool, 3);
}

/// A completion of the last lap has the other phase. The driver ignores it, whatever its command.
#[test]
fn a_completion_of_the_last_lap_is_not_taken_again() {
    let mut env = rig::strict();
    let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(8);
    let mut nvme = Nvme::open(&mut env, 4, 1);
    for lap in 0..5 {
        let stale = [0, 1][lap % 2];
        for _ in 0..4 {
            Disk::submit(&mut nvme, &mut env, read(&mut pool)).unwrap();
            let entry = nvme.queue.completion_head();
            // The command is outstanding, and the entry refers to it in the old phase.
            forge(&mut env, &nvme, (entry, stale), 0);
            let result = nvme.queue.complete(&mut env.api(), 9, |_| panic!("stale"));
            assert_eq!(result, Ok(0), "lap {lap}, entry {entry}");
            for request in nvme.work(&mut env, &mut disk) {
                assert!(request.succeeded);
                request
                    .buffers
                    .into_iter()
                    .for_each(|buffer| pool.free(buffer).unwrap());
            }
            assert_eq!(nvme.queue.outstanding(), 0);
        }
    }
    // With the current phase the driver reads the entry, but no command is outstanding.
    let entry = nvme.queue.completion_head();
    forge(&mut env, &nvme, (entry, 0), 0);
    let result = nvme
        .queue
        .complete(&mut env.api(), 9, |_| panic!("nothing is done"));
    assert!(matches!(
        result,
        Err(BlockError::Device(MalformedCompletion {
            kind: CompletionFault::NotOutstanding { command: 0 },
            ..
        }))
    ));
    Disk::close(nvme, &mut env, |_| panic!("nothing was outstanding"));
    assert_eq!((pool.in_use(), env.judge().live()), (0, 0));
}
