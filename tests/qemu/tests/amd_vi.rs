//! QEMU judges the AMD-Vi driver.

use ringfence_pgtable::{AmdV1, Level};
use ringfence_qemu_judge::family::amd_vi::AmdVi;
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, drive,
};
use ringfence_types::PageSize;

/// Accesses of a run, unless `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 15_000;

fn machine() -> Machine {
    Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", "amd-iommu,dma-remap=on"],
        devices: &[0x20, 0x28, 0x31, 0xe8],
        readers: &[0x40],
    })
    .unwrap()
}

fn run(levels: u8, largest: PageSize, broken: Broken) -> anyhow::Result<Report> {
    let machine = machine();
    let format = AmdV1::new(Level::new(levels).unwrap()).with_pages_up_to(largest);
    let mut unit = AmdVi::start(&machine, format)?;
    let options = Options::from_environment(ACCESSES, broken)?;
    let report = drive(&machine, &mut unit, &options)?;
    unit.stop()?;
    println!("{levels} levels, pages up to {largest}: {report}");
    for kind in Kind::ALL {
        assert!(
            report.of(kind) > options.accesses / 100,
            "{kind:?}: {report}"
        );
    }
    Ok(report)
}

#[test]
fn tables_of_four_kib_pages() {
    for levels in 3..=6 {
        run(levels, PageSize::Size4K, Broken::Nothing).unwrap();
    }
}

#[test]
fn tables_of_all_page_sizes() {
    for (levels, largest) in [
        (3, PageSize::Size2M),
        (4, PageSize::Size64K),
        (4, PageSize::Size1G),
    ] {
        run(levels, largest, Broken::Nothing).unwrap();
    }
}

/// QEMU caches translations, so its verdict reveals errors of the mapping layer. It widens
/// INVALIDATE_IOMMU_PAGES to the whole domain: it notices a range without a page only if no page is
/// left. The tests of the driver's crate notice each missing page.
#[test]
fn broken_invalidations_are_caught() {
    for broken in [
        Broken::Forgotten,
        Broken::WithoutFirstPage,
        Broken::WithoutLastPage,
        Broken::OtherDomain,
    ] {
        let error = run(4, PageSize::Size2M, broken).unwrap_err();
        let disagreement = error.downcast_ref::<Disagreement>();
        let disagreement = disagreement.unwrap_or_else(|| panic!("{broken:?}: {error}"));
        assert_eq!(disagreement.kind, Kind::AfterUnmap, "{broken:?}: {error}");
        assert!(error.to_string().contains("Landed, expected Stopped"));
    }
}
