//! The IOTLB through the C interface.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::ptr;

use ringfence::*;
use support::PAGE;

const USER: u64 = 0x7000_0000_0000;
const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;
const ACCESS_FAIL: u8 = 4;

/// Memory of the front-end: `pages` pages, each filled with its number.
#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; PAGE as usize]);

struct Fixture {
    memory: Vec<Page>,
    iotlb: *mut Iotlb,
    reader: *mut IotlbReader,
}

impl Fixture {
    fn new(pages: u8) -> Self {
        let mut memory: Vec<Page> = (0..pages).map(|n| Page([n; PAGE as usize])).collect();
        let region = region(&mut memory);
        let (mut iotlb, mut reader) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!(
            c!(ringfence_iotlb_create(&region, 1, &mut iotlb)),
            Status::Ok
        );
        let status = c!(ringfence_iotlb_reader_create(iotlb, &mut reader));
        assert_eq!(status, Status::Ok);
        Self {
            memory,
            iotlb,
            reader,
        }
    }

    fn receive(&self, message: [u8; 32]) -> Status {
        c!(ringfence_iotlb_receive(self.iotlb, message.as_ptr()))
    }

    fn read(&self, iova: u64, bytes: usize) -> Result<Vec<u8>, Fault> {
        let mut to = vec![0xee; bytes.max(1)];
        let mut fault = no_fault();
        let pointer = to.as_mut_ptr().cast();
        let status = c!(ringfence_iotlb_read(
            self.reader,
            iova,
            pointer,
            bytes,
            &mut fault
        ));
        if status == Status::Ok {
            return Ok(to);
        }
        assert_eq!(status, Status::Fault);
        assert!(
            to.iter().all(|byte| *byte == 0xee),
            "a fault copies nothing"
        );
        Err(fault)
    }

    fn write(&self, iova: u64, from: &[u8]) -> Status {
        let (pointer, bytes) = (from.as_ptr().cast(), from.len());
        let none = ptr::null_mut();
        c!(ringfence_iotlb_write(
            self.reader,
            iova,
            pointer,
            bytes,
            none
        ))
    }

    fn miss(&self, fault: Fault) -> (Status, IotlbMiss) {
        let mut miss = IotlbMiss {
            token: 0,
            action: 9,
            reserved: 0,
            message: [0; 32],
        };
        (
            c!(ringfence_iotlb_miss(self.iotlb, &fault, &mut miss)),
            miss,
        )
    }

    fn replied(&self, token: u64, accepted: bool) -> (Status, u32) {
        let mut result = 9;
        let status = c!(ringfence_iotlb_replied(
            self.iotlb,
            token,
            accepted,
            &mut result
        ));
        (status, result)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        c!(ringfence_iotlb_reader_destroy(&mut self.reader));
        c!(ringfence_iotlb_destroy(&mut self.iotlb));
    }
}

fn region(memory: &mut [Page]) -> IotlbRegion {
    IotlbRegion {
        user: USER,
        bytes: memory.len() as u64 * PAGE,
        host: memory.as_mut_ptr().cast(),
    }
}

fn no_fault() -> Fault {
    Fault {
        iova: 0,
        access: 0,
        kind: 99,
    }
}

fn message(kind: u8, iova: u64, bytes: u64, user: u64, permissions: u8) -> [u8; 32] {
    let mut message = [0; 32];
    for (at, word) in [iova, bytes, user].into_iter().enumerate() {
        message[at * 8..][..8].copy_from_slice(&word.to_ne_bytes());
    }
    message[24] = permissions;
    message[25] = kind;
    message
}

