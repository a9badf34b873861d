//! Lines of traces.

pub(crate) const NIC: &str = "0000:00:03.0";
pub(crate) const DISK: &str = "0000:00:1f.2";

/// A trace line.
pub(crate) fn line(cpu: u16, us: u64, what: &str) -> String {
    format!("            task-1       [{cpu:03}] .....     1.{us:06}: {what} attrs=\n")
}

pub(crate) fn map(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!(
        "dma_map_phys: {device} dir={direction} dma_addr={iova:x} size={size} phys_addr=7{:03x}",
        iova & 0xfff
    )
}

pub(crate) fn unmap(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!("dma_unmap_phys: {device} dir={direction} dma_addr={iova:x} size={size}")
}

pub(crate) fn access(device: &str, direction: &str, iova: u64, size: u64) -> String {
    format!("dma_access: {device} dir={direction} dma_addr={iova:x} size={size}")
}
