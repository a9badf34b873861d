//! `vectors/requests.txt`, read.

use ringfence_pviommu::wire::{Config, Gpa, Status};
use ringfence_types::{AddressRange, Iova, IovaRange};

/// Ranges of guest memory, both ends included.
pub(crate) type GpaRange = AddressRange<ringfence_pviommu::wire::GuestPhysical>;

/// A `config` line.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    /// Its name.
    pub(crate) name: String,
    /// The configuration space.
    pub(crate) config: Config,
    /// The guest's memory.
    pub(crate) memory: Vec<GpaRange>,
    /// Mappings of each device.
    pub(crate) mappings_max: u64,
    /// Whether the host can change anything.
    pub(crate) failing: bool,
}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Vector {
    /// Its name.
    pub(crate) name: String,
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
    /// What answers it.
    pub(crate) status: Status,
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text} is no number"))
}

fn setting(line: &str) -> Setting {
    let mut words = line.split(' ');
    let name = words.next().expect("a name").to_owned();
    let pairs: Vec<(&str, &str)> = words.map(|pair| pair.split_once('=').expect("=")).collect();
    let text = |key: &str| {
        let found = pairs.iter().find(|(name, _)| *name == key);
        found.unwrap_or_else(|| panic!("{name} lacks {key}")).1
    };
    let value = |key: &str| number(text(key));
    let window = IovaRange::inclusive(
        Iova::new(value("giova_first")),
        Iova::new(value("giova_last")),
    );
    Setting {
        config: Config::new(
            window.expect("a window"),
            value("pages_max") as u32,
            value("device_first") as u32,
            value("device_last") as u32,
        )
        .expect("a sound configuration"),
        memory: text("memory")
            .split(',')
            .map(|range| {
                let (first, last) = range.split_once('-').expect("a range");
                GpaRange::inclusive(Gpa::new(number(first)), Gpa::new(number(last)))
                    .expect("a range")
            })
            .collect(),
        mappings_max: value("mappings_max"),
        failing: text("host") == "failing",
        name,
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    if hex == "-" {
        return Vec::new();
    }
    assert!(hex.len().is_multiple_of(2), "{hex}");
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
        .collect()
}

/// All of the file, setting by setting.
pub(crate) fn all() -> Vec<(Setting, Vec<Vector>)> {
    let text = include_str!("../../vectors/requests.txt");
    let mut all: Vec<(Setting, Vec<Vector>)> = Vec::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(line) = line.strip_prefix("config ") {
            all.push((setting(line), Vec::new()));
            continue;
        }
        let (setting, vectors) = all.last_mut().expect("a config line comes first");
        let fields: Vec<&str> = line.split(' ').collect();
        let [name, config, hex, status] = fields[..] else {
            panic!("{line}");
        };
        assert_eq!(config, setting.name, "{name}");
        let status = number(status) as u8;
        vectors.push(Vector {
            name: name.to_owned(),
            bytes: bytes(hex),
            status: Status::from_raw(status),
        });
        assert_eq!(Status::from_raw(status).raw(), status, "{name}");
    }
    all
}
