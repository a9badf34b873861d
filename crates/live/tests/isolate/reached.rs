//! Attack A31: an emulated device looks at all of the guest's memory. As a thread of the process that has it mapped, and as a process of its own.

use std::os::unix::fs::FileExt;

use ringfence_live::dma::{Direct, Dma};
use vm_memory::{Bytes, GuestAddress};

use crate::guest::*;
use crate::para::Para;
use crate::rig::*;
use crate::{Apart, Boundary, apart};

const PAGES: u64 = RAM_BYTES / 4096;

/// Each page begins with its number.
fn mark(ram: &std::fs::File) {
    for page in 0..PAGES {
        ram.write_all_at(&(page | 1 << 63).to_le_bytes(), page * 4096)
            .unwrap();
    }
}

/// The native model: the device's thread has what the daemon has.
fn native() -> u64 {
    let mut client = ready();
    mark(&client.ram);
    let file = client.ram.try_clone().unwrap();
    // What the disk's thread is given.
    let mut memory = ringfence_live::GuestRam::default();
    let source = ringfence_live::Source {
        file: Some(file.into()),
        offset: 0,
        accessible: true,
    };
    let all = ringfence_types::IovaRange::new(ringfence_types::Iova::ZERO, RAM_BYTES).unwrap();
    memory.map(all, source).unwrap();
    let mut dma = Direct::default();
    dma.set_memory(memory.memory());
    client.begin(0);
    (0..PAGES)
        .filter(|page| {
            let marked: u64 = dma
                .with(|memory| memory.read_obj(GuestAddress(page * 4096)))
                .unwrap();
            marked == page | 1 << 63
        })
        .count() as u64
        * 4096
}

#[test]
fn a_process_gets_its_grants_and_a_thread_gets_everything() {
    let everything = native();
    assert_eq!(everything, RAM_BYTES);
    looks_around::<Virtio>("the virtio-iommu", everything);
    looks_around::<Para>("the para-virtual IOMMU", everything);
}

fn looks_around<I: Boundary>(behind: &str, everything: u64) {
    let image = disk_file();
    let mut apart: Apart<I> = apart("reads-all", &[], &image);
    mark(I::ram(&mut apart.guest));
    let mut apart = apart.mapped();
    let guest = &mut apart.guest;
    // One page for reading only, and one that was there and went.
    assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
    assert_eq!(I::map(guest, 0xf000 + AWAY, 0x1000, 0xf000, READ_WRITE), 0);
    assert_eq!(I::unmap(guest, 0xf000 + AWAY, 0x1000), 0);
    // Nine pages of rings and headers, which begin has written to since; the buffer; the page for reading.
    let granted: Vec<u64> = (QUEUE / 4096..0xc)
        .filter(|page| *page != 0xa)
        .chain([0xe])
        .collect();
    mark(I::ram(guest));
    guest.disk.ring(0);
    assert!(guest.wait());
    let word = |at: u64| {
        let mut bytes = [0; 8];
        image.read_exact_at(&mut bytes, at).unwrap();
        u64::from_le_bytes(bytes)
    };
    let (pages, written) = (word(0), word(8));
    let found: Vec<u64> = (1..=pages)
        .map(|n| word(512 + 8 * n) & !(1 << 63))
        .collect();
    println!(
        "A31: of {RAM_BYTES} bytes of guest memory a thread reads {everything}; a process behind {behind} reads {} and writes {}; granted are {} and {}",
        pages * 4096,
        written * 4096,
        granted.len() * 4096,
        (granted.len() - 1) * 4096,
    );
    assert_eq!(found, granted);
    assert_eq!(written, pages - 1, "not the page for reading");
}
