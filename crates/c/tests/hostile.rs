//! Misuse: each call returns its status and changes nothing.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::ptr;

use ringfence::*;
use support::{Machine, NIC, PAGE, options};

#[test]
fn null_is_reported() {
    let machine = Machine::new();
    let dma = machine.layer(DmaPolicy::Strict);
    let (ports, settings, memory) = (
        machine.ports(),
        options(DmaPolicy::Strict),
        machine.memory_port(),
    );
    let (mut space, mut cpu) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(
        c!(ringfence_iova_create(0, 1, 9, 0, &mut space)),
        Status::Ok
    );
    assert_eq!(c!(ringfence_iova_cpu_create(space, &mut cpu)), Status::Ok);
    let mut table = ptr::null_mut();
    assert_eq!(
        c!(ringfence_table_create(&memory, 4, &mut table)),
        Status::Ok
    );
    let (mut iotlb, mut reader) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(
        c!(ringfence_iotlb_create(ptr::null(), 0, &mut iotlb)),
        Status::Ok
    );
    assert_eq!(
        c!(ringfence_iotlb_reader_create(iotlb, &mut reader)),
        Status::Ok
    );
    let fault = Fault {
        iova: 0,
        access: RINGFENCE_READ,
        kind: 0,
    };
    let region = IotlbRegion {
        user: 0,
        bytes: PAGE,
        host: ptr::null_mut(),
    };
    let mut byte = 0_u8;
    let byte = ptr::from_mut(&mut byte).cast();
    let none = ptr::null_mut();
    for (number, status) in [
        c!(ringfence_iova_create(0, 1, 9, 0, ptr::null_mut())),
        c!(ringfence_iova_destroy(ptr::null_mut())),
        c!(ringfence_iova_stats(ptr::null(), ptr::null_mut())),
        c!(ringfence_iova_stats(space, ptr::null_mut())),
        c!(ringfence_iova_cpu_create(ptr::null(), &mut cpu)),
        c!(ringfence_iova_cpu_create(space, ptr::null_mut())),
        c!(ringfence_iova_cpu_destroy(ptr::null_mut())),
        c!(ringfence_iova_alloc(ptr::null_mut(), 1, 0, 9, &mut 0)),
        c!(ringfence_iova_alloc(cpu, 1, 0, 9, ptr::null_mut())),
        c!(ringfence_iova_free(ptr::null_mut(), 1, 1)),
        c!(ringfence_iova_flushed(ptr::null_mut())),
        c!(ringfence_table_create(ptr::null(), 4, &mut table)),
        c!(ringfence_table_create(&memory, 4, ptr::null_mut())),
        c!(ringfence_table_destroy(ptr::null_mut())),
        c!(ringfence_table_root(ptr::null(), &mut 0)),
        c!(ringfence_table_root(table, ptr::null_mut())),
        c!(ringfence_table_bytes(ptr::null(), &mut 0)),
        c!(ringfence_table_bytes(table, ptr::null_mut())),
        c!(ringfence_table_map(ptr::null(), 0, 0, PAGE, 3)),
        c!(ringfence_table_unmap(ptr::null(), 0, PAGE)),
        c!(ringfence_table_walk(ptr::null(), 0, ptr::null_mut())),
        c!(ringfence_table_walk(table, 0, ptr::null_mut())),
        c!(ringfence_dma_create(
            ptr::null(),
            &settings,
            &mut ptr::null_mut()
        )),
        c!(ringfence_dma_create(
            &ports,
            ptr::null(),
            &mut ptr::null_mut()
        )),
        c!(ringfence_dma_create(&ports, &settings, ptr::null_mut())),
        c!(ringfence_dma_destroy(ptr::null_mut())),
        c!(ringfence_dma_attach(
            ptr::null(),
            NIC,
            0xffff,
            ptr::null_mut()
        )),
        c!(ringfence_dma_attach(dma, NIC, 0xffff, ptr::null_mut())),
        c!(ringfence_dma_detach(ptr::null(), 1, true)),
        c!(ringfence_dma_map(
            ptr::null(),
            1,
            0,
            1,
            0,
            0,
            ptr::null_mut()
        )),
        c!(ringfence_dma_map(dma, 1, 0, 1, 0, 0, ptr::null_mut())),
        c!(ringfence_dma_unmap(ptr::null(), 1, ptr::null_mut())),
        c!(ringfence_dma_end_burst(ptr::null(), 1, 0)),
        c!(ringfence_iotlb_create(ptr::null(), 0, ptr::null_mut())),
        c!(ringfence_iotlb_create(ptr::null(), 1, &mut ptr::null_mut())),
        c!(ringfence_iotlb_create(&region, 1, &mut ptr::null_mut())),
        c!(ringfence_iotlb_destroy(ptr::null_mut())),
        c!(ringfence_iotlb_set_regions(ptr::null(), ptr::null(), 0)),
        c!(ringfence_iotlb_set_regions(iotlb, ptr::null(), 1)),
        c!(ringfence_iotlb_receive(ptr::null(), ptr::null())),
        c!(ringfence_iotlb_receive(iotlb, ptr::null())),
        c!(ringfence_iotlb_miss(ptr::null(), &fault, ptr::null_mut())),
        c!(ringfence_iotlb_miss(iotlb, ptr::null(), ptr::null_mut())),
        c!(ringfence_iotlb_miss(iotlb, &fault, ptr::null_mut())),
        c!(ringfence_iotlb_replied(ptr::null(), 1, true, &mut 0)),
        c!(ringfence_iotlb_replied(iotlb, 1, true, ptr::null_mut())),
        c!(ringfence_iotlb_reader_create(ptr::null(), &mut reader)),
        c!(ringfence_iotlb_reader_create(iotlb, ptr::null_mut())),
        c!(ringfence_iotlb_reader_destroy(ptr::null_mut())),
        c!(ringfence_iotlb_check(ptr::null_mut(), 0, 1, 1, none)),
        c!(ringfence_iotlb_read(ptr::null_mut(), 0, byte, 1, none)),
        c!(ringfence_iotlb_read(reader, 0, ptr::null_mut(), 1, none)),
        c!(ringfence_iotlb_write(ptr::null_mut(), 0, byte, 1, none)),
        c!(ringfence_iotlb_write(reader, 0, ptr::null(), 1, none)),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(status, Status::NullPointer, "call {number}");
    }
    // A destroy sets the variable to NULL, and a second one does nothing.
    for _ in 0..2 {
        let mut dma = dma;
        if machine.disconnects.get() == 0 {
            assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
            assert!(dma.is_null());
            assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
            machine.disconnects.set(1);
        }
        assert_eq!(c!(ringfence_table_destroy(&mut table)), Status::Ok);
        assert_eq!(c!(ringfence_iova_destroy(&mut space)), Status::Ok);
        assert_eq!(c!(ringfence_iova_cpu_destroy(&mut cpu)), Status::Ok);
        assert_eq!(c!(ringfence_iotlb_destroy(&mut iotlb)), Status::Ok);
        assert_eq!(c!(ringfence_iotlb_reader_destroy(&mut reader)), Status::Ok);
        assert!(table.is_null() && space.is_null() && cpu.is_null());
        assert!(iotlb.is_null() && reader.is_null());
    }
    assert!(machine.all_frames_are_back());
}

