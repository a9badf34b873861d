//! A kernel that confines a device to page tables, in the smallest form. It finds the VT-d unit,
//! programs it, and lets a device write to a mapped page, to an unmapped one, and to one that was
//! unmapped after the device had used it (docs/EMBEDDING-KERNEL.md).
#![no_std]
#![no_main]

extern crate alloc;

mod boot;
mod firmware;
mod io_port;
mod kernel;
mod memory;
mod mmio;
mod runtime;
mod test_device;
mod verdict;

use alloc::boxed::Box;
use core::cell::RefCell;
use core::error::Error;
use core::fmt::Write;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, PlainTable, Rounding};
use ringfence_dma::{Dma, Released};
use ringfence_firmware::{Dmar, NoBridges};
use ringfence_iova::{MagazineLimits, Magazines};
use ringfence_pgtable::{SecondStage, Table};
use ringfence_types::{Direction, Iova, Pfn, PfnRange, RequesterId};
use ringfence_vtd::{Interface, Mode, Options, Translation, Unit};

use crate::io_port::Console;
use crate::kernel::{Kernel, VtdUnit};
use crate::memory::{Buffer, RAM};
use crate::mmio::Mmio;
use crate::test_device::TestDevice;
use crate::verdict::{Verdict, attempt};

/// The device's addresses: below 2 GiB, far from the interrupt addresses of x86.
const FIRST_PAGE: Pfn = Pfn::new(0x100);
const LAST_PAGE: Pfn = Pfn::new(0x7_ffff);
/// The test device has no DMA mask of its own.
const DMA_MASK: Iova = Iova::new(0xffff_ffff);

type Result<T> = core::result::Result<T, Box<dyn Error>>;

/// Writes a line to the console.
macro_rules! println {
    ($($text:tt)*) => {
        // The console never fails.
        let _ = writeln!(Console, $($text)*);
    };
}

/// Runs on the only CPU, with interrupts disabled.
fn main(rsdp: &[u8], forgets_invalidations: bool) -> ! {
    match run(rsdp, forgets_invalidations) {
        Ok([Verdict::Landed, Verdict::Stopped(_), Verdict::Stopped(_)]) => io_port::exit(16),
        Ok(_) => io_port::exit(17),
        Err(error) => {
            println!("error: {error}");
            io_port::exit(18)
        }
    }
}

fn run(rsdp: &[u8], forgets_invalidations: bool) -> Result<[Verdict; 3]> {
    let device = TestDevice::find().ok_or("no test device")?;
    let mut unit = start_unit(rsdp, device.requester)?;
    let levels = unit
        .capabilities()
        .second_stage_for(39)
        .ok_or("no second stage")?;

    // A domain has its own addresses and its own table. `Strict` invalidates at each unmap.
    let mut dma = Dma::new(Strict);
    let at = dma.attach(device.requester, DMA_MASK, |domain| {
        let pages = PfnRange::inclusive(FIRST_PAGE, LAST_PAGE).ok_or("no pages")?;
        let addresses = Magazines::new(pages, MagazineLimits::DEFAULT, RefCell::new)?;
        let format = SecondStage::new(levels);
        let table = Table::new(format, domain, unit.coherency(), &RAM, &RAM)?;
        Result::Ok(Paged::new(addresses, PlainTable(table), Rounding::Exact))
    })?;
    let root = dma.space(&at).ok_or("no domain")?.table().0.root();
    let translation = Translation::SecondStage { root, levels };
    unit.attach(device.requester, at.domain(), translation)?;

    // The mapping owns the buffer until the device cannot reach it any more.
    let mut kernel = Kernel::new(unit, forgets_invalidations);
    let mut cpu = dma.cpu();
    let buffer = Buffer::new()?;
    let (bytes, direction) = (buffer.bytes(), Direction::FromDevice);
    let (mapping, _) = dma
        .map_single(&mut cpu, &mut kernel, &at, buffer, bytes, direction)
        .map_err(|(_, error)| error)?;
    kernel.publish(mapping.domain(), PfnRange::covering(&mapping.range()))?;
    let iova = mapping.iova();
    let mapped = attempt(&mut kernel.unit, &device, iova, mapping.buffer())?;
    println!("write to a mapped page: {mapped}");

    let below = Iova::new(iova.get() - 4096);
    let unmapped = attempt(&mut kernel.unit, &device, below, mapping.buffer())?;
    println!("write to an unmapped page: {unmapped}");

    // The IOTLB holds the translation, because the device has used it.
    let Released(buffer) = dma.unmap_single(&mut cpu, &mut kernel, &at, mapping)?;
    let stale = attempt(&mut kernel.unit, &device, iova, &buffer)?;
    println!("write after unmap: {stale}");

    kernel.unit.detach(device.requester)?;
    kernel.unit.disable()?;
    Ok([mapped, unmapped, stale])
}

/// Finds the unit that translates the device and enables it. All of its devices are then blocked.
fn start_unit(rsdp: &[u8], device: RequesterId) -> Result<VtdUnit> {
    let table = firmware::acpi_table(rsdp, b"DMAR").ok_or("no DMAR table")?;
    let dmar = Dmar::new(table)?;
    let drhd = dmar.unit_of(0, device, &NoBridges).ok_or("no unit")?;
    if dmar.reserved_regions(0, device, NoBridges).count() != 0 {
        return Err("the device has reserved memory, which must stay mapped".into());
    }
    // SAFETY: firmware says that the unit's registers are here. Only this value uses them.
    let registers = unsafe { Mmio::new(drhd.registers, drhd.register_bytes) };
    let registers = registers.ok_or("the registers are not mapped")?;
    let options = Options {
        mode: Mode::Legacy,
        interface: Interface::Queue,
        poll_limit: 1_000_000,
    };
    let unit = Unit::new(registers, &RAM, &RAM, &options)?;
    println!("VT-d at {} translates {device}", drhd.registers);
    Ok(unit)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    println!("{info}");
    io_port::exit(19)
}
