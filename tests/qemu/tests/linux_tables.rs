//! Debian's kernels write page tables behind every family of IOMMUs; the decoders read them. Each
//! guest's own trace of its IOMMU tells what the tables must hold.
//!
//! `RINGFENCE_TRACES` names a directory that receives the guests' traces.

use ringfence_qemu_judge::Board;
use ringfence_qemu_judge::linux::{self, Domain, Guest, LinuxMachine, Live};
use ringfence_types::PageSize;

/// Fewer pages mean that a device was not used: the network cards and the SATA disk alone keep 500
/// mapped.
const LEAST_PAGES: usize = 500;
/// Pages whose state at the end the trace does not determine, because two devices share them.
const MOST_AMBIGUOUS: usize = 10;
/// The devices that the guests use.
const DEVICES: [u16; 5] = [4 << 3, 5 << 3, 6 << 3, 7 << 3, 8 << 3];

/// Boots the guest, and saves its trace if `RINGFENCE_TRACES` is set.
fn run(machine: &LinuxMachine<'_>, unit: &str) -> Guest {
    let guest = Guest::run(machine).unwrap();
    println!("{}", guest.console().join("\n"));
    if let Some(directory) = std::env::var_os("RINGFENCE_TRACES") {
        let path = std::path::Path::new(&directory).join(format!("{unit}.trace"));
        std::fs::write(path, guest.trace()).unwrap();
    }
    guest
}

/// Boots the guest and compares its tables with its trace. Returns the tables.
fn judge(
    machine: &LinuxMachine<'_>,
    unit: &str,
    read: fn(&mut Guest) -> anyhow::Result<Vec<Domain>>,
) -> Vec<Domain> {
    let mut guest = run(machine, unit);
    let live = Live::read(guest.trace()).unwrap();
    let domains = read(&mut guest).unwrap();
    for domain in &domains {
        println!(
            "{unit}: {:?}: {} pages in entries {:x?}",
            domain.devices,
            domain.pages.len(),
            domain.leaves
        );
    }
    let result = live.compare(&domains);
    println!(
        "{unit}: {} maps, {} unmaps; {} domains; {} pages equal, {} of several outcomes, {} \
         differences",
        live.maps,
        live.unmaps,
        domains.len(),
        result.equal,
        result.possible,
        result.differences.len()
    );
    assert_eq!(result.differences, [""; 0], "{unit}");
    assert!(
        result.equal >= LEAST_PAGES,
        "{unit}: {} pages",
        result.equal
    );
    assert!(result.possible <= MOST_AMBIGUOUS, "{unit}: {result:?}");
    for device in DEVICES {
        let mapped = |domain: &&Domain| {
            let mut ids = domain.devices.iter();
            ids.any(|id| id.get() == device) && !domain.pages.is_empty()
        };
        assert!(
            domains.iter().any(|domain| mapped(&domain)),
            "{unit}: {device:#x}"
        );
    }
    domains
}

#[test]
fn arm64_behind_smmu_v3() {
    let machine = LinuxMachine {
        architecture: "arm64",
        board: Board::ArmVirt,
        arguments: &[
            "-machine",
            "virt,iommu=smmuv3,gic-version=3,memory-backend=ram",
            "-cpu",
            "max,pauth=off",
        ],
        parameters: "console=ttyAMA0",
        archive: &[],
    };
    judge(&machine, "smmu-v3", linux::smmu_v3);
}

/// Debian's riscv64 kernels have the driver of the IOMMU but no DMA layer for it
/// (`CONFIG_IOMMU_DMA`). The drivers of the devices use them in pass-through. Then the module
/// `map_pages` maps pages for the devices, with permissions that the judge compares too.
#[test]
fn riscv64_behind_riscv_iommu() {
    let machine = LinuxMachine {
        architecture: "riscv64",
        board: Board::RiscvVirt,
        arguments: &[
            "-machine",
            "virt,iommu-sys=on,aia=aplic-imsic,memory-backend=ram",
        ],
        parameters: "console=ttyS0",
        archive: &[],
    };
    let domains = judge(&machine, "riscv-iommu", linux::riscv_iommu);
    for size in [PageSize::Size4K, PageSize::Size64K, PageSize::Size2M] {
        let has = |domain: &Domain| domain.leaves.contains_key(&size.bytes());
        assert!(domains.iter().any(has), "no pages of {size:?}");
    }
}

/// Returns the kernel parameter with the frequency of the clock (`tests/guest/tsc.py`). Empty if
/// the frequency is not known.
fn clock() -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/tsc.py");
    let output = std::process::Command::new("python3").arg(script).output();
    let output = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_owned()
}

/// Judges the tables that a guest on a q35 machine writes for the IOMMU `device`.
fn judge_q35(
    device: &str,
    parameter: &str,
    unit: &str,
    read: fn(&mut Guest) -> anyhow::Result<Vec<Domain>>,
) {
    let machine = LinuxMachine {
        architecture: "amd64",
        board: Board::Q35,
        arguments: &[
            "-machine",
            "q35,memory-backend=ram",
            "-cpu",
            "max",
            "-device",
            device,
        ],
        parameters: &format!("console=ttyS0 no_timer_check {} {parameter}", clock()),
        archive: &[],
    };
    judge(&machine, unit, read);
}

#[test]
fn amd64_behind_vt_d() {
    let device = "intel-iommu,caching-mode=off,intremap=off";
    judge_q35(device, "intel_iommu=on", "vt-d", linux::vtd);
}

#[test]
fn amd64_behind_vt_d_in_scalable_mode() {
    let device = "intel-iommu,scalable-mode=on,fsts=on,intremap=off";
    let read = linux::vtd_scalable;
    judge_q35(device, "intel_iommu=on,sm_on", "vt-d-scalable", read);
}

#[test]
fn amd64_behind_amd_vi() {
    let device = "amd-iommu,dma-remap=on";
    judge_q35(device, "amd_iommu=pgtbl_v1", "amd-vi", linux::amd_vi);
}
