use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::*;

/// Creates the files of an instance as the kernel does, with an empty trace.
fn instance(name: &str) -> Instance {
    let made = tempfile::Builder::new().prefix(name).tempdir().unwrap();
    let path = made.keep();
    for folder in [
        "options",
        "events/dma",
        "events/iommu/map",
        "events/iommu/unmap",
        "per_cpu/cpu0",
        "per_cpu/cpu1",
    ] {
        fs::create_dir_all(path.join(folder)).unwrap();
    }
    fs::write(path.join("trace"), "# tracer: nop\n").unwrap();
    let stats = "entries: 5\noverrun: 3\ncommit overrun: 1000\ndropped events: 4\n";
    fs::write(path.join("per_cpu/cpu0/stats"), stats).unwrap();
    fs::write(path.join("per_cpu/cpu1/stats"), stats).unwrap();
    Instance { path }
}

fn read(path: &Path, file: &str) -> String {
    fs::read_to_string(path.join(file)).unwrap_or_else(|_| "-".to_owned())
}

#[test]
fn recording_enables_and_restores_tracing() {
    let instance = instance("command");
    let path = instance.path.clone();
    let mut command = Command::new("sh");
    // The workload reads the settings that the kernel would trace with.
    let script = "cat tracing_on buffer_size_kb options/overwrite events/dma/enable \
                  events/iommu/map/enable events/iommu/unmap/enable >> trace; exit 3";
    command.current_dir(&path).args(["-c", script]);
    let mut out = Vec::new();
    let recording = Recording {
        buffer_kib: 77,
        ..Recording::default()
    };
    let stop = AtomicBool::new(false);
    let recorded = recording
        .record(
            &instance,
            true,
            Workload::Command(&mut command),
            &stop,
            &mut out,
        )
        .unwrap();
    let text = "# tracer: nop\n1770111CPU:0 [LOST 1004 EVENTS]\nCPU:1 [LOST 1004 EVENTS]\n";
    assert_eq!(recorded.bytes, text.len() as u64);
    assert_eq!(String::from_utf8(out).unwrap(), text);
    assert_eq!((recorded.lost, recorded.iommu_events), (2014, true));
    assert_eq!(recorded.status.and_then(|status| status.code()), Some(3));
    drop(instance);
    assert_eq!(read(&path, "tracing_on"), "0");
    assert_eq!(read(&path, "events/enable"), "0");
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn page_events_are_enabled_and_domains_are_named() {
    let instance = instance("pages");
    let path = instance.path.clone();
    for event in PAGE_EVENTS {
        fs::create_dir_all(path.join("events/kmem").join(event)).unwrap();
    }
    let groups = tempfile::tempdir().unwrap();
    for (group, device, kind) in [("0", "0000:00:04.0", "DMA\n"), ("1", "usb", "DMA-FQ\n")] {
        fs::create_dir_all(groups.path().join(group).join("devices").join(device)).unwrap();
        fs::write(groups.path().join(group).join("type"), kind).unwrap();
    }
    fs::create_dir(groups.path().join("2")).unwrap();
    let recording = Recording {
        pages: Some(PageRecording {
            iommu_groups: groups.path().to_owned(),
        }),
        ..Recording::default()
    };
    let (stop, mut out) = (AtomicBool::new(true), Vec::new());
    let workload = Workload::Time(Duration::ZERO);
    let recorded = recording
        .record(&instance, true, workload, &stop, &mut out)
        .unwrap();
    let text = String::from_utf8(out).unwrap();
    let types = "# iommu_group 0000:00:04.0 DMA\n# iommu_group usb DMA-FQ\n";
    assert!(
        text.starts_with(&format!("{types}# tracer: nop\n")),
        "{text}"
    );
    assert_eq!(recorded.bytes, text.len() as u64);
    for event in PAGE_EVENTS {
        assert_eq!(read(&path, &format!("events/kmem/{event}/enable")), "1");
    }
    drop(instance);
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn every_error_and_a_stop_leave_the_switches_off() {
    let stop = AtomicBool::new(true);
    let go = AtomicBool::new(false);
    let long = || Workload::Time(Duration::from_secs(3600));
    let recording = Recording::default();
    // The stop takes effect at once, although the workload lasts an hour.
    let stopped = instance("stopped");
    let path = stopped.path.clone();
    assert!(
        recording
            .record(&stopped, true, long(), &stop, &mut Vec::new())
            .is_ok()
    );
    drop(stopped);
    assert_eq!(read(&path, "tracing_on"), "0");
    fs::remove_dir_all(path).unwrap();
    // A missing switch, a missing command, missing statistics.
    for (name, missing) in [("switch", "options"), ("command", ""), ("stats", "per_cpu")] {
        let broken = instance(&format!("no-{name}"));
        let path = broken.path.clone();
        if !missing.is_empty() {
            fs::remove_dir_all(path.join(missing)).unwrap();
        }
        let mut command = Command::new("no-such-command");
        let workload = match name {
            "command" => Workload::Command(&mut command),
            _ => Workload::Time(Duration::ZERO),
        };
        let result = recording.record(&broken, true, workload, &go, &mut Vec::new());
        match name {
            "command" => assert!(matches!(result, Err(RecordError::Command { .. }))),
            _ => assert!(matches!(result, Err(RecordError::Io { .. })), "{result:?}"),
        }
        drop(broken);
        assert_eq!(read(&path, "tracing_on"), "0", "{name}");
        assert_eq!(read(&path, "events/enable"), "0", "{name}");
        fs::remove_dir_all(path).unwrap();
    }
}

#[test]
fn the_clock_is_the_hosts_where_processors_agree_on_it() {
    let root = tempfile::tempdir().unwrap().keep();
    let recording = Recording {
        tracefs: root.clone(),
        ..Recording::default()
    };
    assert_eq!(recording.clock(), None, "a kernel without the file");
    for (clocks, clock) in [
        ("[local] global counter mono x86-tsc\n", None),
        ("local [global] counter mono x86-tsc\n", Some("global")),
        ("local global counter [mono] x86-tsc\n", Some("mono")),
        // This clock does not count seconds, so the reader could not parse the text.
        ("local global [counter] mono x86-tsc\n", None),
        ("local global counter mono [x86-tsc]\n", None),
        ("[", None),
    ] {
        fs::write(root.join("trace_clock"), clocks).unwrap();
        assert_eq!(recording.clock(), clock, "{clocks}");
    }
    // The recording sets the clock.
    fs::write(root.join("trace_clock"), "local [boot]").unwrap();
    let instance = instance("with-clock");
    let path = instance.path.clone();
    let stop = AtomicBool::new(true);
    let workload = Workload::Time(Duration::ZERO);
    recording
        .record(&instance, true, workload, &stop, &mut Vec::new())
        .unwrap();
    assert_eq!(read(&path, "trace_clock"), "boot");
    drop(instance);
    fs::remove_dir_all(path).unwrap();
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn killed_command_is_not_a_failure() {
    let stopped = AtomicBool::new(true);
    let running = AtomicBool::new(false);
    let end = |script: &str, stop: &AtomicBool| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let status = Workload::Command(&mut command).wait(stop).unwrap();
        status.map(|status| status.code())
    };
    for (script, alone) in [
        ("exit 0", Some(Some(0))),
        ("exit 3", Some(Some(3))),
        ("kill -TERM $$", Some(None)),
    ] {
        assert_eq!(end(script, &running), alone, "{script}");
    }
    for script in ["exit 3", "kill -TERM $$", "exec sleep 3600"] {
        assert_eq!(end(script, &stopped), None, "{script}");
    }
}

#[test]
fn a_full_output_and_short_memory_are_errors_of_their_own() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self
                .0
                .checked_sub(bytes.len())
                .ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let stop = AtomicBool::new(true);
    let recording = Recording::default();
    // No room for the header; room for the header, but not for the lost events.
    for room in [0, 20] {
        let instance = instance("full");
        let path = instance.path.clone();
        let workload = Workload::Time(Duration::ZERO);
        let result = recording.record(&instance, true, workload, &stop, &mut Full(room));
        assert!(
            matches!(result, Err(RecordError::Output { .. })),
            "{result:?}"
        );
        drop(instance);
        fs::remove_dir_all(path).unwrap();
    }
    let at = |kind: io::ErrorKind| RecordError::at("buffer_size_kb".as_ref(), kind.into());
    let short = recording.without_memory(at(io::ErrorKind::OutOfMemory));
    assert!(
        matches!(short, RecordError::NoMemory { buffer_kib: 65_536 }),
        "{short:?}"
    );
    let other = recording.without_memory(at(io::ErrorKind::InvalidInput));
    assert!(matches!(other, RecordError::Io { .. }), "{other:?}");
}
