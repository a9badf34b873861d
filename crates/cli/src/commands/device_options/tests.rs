//! Every combination of devices that a flat list of switches could express is either served in the
//! form of `--iommu` and `--disk`, with the same devices, or refused in both forms.

use clap::Parser;
use ringfence_live::Locked;
use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_types::Iova;

use super::*;
use crate::args::{Cli, Command};

/// The devices of a guest as independent switches, with the rules that these need: the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Switches {
    untranslated: bool,
    paravirtual: bool,
    ring: bool,
    vhost_user: Option<QemuIommu>,
    disk: bool,
    read_only: bool,
    sandbox: bool,
    assigned: bool,
    entropy: bool,
    net: bool,
    inject_dma: Vec<InjectedDma>,
    requests: bool,
    dmas: bool,
    inject_reply: bool,
    host_page_pool: bool,
    memory_file: bool,
    locked: Locked,
    usual_limits: bool,
}

impl Switches {
    /// Returns true if a guest can have these devices.
    fn is_valid(&self) -> bool {
        let foreign = self.vhost_user.is_some();
        let own = !self.untranslated && !foreign;
        let virtio = own && !self.paravirtual && !self.ring;
        let injected = |class| self.inject_dma.contains(&class);
        let memory = self.memory_file || self.locked != Locked::Nothing;
        let refused = [
            foreign && self.untranslated,
            foreign && self.paravirtual,
            self.untranslated && self.paravirtual,
            self.ring && (foreign || self.untranslated || self.paravirtual),
            self.ring && (self.sandbox || self.assigned),
            self.ring && injected(InjectedDma::Foreign),
            self.ring && !self.usual_limits,
            foreign && (self.entropy || self.net),
            foreign && !self.disk,
            self.requests && !virtio,
            self.dmas && !virtio,
            self.dmas && (self.sandbox || self.assigned),
            self.read_only && !self.disk,
            self.sandbox && !self.disk,
            !self.inject_dma.is_empty() && !self.disk,
            self.sandbox && !own,
            self.assigned && !self.disk,
            self.assigned && foreign,
            self.assigned && self.sandbox,
            self.sandbox && injected(InjectedDma::Foreign),
            injected(InjectedDma::Foreign) && !self.entropy,
            injected(InjectedDma::Foreign) && !own,
            injected(InjectedDma::AfterRevoke) && !self.sandbox,
            self.inject_reply && !self.paravirtual,
            foreign && memory,
            self.locked == Locked::Mapped && !self.paravirtual,
            self.paravirtual && !self.usual_limits,
            self.host_page_pool && !self.paravirtual,
        ];
        !refused.contains(&true)
    }

    /// Returns the switches in the form of the command line. `None` if that cannot express them.
    fn arguments(&self, base: &DeviceArgs) -> Option<DeviceArgs> {
        let own = [self.untranslated, self.paravirtual, self.ring];
        let iommu = match (own, self.vhost_user) {
            ([false, false, false], None) => IommuKind::Virtio,
            ([false, true, false], None) => IommuKind::Pviommu,
            ([false, false, true], None) => IommuKind::Riommu,
            ([true, false, false], None) => IommuKind::None,
            ([false, false, false], Some(QemuIommu::Intel)) => IommuKind::QemuIntel,
            ([false, false, false], Some(QemuIommu::Virtio)) => IommuKind::QemuVirtio,
            _ => return None,
        };
        let mode = match (self.sandbox, self.assigned) {
            (false, false) => None,
            (true, false) => Some(DiskModeArg::Sandbox),
            (false, true) => Some(DiskModeArg::Assigned),
            (true, true) => return None,
        };
        if !self.disk && (mode.is_some() || self.read_only) {
            return None;
        }
        let mut args = base.clone();
        args.iommu = iommu;
        args.disk = self.disk.then(|| DiskArg {
            file: Some("disk.img".into()),
            bus: None,
            mode,
            read_only: self.read_only,
        });
        args.rng = self.entropy;
        if !self.net {
            args.net = None;
        }
        args.inject_dma.clone_from(&self.inject_dma);
        args.record_requests = self.requests.then(|| "requests".into());
        args.record_dmas = self.dmas.then(|| "dmas".into());
        if !self.inject_reply {
            args.inject_reply = None;
        }
        args.host_page_pool = self.host_page_pool;
        args.memory_file = self.memory_file.then(|| "memory".into());
        args.lock = (self.locked != Locked::Nothing).then_some(self.locked);
        if !self.usual_limits {
            args.caps.max_mappings = 1;
        }
        Some(args)
    }

