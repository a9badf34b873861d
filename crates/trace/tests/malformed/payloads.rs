//! Payloads of events, with the error of each.

use ringfence_trace::Field;
use ringfence_trace::Malformed::{self, *};

/// Payloads after a valid prefix.
pub(crate) const PAYLOADS: &[(&str, Option<Malformed>)] = &[
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=ff018000 size=18552 phys_addr=119798000 attrs=",
        None,
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=1 new_field=7 phys_addr=1 attrs=X|Y",
        None,
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=ffffffffffffffff size=5 phys_addr=1 attrs=",
        None,
    ),
    (
        "dma_map_phys:  dir=TO_DEVICE dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(MissingField(Field::Device)),
    ),
    ("dma_map_phys:", Some(MissingField(Field::Device))),
    ("dma_map_phys: d", Some(MissingField(Field::Dir))),
    (
        "dma_map_phys: d dir=SIDEWAYS dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(BadDirection),
    ),
    (
        "dma_map_phys: d dir=NONE dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(NoDirection),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE size=1 phys_addr=1 attrs=",
        Some(MissingField(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=xyz size=1 phys_addr=1 attrs=",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=12345678123456781 size=1 phys_addr=1 attrs=",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=0x10 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=-1 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=18446744073709551616 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=0 phys_addr=1 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=18446744073709551615 phys_addr=0 attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=fffffffffffffff0 size=32 phys_addr=0 attrs=",
        Some(RangeWraps(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 phys_addr=fffffffffffffff0 attrs=",
        Some(RangeWraps(Field::PhysAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 attrs=",
        Some(MissingField(Field::PhysAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 phys_addr=0",
        Some(MissingField(Field::Attrs)),
    ),
    (
        "dma_access: d dir=FROM_DEVICE dma_addr=ff018840 size=18552",
        None,
    ),
    (
        "dma_access:  dir=FROM_DEVICE dma_addr=1 size=1",
        Some(MissingField(Field::Device)),
    ),
    (
        "dma_access: d dma_addr=1 size=1",
        Some(MissingField(Field::Dir)),
    ),
    (
        "dma_access: d dir=NONE dma_addr=1 size=1",
        Some(NoDirection),
    ),
    (
        "dma_access: d dir=TO_DEVICE size=1",
        Some(MissingField(Field::DmaAddr)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=1",
        Some(MissingField(Field::Size)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=g size=1",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=1 size=0",
        Some(EmptySize),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=0 size=68719476737",
        Some(SizeTooLarge),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=fffffffffffffff0 size=32",
        Some(RangeWraps(Field::DmaAddr)),
    ),
    (
        "dma_unmap_phys: d dir=TO_DEVICE dma_addr=1 size=0 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_unmap_page: d dir=TO_DEVICE dma_addr=1 size=18446744073709551615 attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_unmap_page: d dir=TO_DEVICE dma_addr=1 size=4",
        Some(MissingField(Field::Attrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={0x1000} sizes={0x2000} \
        phys_addrs={0x1000,0x5000} attrs=",
        None,
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE ents=1/1 dma_addrs={0x1} sizes={0x2} phys_addrs={0x1} attrs=",
        Some(MissingField(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1 ents=1/1 dma_addrs={0x1} sizes={0x2} phys_addrs={0x1} \
        attrs=",
        Some(BadNumber(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/1 ents=1/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1,0x2} attrs=",
        Some(BadNumber(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=x/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadNumber(Field::Ents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1x ents=1/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadNumber(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1x dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadNumber(Field::Ents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=2/2 dma_addrs={0x1} sizes={0x2,0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadList(Field::DmaAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={} phys_addrs={0x1} \
        attrs=",
        Some(BadList(Field::Sizes)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={0x0} \
        phys_addrs={0x1} attrs=",
        Some(EmptySize),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={0xffffffffff} \
        phys_addrs={0x1} attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0xffffffffffffffff} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(RangeWraps(Field::DmaAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1 attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=0/0 ents=0/0 dma_addrs={} sizes={} phys_addrs={} attrs=",
        Some(BadList(Field::DmaAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1,} attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={} attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1}x attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE attrs=",
        Some(MissingField(Field::PhysAddrs)),
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=4 virt_addr=(____ptrval____) flags=X \
        attrs=",
        None,
    ),
    (
        "dma_alloc: d dma_addr=1000 size=4 virt_addr=00000000330fd266 flags=X attrs=",
        None,
    ),
    (
        "dma_alloc: d node=0 dir=SIDEWAYS dma_addr=1000 size=4 virt_addr=00000000330fd266 flags=X \
        attrs=",
        Some(BadDirection),
    ),
    (
        "dma_alloc_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 node=0 phys_addrs={0x1000,0x5000} \
        flags=X attrs=",
        None,
    ),
    (
        "dma_free_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 node=0 phys_addrs={0x1000,0x5000}",
        None,
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=0 size=0 virt_addr=0000000000000000 flags=X \
        attrs=",
        None,
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=0 virt_addr=00000000330fd266 flags=X \
        attrs=",
        Some(EmptySize),
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=4 flags=X attrs=",
        Some(MissingField(Field::VirtAddr)),
    ),
    (
        "dma_alloc_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={0x1000,0x5000} flags=X \
        attrs=",
        None,
    ),
    (
        "dma_free: d dir=BIDIRECTIONAL dma_addr=0 size=0 virt_addr=0000000000000000 attrs=",
        None,
    ),
    (
        "dma_free: d dir=BIDIRECTIONAL dma_addr=1 size=0 virt_addr=0000000000000005 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_free_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={0x1000,0x5000}",
        None,
    ),
    (
        "map: IOMMU: iova=0x00000000bff7c000 - 0x00000000bff80000 paddr=0x0000000127834000 \
        size=16384",
        None,
    ),
    (
        "map: IOMMU: iova=0x00000000bff7c000 paddr=0x0000000127834000 size=16384",
        None,
    ),
    (
        "map: IOMMU: iova=0xfffffffffffff000 - 0x0000000000000000 paddr=0x0 size=4096",
        None,
    ),
    ("iommu:map: something else", Some(MissingField(Field::Iova))),
    ("other:map: something else", None),
    ("map: something else", None),
    (
        "map: IOMMU: paddr=0x1 size=1",
        Some(MissingField(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=12 paddr=0x1 size=1",
        Some(BadNumber(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x12 - 13 paddr=0x1 size=1",
        Some(BadNumber(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x3 paddr=0x1 size=1",
        Some(RangeMismatch),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x1 paddr=0x1 size=0",
        Some(EmptySize),
    ),
    (
        "map: IOMMU: iova=0xfffffffffffffff0 - 0x10 paddr=0x1 size=32",
        Some(RangeWraps(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x0 - 0x20 paddr=0xfffffffffffffff0 size=32",
        Some(RangeWraps(Field::Paddr)),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x2 size=1",
        Some(MissingField(Field::Paddr)),
    ),
    (
        "unmap: IOMMU: iova=0x1 - 0x2 size=1",
        Some(MissingField(Field::UnmappedSize)),
    ),
    ("sched_switch: prev_comm=a ==> next_comm=b", None),
    ("function_name <-caller", None),
    (": payload", Some(NoEvent)),
    ("dma_ma", Some(NoEvent)),
    ("", Some(NoEvent)),
];
