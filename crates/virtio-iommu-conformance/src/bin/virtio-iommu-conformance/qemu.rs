//! QEMU's `virtio-iommu-pci` over qtest, on the machine `virt` of RISC-V: the machines of other
//! architectures choose the reserved regions themselves.

mod edu;
mod process;
mod virtio;

use std::cell::RefCell;
use std::path::Path;

use ringfence_virtio_iommu_conformance::spec::{CONFIG_BYTES, FAULT_BYTES};
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};

use edu::Edu;
use process::Process;
use virtio::Virtio;

pub(crate) use process::version;

/// Requester ids of the `edu` devices.
const ENDPOINTS: [u32; 3] = [0x20, 0x28, 0x30];
/// Address of the first one's BAR, and distance between them.
const BARS: u64 = 0x4000_0000;
const BAR_STEP: u64 = 1 << 20;
/// Test device of the machine, which resets it.
const FINISHER: u64 = 0x10_0000;
const FINISHER_RESET: u64 = 0x7777;

/// A setup that every QEMU with the device supports.
pub(crate) const ANY: Setup = Setup {
    bypass: Some(false),
    mmio: true,
    probe: true,
    regions: &[],
    input: (0, u64::MAX),
    domains: (0, u32::MAX),
    limits: None,
};

/// A machine with the device under test.
pub(crate) struct Qemu {
    parts: RefCell<(Process, Virtio)>,
}

impl Qemu {
    /// Starts a machine of `program` with the device of `setup`.
    pub(crate) fn start(program: &Path, setup: &Setup) -> anyhow::Result<Self> {
        anyhow::ensure!(setup.limits.is_none(), "QEMU has no caps");
        let regions = setup.regions.iter().map(|region| {
            let kind = u8::from(region.msi);
            format!("{:#x}:{:#x}:{kind}", region.first, region.last)
        });
        let mut unit = serde_json::json!({
            "driver": "virtio-iommu-pci",
            "addr": "1.0",
            "boot-bypass": setup.bypass == Some(true),
            "reserved-regions": regions.collect::<Vec<_>>(),
        });
        if setup.input != (0, u64::MAX) {
            unit["aw-bits"] = 32.into();
        }
        let mut devices = vec![unit.to_string()];
        for endpoint in ENDPOINTS {
            let edu = serde_json::json!({
                "driver": "edu",
                "addr": format!("{:x}.0", endpoint >> 3),
                "dma_mask": u64::MAX,
            });
            devices.push(edu.to_string());
        }
        let mut process = Process::start(program, &devices)?;
        let virtio = enable(&mut process);
        let virtio = virtio.ok_or_else(|| anyhow::anyhow!("the machine has no virtio-iommu"))?;
        Ok(Self {
            parts: RefCell::new((process, virtio)),
        })
    }

    fn parts(&mut self) -> (&mut Process, &mut Virtio) {
        let (process, virtio) = self.parts.get_mut();
        (process, virtio)
    }
}

fn bar(endpoint: u32) -> Option<u64> {
    let number = ENDPOINTS.iter().position(|known| *known == endpoint)?;
    Some(BARS + number as u64 * BAR_STEP)
}

/// Enables the devices of the machine.
fn enable(process: &mut Process) -> Option<Virtio> {
    edu::fill(process);
    for endpoint in ENDPOINTS {
        virtio::enable(process, endpoint.into(), 0, bar(endpoint)?)?;
    }
    Virtio::find(process)
}

impl Subject for Qemu {
    fn endpoints(&self) -> [u32; 3] {
        ENDPOINTS
    }

    fn memory(&self) -> u64 {
        edu::MEMORY
    }

    fn offered(&self) -> u64 {
        let (process, virtio) = &mut *self.parts.borrow_mut();
        // Bits 24 and above belong to the transport.
        virtio.offered(process).unwrap_or_default() & 0xff_ffff
    }

    fn accept(&mut self, features: u64) {
        let (process, virtio) = self.parts();
        let _ = virtio.accept(process, features);
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        let (process, virtio) = &mut *self.parts.borrow_mut();
        debug_assert!(offset + bytes.len() <= CONFIG_BYTES);
        let _ = virtio.read_config(process, offset, bytes);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        let (process, virtio) = self.parts();
        virtio.write_config(process, offset, bytes);
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        let (process, virtio) = self.parts();
        virtio.request(process, readable, writable)
    }

    fn reset(&mut self) {
        let (process, virtio) = self.parts();
        let _ = virtio.reset(process);
    }

    fn reset_system(&mut self) -> bool {
        let (process, virtio) = self.parts();
        let mut commands = process::Commands::default();
        commands.add(format_args!("writel {FINISHER:#x} {FINISHER_RESET:#x}"));
        if process.run(&commands).is_none() {
            return false;
        }
        // QEMU resets the machine before it serves the next message.
        let found = enable(process);
        let done = found.is_some();
        if let Some(found) = found {
            *virtio = found;
        }
        done
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        let (process, _) = self.parts();
        match bar(endpoint) {
            Some(bar) => Edu { bar }.access(process, iova, access),
            None => Outcome::Unobservable("no endpoint of this machine"),
        }
    }

    fn add_event_buffer(&mut self, bytes: usize) {
        let (process, virtio) = self.parts();
        let _ = virtio.add_event_buffer(process, bytes);
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let (process, virtio) = self.parts();
        loop {
            let mut event = [0; FAULT_BYTES];
            let used = virtio.next_event(process, &mut event)?;
            let address = event.last_chunk().copied().map(u64::from_le_bytes);
            // A report of an access that only observes another one.
            if address.is_some_and(|at| at & !0xfff == edu::WINDOW) {
                continue;
            }
            let length = buffer.len().min(FAULT_BYTES);
            buffer[..length].copy_from_slice(&event[..length]);
            return Some(used);
        }
    }
}
