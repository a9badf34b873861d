//! Parser of the files in `vectors`. The first lines of each file describe its format.

use ringfence_pviommu::backend::RestoreError;
use ringfence_pviommu::wire::{
    Config, ConfigError, Devid, Event, EventReason, Gpa, Status, StreamError, StreamErrorKind,
};
use ringfence_types::{Access, AddressRange, Direction, Iova, IovaRange};

/// A range of guest memory, both ends included.
pub(crate) type GpaRange = AddressRange<ringfence_pviommu::wire::GuestPhysical>;

/// A `config` line.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    /// Name by which the vectors refer to this line.
    pub(crate) name: String,
    /// Configuration space of the device.
    pub(crate) config: Config,
    /// Ranges of guest memory.
    pub(crate) memory: Vec<GpaRange>,
    /// Maximum number of mappings of each device.
    pub(crate) mappings_max: u64,
    /// True if every operation of the host fails.
    pub(crate) failing: bool,
}

/// A request and the status that the device must return.
#[derive(Debug, Clone)]
pub(crate) struct Vector {
    /// Name of the request, for failure messages.
    pub(crate) name: String,
    /// Bytes of the request.
    pub(crate) bytes: Vec<u8>,
    /// Status that the device must return.
    pub(crate) status: Status,
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text} is no number"))
}

