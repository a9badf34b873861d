//! Boots one guest of X29, which runs the loads one after the other.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use ringfence_experiments::guest_loads::{Bus, GuestLoads, Load, Machine, Promise, Protection};
use ringfence_live::daemon::METRICS;

use super::super::top::counters;
use super::echo_peer::EchoPeer;
use super::guest_runner::{GuestRunner, watch};
use super::load_counters::{Checkpoint, UNCOPIED, counts, merged, trace_counters};

/// Operations of a round, without those before the measurement.
const OPERATIONS: u32 = 128;
/// Datagrams of a round of a stream.
const DATAGRAMS: u32 = 1024;
/// Queue pairs of the network device.
const PAIRS: u32 = 4;

/// Kernel parameters that shorten a boot, as in `tests/guest`.
const APPEND: &str = "lsm= audit=0 cryptomgr.notests initcall_blacklist=jent_mod_init";

/// Files in the directory of a guest: its side of the network, the peer's, and QEMU's trace.
const HERE: &str = "here";
const THERE: &str = "there";
const TRACE: &str = "qemu.log";

/// Counts maps and unmaps of a pool that copy once, and copies of the same size.
const COUNT_UNCOPIED: &str = "dmesg -c >/dev/null
for once in 1 2; do insmod /modules/dma_count.ko device=$BLK to_device=1; rmmod dma_count; \
insmod /modules/dma_count.ko device=$BLK copies=1; rmmod dma_count; done
dmesg | grep dma_count:";

/// First part of a guest's script: counts maps and unmaps.
const COUNT: &str = "set -e
for once in 1 2; do insmod /modules/dma_count.ko device=$BLK; rmmod dma_count; done
dmesg | grep dma_count:";

/// The NVMe disk of a guest.
const NVME: &str = "/dev/nvme0n1";

/// Configures the network of a guest with virtio devices.
const CONFIGURE: &str = "disk=/dev/$(ls /sys/bus/pci/devices/$BLK/virtio*/block)
net=$(ls /sys/bus/pci/devices/$NET/virtio*/net)
echo 1 2>/dev/null >/proc/sys/net/ipv6/conf/$net/disable_ipv6 || true
ip addr add 10.9.0.1/24 dev $net
ip link set $net up
arp -s 10.9.0.2 02:00:00:00:00:02
net() { ringfence guest bench-net --interface $net --pairs $PAIRS \"$@\"; }";

/// Waits for the NVMe disk, whose driver makes it after the probe has returned.
const AWAIT_NVME: &str = "disk=/dev/nvme0n1
until [ -b $disk ]; do usleep 10000; done";

/// Checkpoint between two loads.
const MOMENT: &str = "moment() {
    grep -r . /sys/kernel/debug/pviommu /sys/kernel/debug/riommu \
/sys/kernel/debug/pooldma 2>/dev/null || true
    echo 'ringfence: moment'
    until read -t 0; do :; done; read -r
}";

/// Returns the command of a load.
fn command(load: Load) -> String {
    match load {
        Load::Read4K | Load::NvmeRead4K => {
            format!("ringfence guest bench-read $disk --count {OPERATIONS}")
        }
        Load::Read128K | Load::NvmeRead128K => {
            format!("ringfence guest bench-read $disk --count {OPERATIONS} --bytes 131072")
        }
        Load::Stream => format!("net stream 10.9.0.2 --count {DATAGRAMS}"),
        Load::RoundTrip => format!("net round-trips 10.9.0.2 --count {OPERATIONS}"),
    }
}

/// Returns the addresses of the counted disk and network device, and the network's queue pairs.
pub(super) const fn device_addresses(machine: Machine) -> (&'static str, &'static str, u32) {
    match machine {
        Machine::Ringfence => ("0000:00:04.0", "0000:00:05.0", PAIRS),
        Machine::Qemu => ("0000:00:06.0", "0000:00:07.0", 1),
    }
}

