use super::super::interrupt::Interrupt;
use super::*;
use crate::args::{Cli, ReproduceGuestArgs};
use clap::Parser as _;
use ringfence_experiments::guest_loads::PROTECTIONS;

fn args() -> ReproduceGuestArgs {
    ReproduceGuestArgs {
        guest_cache: "there/is/none".into(),
        guest_kernel: "6.12".into(),
        guest_timeout: 1,
        guest_kind: Vec::new(),
        guest_configuration: Vec::new(),
        module_source: "kmod".into(),
    }
}

fn runner<'a>(args: &'a ReproduceGuestArgs, stop: &'a Interrupt) -> GuestRunner<'a> {
    GuestRunner {
        program: "ringfence".into(),
        dir: "x".into(),
        kernel: "7.2",
        args,
        stop,
    }
}

/// Lets the disk access a buffer once, after its unmap.
const ACCESS: &str = "ringfence guest bench-read /dev/vda --count 1 --after 65536 >/dev/null\n";

/// The command of every guest is accepted by this program's own parser.
#[test]
fn guests_have_the_devices_and_the_iommu_of_their_row() {
    let (args, stop) = (args(), Interrupt::default());
    let runner = runner(&args, &stop);
    for protection in PROTECTIONS {
        let loads = (Bus::Virtio, &Load::ALL[..4]);
        let command = runner.loaded_guest(protection, loads, Path::new("d"));
        let words = std::iter::once("ringfence".as_ref()).chain(command.get_args());
        let parsed = Cli::try_parse_from(words);
        assert!(parsed.is_ok(), "{}", parsed.unwrap_err());
        let found: Vec<&str> = command
            .get_args()
            .map(|word| word.to_str().unwrap())
            .collect();
        let common = "guest run --kernel 7.2 --cache there/is/none --module-source kmod \
                      --with-module dma_count";
        let common: Vec<&str> = common.split_whitespace().collect();
        assert!(found.starts_with(&common), "{found:?}");
        let rest = &found[common.len()..];
        assert!(rest.starts_with(protection.options), "{rest:?}");
        let text = found.join(" ");
        let own = text.contains("--net datagram=d/here:d/there,queues=4");
        let of_qemu = text.contains("-device virtio-blk-pci,drive=d,addr=6.0")
            && text.contains("-device virtio-net-pci,netdev=n,addr=7.0")
            && text.contains("remote.path=d/there");
        let behind = text.matches("iommu_platform=on").count();
        let (qemu, intel) = match protection.name {
            "none-qemu" => (true, 0),
            "intel-strict" | "intel-lazy" | "intel-pool" => (true, 2),
            _ => (false, 0),
        };
        assert_eq!((own, of_qemu, behind), (!qemu, qemu, intel), "{text}");
        assert!(
            text.contains("--icount --with-ringfence --timeout 1"),
            "{text}"
        );
        assert!(text.contains("--inject-dma after-unmap"), "{text}");
    }
}

/// A guest with an NVMe disk has no network, and one disk that is counted.
#[test]
fn guests_with_an_nvme_disk_have_no_other_counted_device() {
    let (args, stop) = (args(), Interrupt::default());
    let runner = runner(&args, &stop);
    for protection in PROTECTIONS {
        let loads = (Bus::Nvme, &[Load::NvmeRead4K][..]);
        let command = runner.loaded_guest(protection, loads, Path::new("d"));
        let words = std::iter::once("ringfence".as_ref()).chain(command.get_args());
        let parsed = Cli::try_parse_from(words);
        assert!(parsed.is_ok(), "{}", parsed.unwrap_err());
        let words = command.get_args().map(|word| word.to_str().unwrap());
        let text = words.collect::<Vec<_>>().join(" ");
        let own = text.contains("--inject-dma after-unmap --disk bus=nvme --dir");
        let of_qemu = text.contains(
            "--driver nvme --qemu-args=-blockdev driver=null-co,node-name=d,size=67108864,\
             latency-ns=1000000,read-zeroes=on -device nvme,serial=x29,drive=d,addr=6.0,\
             max_ioqpairs=1,ioeventfd=off,dbcs=off -D d/qemu.log -trace vtd_inv_desc_iotlb* \
             -trace vtd_inv_qi_tail --dir",
        );
        let qemu = protection.machine == Machine::Qemu;
        assert_eq!((own, of_qemu), (!qemu, qemu), "{text}");
        assert!(
            !text.contains("--net") && !text.contains("virtio-"),
            "{text}"
        );
    }
}

