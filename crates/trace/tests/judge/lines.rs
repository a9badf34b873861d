//! Lines of traces.

use std::fmt::Write;

pub(crate) fn map(out: &mut String, cpu: u16, us: u64, iova: u64, phys: u64, size: u64, dir: &str) {
    writeln!(
        out,
        "t-1 [{cpu:03}] ..... 1.{us:06}: dma_map_phys: d{} dir={dir} dma_addr={iova:x} \
        size={size} phys_addr={phys:x} attrs=",
        iova >> 40
    )
    .unwrap();
}

pub(crate) fn unmap(out: &mut String, cpu: u16, us: u64, iova: u64, size: u64, dir: &str) {
    writeln!(
        out,
        "t-1 [{cpu:03}] ..... 1.{us:06}: dma_unmap_phys: d{} dir={dir} dma_addr={iova:x} \
        size={size} attrs=",
        iova >> 40
    )
    .unwrap();
}

pub(crate) fn page(out: &mut String, cpu: u16, us: u64, event: &str, pfn: u64, order: u8) {
    writeln!(
        out,
        "p-2 [{cpu:03}] ..... 1.{us:06}: mm_page_{event}: page=0 pfn=0x{pfn:x} order={order}"
    )
    .unwrap();
}