#[test]
fn sizes_and_callbacks_of_structures_are_checked() {
    let machine = Machine::new();
    let good = machine.ports();
    let settings = options(DmaPolicy::Burst);
    let create = |ports: DmaPorts, settings: DmaOptions| {
        let mut dma = ptr::null_mut();
        let status = c!(ringfence_dma_create(&ports, &settings, &mut dma));
        assert!(dma.is_null());
        status
    };
    let memory = good.memory;
    for (ports, expected) in [
        (
            DmaPorts {
                size: good.size - 1,
                ..good
            },
            Status::StructSize,
        ),
        (DmaPorts { size: 0, ..good }, Status::StructSize),
        (
            DmaPorts {
                submit: None,
                ..good
            },
            Status::NullPointer,
        ),
        (DmaPorts { poll: None, ..good }, Status::NullPointer),
        (
            DmaPorts {
                released: None,
                ..good
            },
            Status::NullPointer,
        ),
        (
            DmaPorts {
                memory: Memory { size: 8, ..memory },
                ..good
            },
            Status::StructSize,
        ),
        (
            DmaPorts {
                memory: Memory {
                    address: None,
                    ..memory
                },
                ..good
            },
            Status::NullPointer,
        ),
        (
            DmaPorts {
                memory: Memory {
                    alloc_frame: None,
                    ..memory
                },
                ..good
            },
            Status::NullPointer,
        ),
        (
            DmaPorts {
                memory: Memory {
                    free_frame: None,
                    ..memory
                },
                ..good
            },
            Status::NullPointer,
        ),
    ] {
        assert_eq!(create(ports, settings), expected);
    }
    for (settings, expected) in [
        (
            DmaOptions {
                size: 39,
                ..settings
            },
            Status::StructSize,
        ),
        (
            DmaOptions {
                policy: 2,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                levels: 2,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                levels: 6,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                first_page: 0,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                last_page: 0,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                last_page: 1 << 52,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                last_page: 1 << 52 | 0xf_ffff,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                first_page: 1 << 52,
                ..settings
            },
            Status::InvalidArgument,
        ),
        (
            DmaOptions {
                first_page: (1 << 52) + 1,
                ..settings
            },
            Status::InvalidArgument,
        ),
    ] {
        assert_eq!(create(good, settings), expected);
    }
    let mut space = ptr::null_mut();
    for (kind, first, last, flags) in [
        (6, 1, 9, 0),
        (u32::MAX, 1, 9, 0),
        (0, 9, 1, 0),
        (0, 1, 1 << 52, 0),
        (0, 1, 9, 2),
    ] {
        let status = c!(ringfence_iova_create(kind, first, last, flags, &mut space));
        assert_eq!(status, Status::InvalidArgument);
    }
    assert_eq!(
        c!(ringfence_iova_create(0, 1, 9, 0, &mut space)),
        Status::Ok
    );
    let mut stats = IovaStats {
        size: 8,
        footprint: 7,
        ranges: 7,
        pages: 7,
    };
    assert_eq!(
        c!(ringfence_iova_stats(space, &mut stats)),
        Status::StructSize
    );
    assert_eq!(stats.footprint, 7);
    assert_eq!(c!(ringfence_iova_destroy(&mut space)), Status::Ok);
}

