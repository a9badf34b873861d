//! Devices in processes of their own, most of which break out.
#![allow(missing_docs)]

#[path = "../client/guest.rs"]
mod guest;
#[path = "../client/rig.rs"]
#[allow(dead_code)]
mod rig;

mod apart;
mod breaches;
mod reached;
mod started;

use std::sync::{Arc, Mutex};

use ringfence_live::errant::Errant;
use ringfence_live::iommu::Iommu;
use ringfence_live::isolate::{Breach, Front, Grants, Image, Program, Said, start};
use ringfence_live::virtio::blk::Blk;
use ringfence_types::DeviceId;
use std::fs::File;
use std::os::fd::AsFd;

use guest::{ENDPOINT, Guest};

/// What was said about the process.
type Told = Arc<Mutex<Vec<String>>>;

fn program(behaviour: &str) -> Program {
    Program {
        path: env!("CARGO_BIN_EXE_ringfence-test-simulator").into(),
        arguments: vec![behaviour.into()],
    }
}

/// A guest whose disk is a process that behaves like this.
struct Apart {
    guest: Guest<Front>,
    iommu: Iommu,
    told: Told,
}

fn apart(behaviour: &str, errant: &[Errant], image: &File) -> Apart {
    let told = Told::default();
    let mut shared = None;
    let guest = Guest::with(|iommu, counters| {
        let disk = Blk::new(image.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
        let of = Image {
            file: image.as_fd(),
            read_only: false,
            errant,
        };
        let (grants, link) = start(&program(behaviour), &of, &counters).unwrap();
        let endpoint = iommu.set_apart(DeviceId::new(ENDPOINT as u16), grants);
        shared = Some(iommu.clone());
        let told = Arc::clone(&told);
        let tell = move |said: &Said<'_>| {
            let text = match said {
                Said::Ended(breach) => breach.to_string(),
                Said::Errant(tried) => tried.to_string(),
            };
            told.lock().unwrap().push(text);
        };
        Front::new(
            disk,
            link,
            iommu.clone(),
            endpoint,
            counters,
            Box::new(tell),
        )
    });
    Apart {
        guest,
        iommu: shared.unwrap(),
        told,
    }
}

impl Apart {
    fn breach(&self) -> Option<Breach> {
        let device = DeviceId::new(ENDPOINT as u16);
        self.iommu
            .with_grants(device, Grants::take_breach)
            .flatten()
    }

    fn broken(&mut self) -> bool {
        while self.guest.wait() {}
        self.guest.disk.register(0x14, 1) & 64 != 0
    }
}