/// Parses a list of devices; `-` is empty.
fn ids(text: &str) -> Vec<u32> {
    let listed = text.split(',').filter(|id| *id != "-");
    listed.map(|id| number(id) as u32).collect()
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
            ids(text("devices")),
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

/// Returns the lines that are neither empty nor comments.
fn lines(text: &'static str) -> impl Iterator<Item = &'static str> {
    let says = |line: &&str| !line.is_empty() && !line.starts_with('#');
    text.lines().filter(says)
}

/// Groups the lines by their `config` line. `vector` parses a line from its name, bytes and
/// remaining words.
fn under_settings<V>(
    text: &'static str,
    vector: impl Fn(&'static str, Vec<u8>, &'static str) -> V,
) -> Vec<(Setting, Vec<V>)> {
    let mut all: Vec<(Setting, Vec<V>)> = Vec::new();
    for line in lines(text) {
        if let Some(line) = line.strip_prefix("config ") {
            all.push((setting(line), Vec::new()));
            continue;
        }
        let (setting, found) = all.last_mut().expect("a config line comes first");
        let fields: Vec<&str> = line.splitn(4, ' ').collect();
        let [name, config, hex, rest] = fields[..] else {
            panic!("{line}");
        };
        assert_eq!(config, setting.name, "{name}");
        found.push(vector(name, bytes(hex), rest));
    }
    all
}

/// Splits lines into name, bytes and remaining words.
fn with_words(
    text: &'static str,
) -> impl Iterator<Item = (&'static str, Vec<u8>, Vec<&'static str>)> {
    lines(text).map(|line| {
        let mut words = line.split(' ');
        let (name, hex) = (words.next().expect("a name"), words.next().expect(line));
        (name, bytes(hex), words.collect())
    })
}

/// Returns the requests, grouped by setting.
pub(crate) fn all() -> Vec<(Setting, Vec<Vector>)> {
    let text = include_str!("../../vectors/requests.txt");
    under_settings(text, |name, bytes, status| {
        let raw = number(status) as u8;
        let status = Status::from_raw(raw);
        assert_eq!(status.raw(), raw, "{name}");
        Vector {
            name: String::from(name),
            bytes,
            status,
        }
    })
}

/// A configuration space.
pub(crate) struct ConfigVector {
    pub(crate) name: &'static str,
    pub(crate) bytes: Vec<u8>,
    pub(crate) says: Result<Config, ConfigError>,
    /// True if a device encodes it exactly like this.
    pub(crate) written: bool,
}

/// Returns the configuration spaces.
pub(crate) fn configurations() -> Vec<ConfigVector> {
    let all = with_words(include_str!("../../vectors/configurations.txt"));
    all.map(|(name, bytes, words)| {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("a word"));
        let says = match words[..] {
            ["ok" | "accepted", first, last, pages_max, devices] => {
                let [first, last] = [first, last].map(|text| Iova::new(number(text)));
                let window = IovaRange::inclusive(first, last).expect(name);
                let pages_max = number(pages_max) as u32;
                Ok(Config::new(window, pages_max, ids(devices)).expect(name))
            }
            ["version"] => Err(ConfigError::Version(word(28))),
            ["window"] => Err(ConfigError::Window),
            ["pages-max"] => Err(ConfigError::PagesMax(word(16))),
            ["devices"] => Err(ConfigError::Devices),
            _ => panic!("{name}: {words:?}"),
        };
        ConfigVector {
            name,
            bytes,
            says,
            written: words[0] == "ok",
        }
    })
    .collect()
}

/// Returns events: name, bytes and decoded event.
pub(crate) fn events() -> Vec<(&'static str, Vec<u8>, Option<Event>)> {
    let all = with_words(include_str!("../../vectors/events.txt"));
    all.map(|(name, bytes, words)| {
        let says = match words[..] {
            ["ok", device, access, reason, giova] => Some(Event {
                device: Devid::new(number(device)),
                access: match number(access) {
                    1 => Access::Read,
                    2 => Access::Write,
                    _ => panic!("{name}"),
                },
                reason: match number(reason) {
                    1 => EventReason::NotMapped,
                    2 => EventReason::Direction,
                    _ => panic!("{name}"),
                },
                giova: Iova::new(number(giova)),
            }),
            ["dropped"] => None,
            _ => panic!("{name}: {words:?}"),
        };
        (name, bytes, says)
    })
    .collect()
}

/// A record: device, direction, first page, GPAs.
pub(crate) type StreamRecord = (Devid, Direction, Iova, Vec<Gpa>);

/// A migration stream.
#[derive(Debug, Clone)]
pub(crate) struct StreamVector {
    /// Name of the stream, for failure messages.
    pub(crate) name: &'static str,
    /// Bytes of the stream.
    pub(crate) bytes: Vec<u8>,
    /// Result that restoring it must have.
    pub(crate) end: StreamResult,
}

/// Result of restoring a stream.
#[derive(Debug, Clone)]
pub(crate) enum StreamResult {
    /// The stream is accepted. `canonical` is true if a host with these mappings exports the same
    /// bytes.
    Accepted {
        records: Vec<StreamRecord>,
        canonical: bool,
    },
    /// The stream is malformed.
    Malformed(StreamError),
    /// The stream is well-formed, but a record is refused.
    Refused { record: u64, status: Status },
}

impl StreamResult {
    /// Returns true if `error` is this result.
    pub(crate) fn is(&self, error: &RestoreError) -> bool {
        match (self, error) {
            (Self::Malformed(wanted), RestoreError::Stream(error)) => wanted == error,
            (
                Self::Refused { record, status },
                RestoreError::Refused {
                    record: at,
                    status: with,
                    ..
                },
            ) => record == at && status == with,
            _ => false,
        }
    }
}

fn stream_record(record: &str) -> StreamRecord {
    let parts: Vec<&str> = record.split(':').collect();
    let [device, direction, first, gpas] = parts[..] else {
        panic!("{record}");
    };
    let direction = match number(direction) {
        0 => Direction::Bidirectional,
        1 => Direction::ToDevice,
        2 => Direction::FromDevice,
        _ => panic!("{record}"),
    };
    let gpas = gpas.split(',').map(|gpa| Gpa::new(number(gpa))).collect();
    let (device, first) = (Devid::new(number(device)), Iova::new(number(first)));
    (device, direction, first, gpas)
}

fn refusal(record: &str, kind: &str) -> StreamResult {
    let record = number(record);
    let parts: Vec<&str> = kind.split(':').collect();
    let kind = match parts[..] {
        ["status", raw] => {
            let status = Status::from_raw(number(raw) as u8);
            return StreamResult::Refused { record, status };
        }
        ["magic"] => StreamErrorKind::Magic,
        ["checksum", stated, computed] => StreamErrorKind::Checksum {
            stated: number(stated) as u32,
            computed: number(computed) as u32,
        },
        ["too-short"] => StreamErrorKind::TooShort,
        ["too-long"] => StreamErrorKind::TooLong,
        ["direction", raw] => StreamErrorKind::Direction(number(raw) as u32),
        ["range"] => StreamErrorKind::Range,
        ["order"] => StreamErrorKind::Order,
        _ => panic!("{kind}"),
    };
    StreamResult::Malformed(StreamError { record, kind })
}

/// Returns the migration streams, grouped by setting.
pub(crate) fn streams() -> Vec<(Setting, Vec<StreamVector>)> {
    let text = include_str!("../../vectors/streams.txt");
    under_settings(text, |name, bytes, rest| {
        let words: Vec<&str> = rest.split(' ').collect();
        let end = match words[..] {
            ["refused", record, kind] => refusal(record, kind),
            [how @ ("canonical" | "accepted"), ref records @ ..] => StreamResult::Accepted {
                records: records.iter().copied().map(stream_record).collect(),
                canonical: how == "canonical",
            },
            _ => panic!("{name}: {rest}"),
        };
        StreamVector { name, bytes, end }
    })
}