    /// Returns the switches of devices.
    fn of(options: &DeviceOptions) -> Self {
        let limits = GuestLimits::default();
        let none = Self {
            untranslated: false,
            paravirtual: false,
            ring: false,
            vhost_user: None,
            disk: false,
            read_only: false,
            sandbox: false,
            assigned: false,
            entropy: false,
            net: false,
            inject_dma: Vec::new(),
            requests: false,
            dmas: false,
            inject_reply: false,
            host_page_pool: false,
            memory_file: false,
            locked: Locked::Nothing,
            usual_limits: options.limits == limits,
        };
        match &options.devices {
            GuestDevices::VhostUser(disk) => Self {
                vhost_user: Some(disk.iommu),
                disk: disk.path == Path::new("disk.img"),
                read_only: disk.read_only,
                inject_dma: disk.inject_dma.clone(),
                ..none
            },
            GuestDevices::VfioUser(devices) => {
                let disk = devices.disk.as_ref();
                let mode = disk.map(|disk| &disk.mode);
                let (records, host_page_pool, inject_reply) = match &devices.iommu {
                    Iommu::None | Iommu::Ring => ([false; 2], false, false),
                    Iommu::Virtio { requests, dmas } => {
                        ([requests.is_some(), dmas.is_some()], false, false)
                    }
                    Iommu::Pviommu {
                        host_page_pool,
                        inject_reply,
                    } => (
                        [false; 2],
                        *host_page_pool == HostPagePool::On,
                        inject_reply.is_some(),
                    ),
                };
                let [requests, dmas] = records;
                Self {
                    untranslated: devices.iommu == Iommu::None,
                    paravirtual: matches!(devices.iommu, Iommu::Pviommu { .. }),
                    ring: devices.iommu == Iommu::Ring,
                    disk: disk.is_some_and(|disk| disk.path == Path::new("disk.img")),
                    read_only: disk.is_some_and(|disk| disk.read_only),
                    sandbox: matches!(mode, Some(DiskMode::Sandbox(_))),
                    assigned: mode == Some(&DiskMode::ASSIGNED),
                    entropy: devices.entropy,
                    net: devices.net.is_some(),
                    inject_dma: disk.map_or(Vec::new(), |disk| disk.inject_dma.clone()),
                    requests,
                    dmas,
                    inject_reply,
                    host_page_pool,
                    memory_file: devices.memory.file.is_some(),
                    locked: devices.memory.locked,
                    ..none
                }
            }
        }
    }
}

/// A number in a system whose digits have different bases.
struct Digits(usize);

impl Digits {
    fn next(&mut self, base: usize) -> usize {
        let digit = self.0 % base;
        self.0 /= base;
        digit
    }

    fn switch(&mut self) -> bool {
        self.next(2) == 1
    }
}

const COMBINATIONS: usize = 3 * 5 * 3 * (1 << 15);

fn combination(number: usize) -> Switches {
    let mut digits = Digits(number);
    let stray = InjectedDma::Stray(Iova::new(0xdead_0000));
    let classes = [
        vec![],
        vec![stray],
        vec![InjectedDma::Foreign],
        vec![InjectedDma::AfterRevoke],
        vec![stray, InjectedDma::AfterRevoke, InjectedDma::Foreign],
    ];
    Switches {
        vhost_user: [None, Some(QemuIommu::Intel), Some(QemuIommu::Virtio)][digits.next(3)],
        inject_dma: classes[digits.next(5)].clone(),
        locked: [Locked::Nothing, Locked::Mapped, Locked::All][digits.next(3)],
        untranslated: digits.switch(),
        paravirtual: digits.switch(),
        ring: digits.switch(),
        disk: digits.switch(),
        read_only: digits.switch(),
        sandbox: digits.switch(),
        assigned: digits.switch(),
        entropy: digits.switch(),
        net: digits.switch(),
        requests: digits.switch(),
        dmas: digits.switch(),
        inject_reply: digits.switch(),
        host_page_pool: digits.switch(),
        memory_file: digits.switch(),
        usual_limits: digits.switch(),
    }
}