#[test]
fn accesses_need_a_translation_with_their_permission() {
    let fixture = Fixture::new(4);
    assert_eq!(
        fixture.receive(message(UPDATE, 0x8000, PAGE, USER, 1)),
        Status::Ok
    );
    let second = message(UPDATE, 0x9000, PAGE, USER + 3 * PAGE, 3);
    assert_eq!(fixture.receive(second), Status::Ok);
    // Across two pages that are not adjacent in memory.
    let read = fixture.read(0x8ffe, 4).unwrap();
    assert_eq!(read, [0, 0, 3, 3]);
    assert_eq!(fixture.write(0x9001, &[7, 8]), Status::Ok);
    assert_eq!(fixture.memory[3].0[..4], [3, 7, 8, 3]);
    // Both pages, of which the first permits no write: no byte is written.
    assert_eq!(fixture.write(0x8fff, &[9, 9]), Status::Fault);
    assert_eq!((fixture.memory[0].0[4095], fixture.memory[3].0[0]), (0, 3));
    for (iova, bytes, access, expected) in [
        (0x8000, PAGE, RINGFENCE_READ, Ok(())),
        (0x8000, 2 * PAGE, RINGFENCE_READ, Ok(())),
        (
            0x8000,
            2 * PAGE,
            RINGFENCE_WRITE,
            Err((FaultKind::WriteDenied, 0x8000)),
        ),
        (
            0x8000,
            3 * PAGE,
            RINGFENCE_READ,
            Err((FaultKind::NotPresent, 0xa000)),
        ),
        (
            1 << 48,
            1,
            RINGFENCE_READ,
            Err((FaultKind::BeyondWidth, 1 << 48)),
        ),
        (
            0x8000,
            0,
            RINGFENCE_READ,
            Err((FaultKind::BadLength, 0x8000)),
        ),
        (
            u64::MAX,
            2,
            RINGFENCE_READ,
            Err((FaultKind::BadLength, u64::MAX)),
        ),
    ] {
        let mut fault = no_fault();
        let reader = fixture.reader;
        let status = c!(ringfence_iotlb_check(
            reader, iova, bytes, access, &mut fault
        ));
        match expected {
            Ok(()) => assert_eq!(status, Status::Ok),
            Err((kind, at)) => {
                assert_eq!(status, Status::Fault);
                let found = (fault.kind, fault.iova, fault.access);
                assert_eq!(found, (kind as u32, at, access));
            }
        }
    }
    for access in [0, 3, 4, u32::MAX] {
        let none = ptr::null_mut();
        let status = c!(ringfence_iotlb_check(
            fixture.reader,
            0x8000,
            1,
            access,
            none
        ));
        assert_eq!(status, Status::InvalidArgument);
    }
}

#[test]
fn a_miss_asks_once_and_ends_with_its_reply() {
    let fixture = Fixture::new(2);
    let fault = fixture.read(0x8010, 4).unwrap_err();
    let (status, miss) = fixture.miss(fault);
    assert_eq!((status, miss.action), (Status::Ok, MissKind::Send as u32));
    assert_eq!(miss.message, message(MISS, 0x8010, 0, 0, 1));
    let (_, again) = fixture.miss(fault);
    assert_eq!(
        (again.token, again.action),
        (miss.token, MissKind::Wait as u32)
    );
    assert_eq!(
        fixture.receive(message(UPDATE, 0x8000, PAGE, USER + PAGE, 3)),
        Status::Ok
    );
    let (_, present) = fixture.miss(fault);
    assert_eq!(
        (present.token, present.action),
        (0, MissKind::Present as u32)
    );
    let replied = fixture.replied(miss.token, true);
    assert_eq!(replied, (Status::Ok, MissResult::Present as u32));
    assert_eq!(fixture.replied(miss.token, true), (Status::StaleToken, 9));
    assert_eq!(fixture.read(0x8010, 4).unwrap(), [1; 4]);
    // A refused miss, and one whose answer is invalidated.
    let fault = fixture.read(0x10_0000, 1).unwrap_err();
    let (_, miss) = fixture.miss(fault);
    let replied = fixture.replied(miss.token, false);
    assert_eq!(replied, (Status::Ok, MissResult::Refused as u32));
    let (_, miss) = fixture.miss(fault);
    assert_eq!(
        fixture.receive(message(UPDATE, 0x10_0000, PAGE, USER, 1)),
        Status::Ok
    );
    assert_eq!(
        fixture.receive(message(INVALIDATE, 0x10_0000, PAGE, 0, 0)),
        Status::Ok
    );
    let replied = fixture.replied(miss.token, true);
    assert_eq!(replied, (Status::Ok, MissResult::Invalidated as u32));
    for (fault, expected) in [
        (Fault { kind: 3, ..fault }, Status::NotAMiss),
        (Fault { kind: 5, ..fault }, Status::NotAMiss),
        (Fault { kind: 6, ..fault }, Status::InvalidArgument),
        (Fault { access: 0, ..fault }, Status::InvalidArgument),
        (Fault { access: 3, ..fault }, Status::InvalidArgument),
    ] {
        assert_eq!(fixture.miss(fault).0, expected);
    }
    for page in 0..64 {
        let iova = 0x20_0000 + page * PAGE;
        assert_eq!(fixture.miss(Fault { iova, ..fault }).0, Status::Ok);
    }
    let iova = 0x30_0000;
    assert_eq!(fixture.miss(Fault { iova, ..fault }).0, Status::TooMany);
}