/// Returns the part of a script that lets the disk of this program access a buffer after its unmap,
/// and configures the devices.
fn configure(machine: Machine, bus: Bus) -> String {
    // Behind QEMU's devices, the disk of this program has a virtio interface.
    let served = match (machine, bus) {
        (Machine::Ringfence, Bus::Nvme) => NVME,
        _ => "/dev/vda",
    };
    let devices = match bus {
        Bus::Virtio => CONFIGURE,
        Bus::Nvme => AWAIT_NVME,
    };
    format!(
        "ringfence guest bench-read {served} --count 1 --after 65536 >/dev/null\n{devices}\n\
         {MOMENT}"
    )
}

/// Returns the script of the guest with a disk on `bus`.
fn script(protection: &Protection, bus: Bus, loads: &[Load]) -> String {
    let (disk, net, pairs) = device_addresses(protection.machine);
    let mut text = format!("BLK={disk}; NET={net}; PAIRS={pairs}\n{COUNT}\n");
    if protection.promise == Promise::Pool {
        text.push_str(&format!("echo '{UNCOPIED}'\n{COUNT_UNCOPIED}\n"));
    }
    text.push_str(&format!("{}\n", configure(protection.machine, bus)));
    for load in loads {
        let command = command(*load);
        text.push_str(&format!(
            "moment; for round in 1 2 3; do {command}; done; moment\n"
        ));
    }
    text
}

/// Returns the arguments of `guest run` for the guest of a protection with a disk on `bus`.
fn words(protection: &Protection, bus: Bus, dir: &Path) -> Vec<String> {
    let path = |name| dir.join(name).display().to_string();
    let mut words: Vec<String> = protection.options.iter().map(|w| (*w).to_owned()).collect();
    words.extend(["--inject-dma", "after-unmap"].map(str::to_owned));
    match (protection.machine, bus) {
        (Machine::Ringfence, Bus::Virtio) => {
            let link = format!("datagram={}:{},queues={PAIRS}", path(HERE), path(THERE));
            words.extend(["--net".to_owned(), link]);
        }
        (Machine::Ringfence, Bus::Nvme) => {
            words.extend(["--disk", "bus=nvme"].map(str::to_owned));
        }
        (Machine::Qemu, _) => {
            if bus == Bus::Nvme {
                words.extend(["--driver", "nvme"].map(str::to_owned));
            }
            let arguments = qemu_arguments(protection, bus, dir);
            // In one word, because the first argument begins with a hyphen.
            words.push(format!("--qemu-args={}", arguments.join(" ")));
        }
    }
    words
}

/// Returns QEMU's arguments for its own devices and the trace of its IOMMU.
fn qemu_arguments(protection: &Protection, bus: Bus, dir: &Path) -> Vec<String> {
    let path = |name| dir.join(name).display().to_string();
    let behind = match protection.options.contains(&"none") {
        true => "off",
        false => "on",
    };
    let device =
        |name: &str| format!("{name},disable-legacy=on,iommu_platform={behind},ioeventfd=off");
    // The disk answers late, so that the driver waits for it on every host.
    let drive = "driver=null-co,node-name=d,size=67108864,latency-ns=1000000,read-zeroes=on";
    let mut arguments = vec![("-blockdev", drive.to_owned())];
    match bus {
        Bus::Virtio => {
            let link = format!(
                "dgram,id=n,local.type=unix,local.path={},remote.type=unix,remote.path={}",
                path(HERE),
                path(THERE)
            );
            arguments.extend([
                (
                    "-device",
                    device("virtio-blk-pci,drive=d,addr=6.0,num-queues=1"),
                ),
                ("-netdev", link),
                (
                    "-device",
                    device("virtio-net-pci,netdev=n,addr=7.0,romfile="),
                ),
            ]);
        }
        // Any PCI device is behind the IOMMU. Without doorbells in memory (`dbcs`), which this
        // program's controller does not offer either, each command is two register writes.
        Bus::Nvme => arguments.push((
            "-device",
            "nvme,serial=x29,drive=d,addr=6.0,max_ioqpairs=1,ioeventfd=off,dbcs=off".into(),
        )),
    }
    arguments.extend([
        ("-D", path(TRACE)),
        ("-trace", "vtd_inv_desc_iotlb*".into()),
        ("-trace", "vtd_inv_qi_tail".into()),
    ]);
    let arguments = arguments.into_iter();
    arguments
        .map(|(option, value)| format!("{option} {value}"))
        .collect()
}