fn parse(words: &str) -> DeviceArgs {
    let words = format!("ringfence serve --dir run {words}");
    match Cli::try_parse_from(words.split(' ').filter(|word| !word.is_empty())) {
        Ok(Cli {
            command: Command::Serve(args),
        }) => args.devices,
        other => panic!("{words}: {other:?}"),
    }
}

#[test]
fn combinations_have_one_form_or_are_rejected() {
    let base = parse("--net socket=net.peer --inject-reply never:1");
    let (mut served, mut refused, mut inexpressible) = (0, 0, 0);
    for number in 0..COMBINATIONS {
        let wanted = combination(number);
        let Some(args) = wanted.arguments(&base) else {
            inexpressible += 1;
            assert!(!wanted.is_valid(), "{wanted:?}");
            continue;
        };
        match device_options(&args, Image::None) {
            Ok(options) => {
                served += 1;
                assert!(wanted.is_valid(), "{wanted:?}");
                assert_eq!(Switches::of(&options), wanted);
            }
            Err(Failure::Devices(why)) => {
                refused += 1;
                assert!(!wanted.is_valid(), "{wanted:?}: {why}");
                assert!(why.contains("--"), "{why}");
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    println!("{served} served, {refused} refused, {inexpressible} inexpressible");
    assert!(served > 2000 && refused > 20_000 && inexpressible > 100_000);
}

/// The words of a command line, and the switches that they replace.
#[test]
fn words_mean_the_switches_that_they_replace() {
    let file = "--disk disk.img";
    let disk = Switches {
        disk: true,
        ..Switches::of(&DeviceOptions::default())
    };
    let table = [
        (file.to_owned(), disk.clone()),
        (
            format!("{file},readonly=on --rng"),
            Switches {
                read_only: true,
                entropy: true,
                ..disk.clone()
            },
        ),
        (
            format!("--iommu none {file},mode=assigned --lock all"),
            Switches {
                untranslated: true,
                assigned: true,
                locked: Locked::All,
                ..disk.clone()
            },
        ),
        (
            format!("--iommu pviommu {file},mode=sandbox --host-page-pool"),
            Switches {
                paravirtual: true,
                sandbox: true,
                host_page_pool: true,
                ..disk.clone()
            },
        ),
        (
            format!("--iommu virtio {file},mode=sandbox --record-requests requests"),
            Switches {
                sandbox: true,
                requests: true,
                ..disk.clone()
            },
        ),
        (
            format!("--iommu virtio {file} --record-dmas dmas"),
            Switches {
                dmas: true,
                ..disk.clone()
            },
        ),
        (
            format!("--iommu qemu-intel {file}"),
            Switches {
                vhost_user: Some(QemuIommu::Intel),
                ..disk.clone()
            },
        ),
        (
            format!("--iommu qemu-virtio {file},readonly=on"),
            Switches {
                vhost_user: Some(QemuIommu::Virtio),
                read_only: true,
                ..disk
            },
        ),
    ];
    for (words, switches) in table {
        let options = device_options(&parse(&words), Image::None).unwrap();
        assert_eq!(Switches::of(&options), switches, "{words}");
    }
}

#[test]
fn a_refusal_names_both_options() {
    for (words, options) in [
        (
            "--iommu none --disk d,mode=sandbox",
            ["--disk mode=sandbox", "--iommu virtio"],
        ),
        (
            "--iommu qemu-intel --disk d,mode=emulated",
            ["--disk mode=", "--iommu"],
        ),
        ("--iommu qemu-virtio", ["--iommu qemu-virtio", "--disk"]),
        (
            "--iommu qemu-virtio --disk d --rng",
            ["--rng", "--iommu virtio, pviommu, riommu or none"],
        ),
        (
            "--iommu qemu-virtio --disk d --net tap=t",
            ["--net", "--iommu virtio, pviommu, riommu or none"],
        ),
        (
            "--iommu qemu-virtio --disk d --lock all",
            ["--lock", "--iommu virtio, pviommu, riommu or none"],
        ),
        (
            "--iommu qemu-virtio --disk d --memory-file m",
            ["--memory-file", "--iommu virtio, pviommu, riommu or none"],
        ),
        (
            "--iommu none --record-requests r",
            ["--record-requests", "--iommu virtio"],
        ),
        (
            "--iommu pviommu --record-dmas r",
            ["--record-dmas", "--iommu virtio"],
        ),
        (
            "--iommu qemu-intel --disk d --record-dmas r",
            ["--record-dmas", "--iommu virtio"],
        ),
        (
            "--disk d,mode=assigned --record-dmas r",
            ["--record-dmas", "--disk mode=emulated"],
        ),
        ("--host-page-pool", ["--host-page-pool", "--iommu pviommu"]),
        (
            "--inject-reply never:1",
            ["--inject-reply", "--iommu pviommu"],
        ),
        ("--inject-dma after-unmap", ["--inject-dma", "--disk"]),
        (
            "--disk d --inject-dma foreign",
            ["--inject-dma foreign", "--rng"],
        ),
        ("--lock mapped", ["--lock mapped", "--iommu pviommu"]),
        ("--disk readonly=on", ["--disk", "FILE"]),
    ] {
        match device_options(&parse(words), Image::None) {
            Err(Failure::Devices(why)) => {
                assert!(
                    options.iter().all(|name| why.contains(name)),
                    "{words}: {why}"
                );
            }
            other => panic!("{words}: {other:?}"),
        }
    }
}

#[test]
fn a_record_is_no_other_file_of_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let [image, link, new] = ["image", "link", "new"].map(|name| dir.path().join(name));
    std::fs::write(&image, "kept").unwrap();
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let [image, link, new] = [&image, &link, &new].map(|path| path.to_str().unwrap());
    let newer = &format!("{}/./new", dir.path().display());
    for (words, refused) in [
        (format!("--disk {image} --record-dmas {new}"), false),
        (format!("--disk {image} --record-dmas {image}"), true),
        (format!("--disk {link} --record-requests {image}"), true),
        (format!("--record-requests {new} --record-dmas {new}"), true),
        (
            format!("--record-requests {new} --record-dmas {newer}"),
            true,
        ),
        (format!("--memory-file {new} --record-dmas {newer}"), true),
        (
            format!("--memory-file {newer} --record-requests {new}"),
            true,
        ),
        (format!("--memory-file {new} --record-dmas {image}"), false),
        (format!("--memory-file {new} --disk {newer}"), true),
        (format!("--memory-file {new} --disk {image}"), false),
    ] {
        let found = device_options(&parse(&words), Image::None);
        assert_eq!(found.is_err(), refused, "{words}");
    }
    assert_eq!(std::fs::read(image).unwrap(), b"kept");
}

/// `guest run` has a disk without `--disk`, and its mode without a file.
#[test]
fn a_disk_without_a_file_uses_the_image() {
    for image in [Image::Later, Image::At("disk.img".as_ref())] {
        for (words, sandbox) in [("", false), ("--disk mode=sandbox", true)] {
            let switches = Switches::of(&device_options(&parse(words), image).unwrap());
            assert!(switches.disk, "{words}");
            assert_eq!(switches.sandbox, sandbox, "{words}");
        }
    }
}

/// The image of `guest run` does not exist when the options are checked.
#[test]
fn a_record_may_have_the_name_of_the_placeholder() {
    let args = parse("--record-requests disk.img --record-dmas dmas");
    assert!(device_options(&args, Image::Later).is_ok());
    assert!(device_options(&args, Image::At("run/disk.img".as_ref())).is_ok());
    assert!(device_options(&args, Image::At("./disk.img".as_ref())).is_err());
    let named = parse("--disk disk.img --record-requests disk.img");
    assert!(device_options(&named, Image::Later).is_err());
}
