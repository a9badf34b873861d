//! Attack A31: an emulated device scans all of guest memory, as a thread of the process that has it
//! mapped, and as a sandboxed process.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::virtio::{Device, QuantumResult, QueueBroken};
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress};

use crate::guest::*;
use crate::pviommu_driver::Para;
use crate::rig::*;
use crate::{Boundary, SandboxedGuest, sandboxed_guest};

const PAGES: u64 = RAM_BYTES / 4096;

/// Writes its number to each page.
fn mark(ram: &std::fs::File) {
    for page in 0..PAGES {
        ram.write_all_at(&(page | 1 << 63).to_le_bytes(), page * 4096)
            .unwrap();
    }
}

/// A device that scans memory when its doorbell rings, like the process `reads-all`.
#[derive(Default)]
struct ReadsAll {
    /// First words of the pages that it could read.
    found: Vec<u64>,
    written: u64,
}

impl Device for ReadsAll {
    const TYPE: u16 = 2;
    const CLASS: [u8; 3] = [0x01, 0x80, 0];

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _offset: usize, data: &mut [u8]) {
        data.fill(0);
    }

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        _queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        // Also scan as much address space beyond the memory.
        for page in 0..2 * PAGES {
            let at = GuestAddress(page * 4096);
            let word = dma.with(|memory| memory.read_obj::<u64>(at));
            self.found.extend(word.ok());
            let at = GuestAddress(page * 4096 + 8);
            let written = dma.with(|memory| memory.write_obj(u64::MAX, at));
            self.written += u64::from(written.is_ok());
        }
        Ok(QuantumResult::default())
    }
}

/// The native model: the device's thread can access everything that the daemon has mapped. Its
/// driver is started.
fn native() -> u64 {
    let counters = Arc::new(DeviceCounters::default());
    let mut client = Client::new(ReadsAll::default(), Direct::default(), false, counters);
    client.agree();
    client.share_memory();
    client.begin(0);
    mark(&client.ram);
    client.ring(0);
    let device = client.session.function().device();
    let marks = (0..PAGES).map(|page| page | 1 << 63);
    assert!(device.found.iter().copied().eq(marks), "each page as it is");
    assert_eq!(device.written, PAGES);
    device.found.len() as u64 * 4096
}

#[test]
fn a_process_gets_its_grants_and_a_thread_gets_everything() {
    let everything = native();
    assert_eq!(everything, RAM_BYTES);
    looks_around::<Virtio>("the virtio-iommu", everything);
    looks_around::<Para>("the para-virtual IOMMU", everything);
}

fn looks_around<I: Boundary>(iommu: &str, everything: u64) {
    let image = disk_file();
    let mut sandboxed: SandboxedGuest<I> = sandboxed_guest("reads-all", &[], &image);
    mark(I::ram(&mut sandboxed.guest));
    let mut sandboxed = sandboxed.mapped();
    let guest = &mut sandboxed.guest;
    // One read-only page, and one that is mapped and unmapped.
    assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
    assert_eq!(I::map(guest, 0xf000 + AWAY, 0x1000, 0xf000, READ_WRITE), 0);
    assert_eq!(I::unmap(guest, 0xf000 + AWAY, 0x1000), 0);
    // Nine pages of rings and headers; the buffer; the read-only page. The start of the driver has
    // changed the rings, so mark the pages again.
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
        "A31: of {RAM_BYTES} bytes of guest memory a thread reads {everything}; a process behind \
        {iommu} reads {} and writes {}; granted are {} and {}",
        pages * 4096,
        written * 4096,
        granted.len() * 4096,
        (granted.len() - 1) * 4096,
    );
    assert_eq!(found, granted);
    assert_eq!(written, pages - 1, "not the page for reading");
}

/// A sealed memfd cannot grow in any case; a file of the host can.
#[test]
fn an_image_stays_as_long_as_it_was() {
    let image = image_on_disk();
    let length = image.metadata().unwrap().len();
    let mut sandboxed: SandboxedGuest<Virtio> =
        sandboxed_guest::<Virtio>("grows", &[], &image).mapped();
    sandboxed.guest.disk.ring(0);
    let _ = sandboxed.guest.wait();
    let mut answers = [0; 24];
    image.read_exact_at(&mut answers, 0).unwrap();
    let (answers, _) = answers.as_chunks::<8>();
    let answers: Vec<i64> = answers.iter().copied().map(i64::from_le_bytes).collect();
    let refused = -i64::from(libc::EFBIG);
    assert_eq!(answers, [512, refused, refused]);
    assert_eq!(image.metadata().unwrap().len(), length);
}