#[test]
fn frees_of_other_ranges_are_rejected() {
    for kind in 0..6 {
        let (mut space, mut cpu, mut first) = (ptr::null_mut(), ptr::null_mut(), 0);
        let status = c!(ringfence_iova_create(kind, 1, 0xf_ffff, 0, &mut space));
        assert_eq!(status, Status::Ok);
        assert_eq!(c!(ringfence_iova_cpu_create(space, &mut cpu)), Status::Ok);
        let status = c!(ringfence_iova_alloc(cpu, 4, 2, u64::MAX, &mut first));
        assert_eq!((status, first % 4), (Status::Ok, 0), "kind {kind}");
        for (first, pages, expected) in [
            (first, 3, Status::NotAllocated),
            (first + 1, 3, Status::NotAllocated),
            (first, 5, Status::NotAllocated),
            (0, 1, Status::NotAllocated),
            (first, 0, Status::InvalidArgument),
            (first, u64::MAX, Status::InvalidArgument),
            (1 << 52, 1, Status::InvalidArgument),
            (first + (1 << 52), 4, Status::InvalidArgument),
            (first, 4, Status::Ok),
            (first, 4, Status::NotAllocated),
        ] {
            let status = c!(ringfence_iova_free(cpu, first, pages));
            assert_eq!(
                status, expected,
                "kind {kind}: {pages} pages from {first:#x}"
            );
        }
        // The bitmap could reuse the freed pages after a flush.
        let full = if kind == 5 {
            Status::NeedsFlush
        } else {
            Status::Exhausted
        };
        for (pages, order, expected) in [
            (0, 0, Status::InvalidArgument),
            (1, 52, Status::InvalidArgument),
            (1, 256, Status::InvalidArgument),
            (1 << 40, 0, full),
        ] {
            let mut first = 7;
            let status = c!(ringfence_iova_alloc(
                cpu,
                pages,
                order,
                u64::MAX,
                &mut first
            ));
            assert_eq!((status, first), (expected, 7), "kind {kind}");
        }
        // A handle keeps the allocator alive.
        assert_eq!(c!(ringfence_iova_destroy(&mut space)), Status::Ok);
        assert_eq!(
            c!(ringfence_iova_alloc(cpu, 1, 0, 0xffff, &mut first)),
            Status::Ok
        );
        assert_eq!(c!(ringfence_iova_cpu_destroy(&mut cpu)), Status::Ok);
    }
}

#[test]
fn a_bitmap_reuses_addresses_after_a_flush() {
    let (mut space, mut cpu, mut first) = (ptr::null_mut(), ptr::null_mut(), 0);
    assert_eq!(
        c!(ringfence_iova_create(5, 0, 127, 0, &mut space)),
        Status::Ok
    );
    assert_eq!(c!(ringfence_iova_cpu_create(space, &mut cpu)), Status::Ok);
    for round in 0..2 {
        for _ in 0..128 {
            assert_eq!(
                c!(ringfence_iova_alloc(cpu, 1, 0, 127, &mut first)),
                Status::Ok
            );
            assert_eq!(
                c!(ringfence_iova_free(cpu, first, 1)),
                Status::Ok,
                "{round}"
            );
        }
        let status = c!(ringfence_iova_alloc(cpu, 1, 0, 127, &mut first));
        assert_eq!(status, Status::NeedsFlush);
        assert_eq!(c!(ringfence_iova_flushed(cpu)), Status::Ok);
    }
    assert_eq!(c!(ringfence_iova_cpu_destroy(&mut cpu)), Status::Ok);
    assert_eq!(c!(ringfence_iova_destroy(&mut space)), Status::Ok);
}
