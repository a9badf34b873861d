use std::sync::Mutex;

use super::*;
use ringfence_experiments::guest_loads::LoadCounts;

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

fn selected(iommus: &[&str], loads: &[Load]) -> ReproduceLoadArgs {
    ReproduceLoadArgs {
        load_kernel: vec!["6.12".into()],
        load_iommu: iommus
            .iter()
            .map(|name| Protection::called(name).unwrap())
            .collect(),
        load: loads.to_vec(),
    }
}

/// Counts that differ for each protection.
fn counts(protection: &Protection) -> GuestLoads {
    let index = PROTECTIONS.iter().position(|one| one == protection);
    GuestLoads {
        map_unmap: index.unwrap() as f64,
        uncopied: None,
        exposure: None,
        loads: Vec::new(),
    }
}

#[test]
fn all_does_not_fetch() {
    let found = count(&args(), &selected(&[], &[]), false).unwrap();
    let (Loads::None(why), false) = found else {
        panic!("guests from nowhere");
    };
    assert!(
        why.contains("there/is/none") && why.contains("reproduce X29"),
        "{why}"
    );
    assert!(!args().guest_cache.exists());
}

#[test]
fn requested_loads_and_iommus_run_in_the_order_of_the_table() {
    assert_eq!(loads(&selected(&[], &[])), Load::ALL);
    let some = selected(
        &["intel-lazy", "none", "riommu-strict"],
        &[Load::Stream, Load::Read4K],
    );
    assert_eq!(loads(&some), [Load::Read4K, Load::Stream]);
    let names = |selected| {
        let protections = protections(selected).into_iter();
        protections.map(|one| one.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&some), ["none", "riommu-strict", "intel-lazy"]);
    assert_eq!(names(&selected(&[], &[])).len(), PROTECTIONS.len());
}

#[test]
fn each_requested_guest_boots_once_and_gets_its_counts() {
    let booted = Mutex::new(Vec::new());
    let asked = protections(&selected(&["none", "pviommu", "intel-strict"], &[]));
    let found = all(asked.clone(), "6.12", &Interrupt::default(), |protection| {
        booted.lock().unwrap().push(protection.name);
        match protection.name {
            "pviommu" => Err("no QEMU".into()),
            _ => Ok(counts(protection)),
        }
    });
    let mut booted = booted.into_inner().unwrap();
    booted.sort_unstable();
    assert_eq!(booted, ["intel-strict", "none", "pviommu"]);
    let wanted = asked.into_iter().map(|protection| LoadGuest {
        protection,
        counts: match protection.name {
            "pviommu" => Err("no QEMU".into()),
            _ => Ok(counts(protection)),
        },
    });
    assert_eq!(found, wanted.collect::<Vec<_>>());
}

#[test]
fn no_guest_boots_after_an_interrupt() {
    let stop = Interrupt::default();
    stop.request();
    let found = all(protections(&selected(&[], &[])), "6.12", &stop, |_| {
        panic!("a guest was booted")
    });
    assert_eq!(found.len(), PROTECTIONS.len());
    assert!(found.iter().all(|guest| guest.counts.is_err()));
}

#[test]
fn a_line_has_each_load_and_the_exposure() {
    let one = LoadCounts {
        instructions: 11036.4,
        spread: 7.0,
        exits: 0.25,
        device_exits: None,
        invalidations: 0.5,
        unmaps: None,
    };
    let counts = GuestLoads {
        map_unmap: 334.0,
        uncopied: Some(200.0),
        exposure: Some(ringfence_experiments::guest_loads::StaleAccesses {
            tried: 1,
            reached: 0,
        }),
        loads: vec![(Load::Stream, one)],
    };
    assert_eq!(
        line(&counts),
        "map and unmap: 334 instructions, 200 without the copy; stream: 11036 instructions, \
         0.250 exits, 0.500 invalidations; 0 of 1 accesses after unmap reached memory"
    );
}