#[test]
fn messages_that_the_cache_rejects() {
    let fixture = Fixture::new(2);
    for (message, expected) in [
        (message(0, 0, PAGE, USER, 3), Status::BadMessage),
        (message(5, 0, PAGE, USER, 3), Status::BadMessage),
        (message(MISS, 0, PAGE, USER, 3), Status::BadMessage),
        (message(ACCESS_FAIL, 0, PAGE, USER, 3), Status::BadMessage),
        (message(UPDATE, 0, 0, USER, 3), Status::BadMessage),
        (message(UPDATE, 0, PAGE, USER, 0), Status::BadMessage),
        (message(UPDATE, u64::MAX, PAGE, USER, 3), Status::BadMessage),
        (message(UPDATE, 0, 3 * PAGE, USER, 3), Status::NotShared),
        (message(UPDATE, 0, PAGE, USER - PAGE, 3), Status::NotShared),
        (message(UPDATE, 8, PAGE, USER, 3), Status::Misaligned),
        (message(UPDATE, 1 << 48, PAGE, USER, 3), Status::BeyondWidth),
    ] {
        assert_eq!(fixture.receive(message), expected, "{message:?}");
    }
    assert!(fixture.read(0, 1).is_err());
}

#[test]
fn old_memory_is_out_of_reach_after_a_change_and_a_destroy() {
    let mut fixture = Fixture::new(2);
    let update = message(UPDATE, 0x8000, PAGE, USER, 3);
    assert_eq!(fixture.receive(update), Status::Ok);
    let mut other = vec![Page([9; PAGE as usize]); 1];
    let shared = [region(&mut other)];
    let status = c!(ringfence_iotlb_set_regions(
        fixture.iotlb,
        shared.as_ptr(),
        1
    ));
    assert_eq!(status, Status::Ok);
    assert_eq!(
        fixture.read(0x8000, 1).unwrap_err().kind,
        FaultKind::NotPresent as u32
    );
    assert_eq!(fixture.receive(update), Status::Ok);
    assert_eq!(fixture.read(0x8000, 1).unwrap(), [9]);
    // An overlap is rejected, and the regions stay.
    let twice = [shared[0], shared[0]];
    let status = c!(ringfence_iotlb_set_regions(
        fixture.iotlb,
        twice.as_ptr(),
        2
    ));
    assert_eq!(status, Status::InvalidArgument);
    assert_eq!(fixture.read(0x8000, 1).unwrap(), [9]);
    let mut readers = Vec::new();
    loop {
        let mut reader = ptr::null_mut();
        match c!(ringfence_iotlb_reader_create(fixture.iotlb, &mut reader)) {
            Status::Ok => readers.push(reader),
            status => break assert_eq!(status, Status::TooMany),
        }
    }
    assert_eq!(readers.len(), 31);
    // Readers outlive the IOTLB, without access.
    assert_eq!(c!(ringfence_iotlb_destroy(&mut fixture.iotlb)), Status::Ok);
    assert_eq!(
        fixture.read(0x8000, 1).unwrap_err().kind,
        FaultKind::Blocked as u32
    );
    for mut reader in readers {
        assert_eq!(c!(ringfence_iotlb_reader_destroy(&mut reader)), Status::Ok);
    }
}