/// Returns the buses that have loads, and their loads.
fn by_bus(loads: &[Load]) -> Vec<(Bus, Vec<Load>)> {
    let of = |bus| {
        let loads = loads.iter().copied();
        (bus, loads.filter(|load| load.bus() == bus).collect())
    };
    let buses = Bus::ALL.map(of).into_iter();
    buses
        .filter(|(_, loads): &(Bus, Vec<Load>)| !loads.is_empty())
        .collect()
}

impl GuestRunner<'_> {
    /// Returns the command that boots the guest of a protection with a disk on `bus` in `dir`.
    fn loaded_guest(
        &self,
        protection: &Protection,
        (bus, loads): (Bus, &[Load]),
        dir: &Path,
    ) -> Command {
        let mut command = self.command("run");
        command.args(words(protection, bus, dir));
        command.arg("--dir").arg(dir).args(["--append", APPEND]);
        let limit = self.args.guest_timeout.to_string();
        command.args(["--icount", "--with-ringfence", "--timeout", &limit]);
        command.args(["--", "sh", "-c", &script(protection, bus, loads)]);
        command.stdin(Stdio::piped());
        command
    }

    /// Boots a guest of a protection for each bus of `loads`, and returns the counts of `loads`.
    /// All other counts are those of the first guest.
    pub(super) fn count_loads(
        &self,
        protection: &Protection,
        loads: &[Load],
    ) -> Result<GuestLoads, String> {
        let guests = by_bus(loads).into_iter();
        let guests = guests.map(|(bus, loads)| self.count_on(protection, bus, &loads));
        merged(guests.collect::<Result<_, _>>()?).ok_or_else(|| "no load was requested".into())
    }

    /// Boots the guest of a protection with a disk on `bus`.
    fn count_on(
        &self,
        protection: &Protection,
        bus: Bus,
        loads: &[Load],
    ) -> Result<GuestLoads, String> {
        let dir = self
            .dir
            .join(format!("{}-{}", self.kernel, protection.name));
        fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let mut command = self.loaded_guest(protection, (bus, loads), &dir);
        let mut checkpoints: Vec<Checkpoint> = Vec::new();
        let sampler = Sampler::new(&dir, protection.machine, loads);
        self.run(&mut command, |input, out| {
            let input = input.ok_or(io::ErrorKind::BrokenPipe)?;
            checkpoints = watch(input, out, || sampler.sample())?;
            Ok(())
        })?;
        drop(sampler);
        let _ = fs::remove_dir_all(&dir);
        counts(loads, protection.machine, &checkpoints)
    }
}

/// Reads the counters at the checkpoints of a guest.
struct Sampler<'a> {
    dir: &'a Path,
    machine: Machine,
    /// Checkpoint at which the round trips begin. Only they have a peer: without one, frames of a
    /// stream leave the device at once, whatever the host does.
    meets_peer: Option<usize>,
    taken: Cell<usize>,
    peer: Cell<Option<EchoPeer>>,
}

impl<'a> Sampler<'a> {
    fn new(dir: &'a Path, machine: Machine, loads: &[Load]) -> Self {
        let position = loads.iter().position(|load| *load == Load::RoundTrip);
        Self {
            dir,
            machine,
            meets_peer: position.map(|position| 2 * position),
            taken: Cell::new(0),
            peer: Cell::new(None),
        }
    }

    fn sample(&self) -> io::Result<String> {
        let checkpoint = self.taken.replace(self.taken.get() + 1);
        if self.meets_peer == Some(checkpoint) {
            let peer = EchoPeer::start(&self.dir.join(THERE), self.dir.join(HERE))?;
            self.peer.set(Some(peer));
        }
        let metrics = counters(&self.dir.join(METRICS))?;
        match self.machine {
            Machine::Ringfence => Ok(metrics),
            Machine::Qemu => {
                let log = fs::read_to_string(self.dir.join(TRACE))?;
                Ok(metrics + &trace_counters(&log))
            }
        }
    }
}

#[cfg(test)]
mod tests;