/// One guest for each bus with loads, in the order of the buses.
#[test]
fn loads_are_split_by_bus() {
    let [read, _, _, trip, small, large] = Load::ALL;
    let nvme = (Bus::Nvme, vec![small, large]);
    assert_eq!(
        by_bus(&[read, trip, small, large]),
        [(Bus::Virtio, vec![read, trip]), nvme.clone()]
    );
    assert_eq!(by_bus(&[small, large]), [nvme]);
    assert_eq!(by_bus(&[trip]), [(Bus::Virtio, vec![trip])]);
    assert_eq!(by_bus(&[]), []);
}

#[test]
fn scripts_of_nvme_guests_read_their_nvme_disk() {
    for (name, served) in [
        ("virtio-lazy", "/dev/nvme0n1"),
        // The disk that accesses a buffer after its unmap is the one of this program.
        ("intel-lazy", "/dev/vda"),
    ] {
        let protection = Protection::called(name).unwrap();
        let text = script(protection, Bus::Nvme, &[Load::NvmeRead128K]);
        let (_, rest) = text.split_once(&format!("{COUNT}\n")).unwrap();
        assert_eq!(
            rest,
            format!(
                "ringfence guest bench-read {served} --count 1 --after 65536 >/dev/null\n\
                 disk=/dev/nvme0n1\nuntil [ -b $disk ]; do usleep 10000; done\n{MOMENT}\n\
                 moment; for round in 1 2 3; do ringfence guest bench-read $disk --count 128 \
                 --bytes 131072; done; moment\n"
            )
        );
    }
}

#[test]
fn scripts_run_each_load_between_two_checkpoints() {
    for (name, addresses) in [
        (
            "virtio-lazy",
            "BLK=0000:00:04.0; NET=0000:00:05.0; PAIRS=4\n",
        ),
        (
            "intel-lazy",
            "BLK=0000:00:06.0; NET=0000:00:07.0; PAIRS=1\n",
        ),
    ] {
        let protection = Protection::called(name).unwrap();
        let text = script(protection, Bus::Virtio, &[Load::Read128K, Load::RoundTrip]);
        let begin = format!("{addresses}{COUNT}\n{ACCESS}{CONFIGURE}\n{MOMENT}\n");
        assert_eq!(
            text.strip_prefix(&begin).unwrap(),
            "moment; for round in 1 2 3; do ringfence guest bench-read $disk --count 128 --bytes \
             131072; done; moment\n\
             moment; for round in 1 2 3; do net round-trips 10.9.0.2 --count 128; done; moment\n"
        );
    }
    let all = Load::ALL.map(command);
    assert_eq!(all[0], "ringfence guest bench-read $disk --count 128");
    assert_eq!(all[2], "net stream 10.9.0.2 --count 1024");
    assert_eq!(all[0], all[4]);
}

/// The module counts the disk's maps before any load, twice. If the IOMMU copies, it counts maps of
/// one direction and copies alone as well. The disk accesses a buffer once.
#[test]
fn scripts_count_maps_before_the_loads() {
    let run =
        |more: &str| format!("insmod /modules/dma_count.ko device=$BLK{more}; rmmod dma_count; ");
    let twice = |runs: &str| format!("for once in 1 2; do {runs}done\ndmesg | grep dma_count:");
    assert_eq!(COUNT, format!("set -e\n{}", twice(&run(""))));
    let pairs = run(" to_device=1") + &run(" copies=1");
    let again = format!(
        "{COUNT}\necho '{UNCOPIED}'\ndmesg -c >/dev/null\n{}\n{ACCESS}{CONFIGURE}\n",
        twice(&pairs)
    );
    for protection in PROTECTIONS {
        let counts = script(protection, Bus::Virtio, &[]).contains(&again);
        assert_eq!(counts, protection.promise == Promise::Pool);
    }
}

/// The peer exists from the first checkpoint of the round trips.
#[test]
fn only_round_trips_have_a_peer() {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(TRACE), "vtd_inv_qi_tail write tail 12\n").unwrap();
    let socket = UnixListener::bind(dir.path().join(METRICS)).unwrap();
    let served = std::thread::spawn(move || {
        for client in socket.incoming().take(5) {
            client.unwrap().write_all(b"metrics\n").unwrap();
        }
    });
    let loads = [Load::Read4K, Load::RoundTrip];
    let sampler = Sampler::new(dir.path(), Machine::Qemu, &loads);
    let there = dir.path().join(THERE);
    for exists in [false, false, true, true] {
        let text = sampler.sample().unwrap();
        assert!(text.starts_with("metrics\nringfence_qemu_"), "{text}");
        assert_eq!(there.exists(), exists);
    }
    drop(sampler);
    // This program's own devices have no trace of QEMU.
    let sampler = Sampler::new(dir.path(), Machine::Ringfence, &[Load::Stream]);
    assert_eq!(sampler.sample().unwrap(), "metrics\n");
    served.join().unwrap();
}
