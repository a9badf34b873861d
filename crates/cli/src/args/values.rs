//! Parsers of option values.

use std::num::NonZeroU8;
use std::time::Duration;

use ringfence_attack::Class;
use ringfence_experiments::Experiment;
use ringfence_experiments::guest_loads::{Load, PROTECTIONS, Protection};
use ringfence_experiments::guests::{Configuration, Kind};
use ringfence_lab::mapping_cache::Cycles;
use ringfence_lab::modes::Mode;
use ringfence_lab::{IommuFamily, IotlbPrefetch, LabError, Operation};
use ringfence_report::{Condition, ConditionError};
use ringfence_types::{Nanos, PageSize};

pub(super) fn named_mode(name: &str) -> Result<Mode, LabError> {
    Mode::find(name).ok_or_else(|| LabError::NoSuchMode(name.to_owned()))
}

/// Parses a mode whose IOTLB caches pages.
pub(super) fn paged_mode(name: &str) -> Result<Mode, String> {
    let mode = named_mode(name).map_err(|error| error.to_string())?;
    if mode.has_rings() || !mode.translates() {
        return Err("the mode does not map pages".into());
    }
    Ok(mode)
}

pub(super) fn experiment(id: &str) -> Result<&'static Experiment, String> {
    Experiment::find(id).ok_or_else(|| {
        let known: Vec<&str> = Experiment::ALL
            .iter()
            .map(|experiment| experiment.id)
            .collect();
        format!("the experiments are {}", known.join(", "))
    })
}

pub(super) fn attack_class(id: &str) -> Result<&'static Class, String> {
    Class::find(id).ok_or_else(|| "the attack classes are A01 to A38".into())
}

pub(super) fn kind(name: &str) -> Result<Kind, String> {
    let known = || Kind::ALL.map(Kind::word).join(", ");
    Kind::called(name).ok_or_else(|| format!("the kinds are {}", known()))
}

pub(super) fn configuration(name: &str) -> Result<Configuration, String> {
    let known = || Configuration::ALL.map(Configuration::name).join(", ");
    Configuration::called(name).ok_or_else(|| format!("the configurations are {}", known()))
}

pub(super) fn protection(name: &str) -> Result<&'static Protection, String> {
    let known = || PROTECTIONS.iter().map(|one| one.name).collect::<Vec<_>>();
    Protection::called(name).ok_or_else(|| format!("the protections are {}", known().join(", ")))
}

pub(super) fn load(name: &str) -> Result<Load, String> {
    let known = || Load::ALL.map(Load::name).join(", ");
    Load::called(name).ok_or_else(|| format!("the loads are {}", known()))
}

pub(super) fn conditions(text: &str) -> Result<Vec<Condition>, ConditionError> {
    Condition::parse_all(text)
}

/// Parses the largest page of a table.
pub(super) fn page_size(text: &str) -> Result<PageSize, String> {
    match text {
        "4k" => Ok(PageSize::Size4K),
        "64k" => Ok(PageSize::Size64K),
        "2m" => Ok(PageSize::Size2M),
        _ => Err("the page sizes are 4k, 64k and 2m".into()),
    }
}

/// Parses a prefetch into the IOTLB: a strategy, or a number of pages.
pub(super) fn prefetch(text: &str) -> Result<IotlbPrefetch, String> {
    if let Ok(pages) = text.parse() {
        return Ok(match NonZeroU8::MIN.get() == pages {
            true => IotlbPrefetch::NextPage,
            false => IotlbPrefetch::NextPages(
                NonZeroU8::new(pages).ok_or("prefetch at least one page, or use none")?,
            ),
        });
    }
    let found = IotlbPrefetch::ALL.into_iter().find(|it| it.name() == text);
    found.ok_or_else(|| {
        let known = IotlbPrefetch::ALL.map(IotlbPrefetch::name).join(", ");
        format!("a prefetch is a number of pages from 1 to 255, or one of {known}")
    })
}

/// Parses a line rate in Gb/s.
pub(super) fn gbps(text: &str) -> Result<f64, String> {
    /// Far above any link.
    const MAX: f64 = 1e6;
    match text.parse() {
        Ok(gbps) if gbps > 0.0 && gbps <= MAX => Ok(gbps),
        _ => Err(format!("a line rate is above 0 and at most {MAX} Gb/s")),
    }
}

pub(super) fn operation(name: &str) -> Result<Operation, String> {
    let known = || Operation::ALL.map(Operation::name).join(", ");
    let mut all = Operation::ALL.into_iter();
    all.find(|operation| operation.name() == name)
        .ok_or_else(|| format!("the operations are {}", known()))
}

pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("expected a number above 0".into()),
    }
}

pub(super) fn percent(text: &str) -> Result<f64, String> {
    let text = text.strip_suffix('%').unwrap_or(text);
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("expected per cent, at least 0".into()),
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1e6 => Ok(Duration::from_secs_f64(value)),
        _ => Err("expected seconds, above 0".into()),
    }
}

/// Parses a time with its unit, at most 1000 seconds.
pub(super) fn nanos(text: &str) -> Result<Nanos, String> {
    const MAX: u64 = 1_000_000_000_000;
    let wrong = || format!("{text:?} is no time from 0s to 1000s, such as 500us, 10ms or 1s");
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text.get(digits.len()..) {
        Some("ns") => 1,
        Some("us") => 1_000,
        Some("ms") => 1_000_000,
        Some("s") => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let number: Option<u64> = digits.parse().ok();
    let nanos = number.and_then(|number| number.checked_mul(unit));
    nanos
        .filter(|&nanos| nanos <= MAX)
        .map(Nanos)
        .ok_or_else(wrong)
}

/// Parses the page size of a kernel and returns its base-2 logarithm.
pub(super) fn kernel_page_shift(text: &str) -> Result<u8, String> {
    match text {
        "4k" => Ok(12),
        "16k" => Ok(14),
        "64k" => Ok(16),
        _ => Err("the page sizes of kernels are 4k, 16k and 64k".into()),
    }
}

pub(super) fn repetitions(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if number <= 10_000 => Ok(number),
        _ => Err("expected a number from 0 to 10000".into()),
    }
}

pub(super) fn iommu(text: &str) -> Result<IommuFamily, String> {
    let found = IommuFamily::ALL.into_iter();
    let mut found = found.filter(|family| family.name() == text);
    found.next().ok_or_else(|| {
        let known = IommuFamily::ALL.map(IommuFamily::name);
        format!("expected one of {}", known.join(", "))
    })
}

/// Parses seconds and returns nanoseconds.
pub(super) fn cycle_ns(text: &str) -> Result<u64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (1e-6..=1e6).contains(&seconds) => Ok((seconds * 1e9) as u64),
        _ => Err("expected 0.000001 to 1000000 seconds".into()),
    }
}

pub(super) fn cycles(text: &str) -> Result<Cycles, String> {
    let cycles = text.parse::<u8>().ok().and_then(Cycles::new);
    cycles.ok_or_else(|| format!("expected 1 to {}", Cycles::MAX))
}

pub(super) fn ring_entries(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(slots) if (1..1 << 18).contains(&slots) => Ok(slots),
        _ => Err("expected 1 to 262143 slots".into()),
    }
}

pub(super) fn iotlb(text: &str) -> Result<(u32, u32), String> {
    let wrong = || "expected SETSxWAYS, as in 16x4".to_owned();
    let (sets, ways) = text.split_once('x').ok_or_else(wrong)?;
    match (sets.parse::<u32>(), ways.parse::<u32>()) {
        (Ok(sets), Ok(ways)) => Ok((sets, ways)),
        _ => Err(wrong()),
    }
}

pub(super) fn walk_cache(text: &str) -> Result<[u32; 3], String> {
    let wrong = || "expected three numbers of entries, as in 32,16,4".to_owned();
    let parts: Vec<u32> = text
        .split(',')
        .map(|part| part.trim().parse::<u32>().ok())
        .collect::<Option<_>>()
        .ok_or_else(wrong)?;
    parts.try_into().map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_the_sizes_that_an_address_can_name() {
        assert_eq!(ring_entries("1"), Ok(1));
        assert_eq!(ring_entries("262143"), Ok(262_143));
        for wrong in ["0", "262144", "-1", "", "4096.0", "99999999999"] {
            assert!(ring_entries(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn cycles_have_a_length_and_a_number() {
        assert_eq!(cycle_ns("0.5"), Ok(500_000_000));
        assert_eq!(cycles("254").map(Cycles::get), Ok(254));
        for wrong in ["0", "-1", "nan", "inf", "1e9", ""] {
            assert!(cycle_ns(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0", "255", "-1", "1.5"] {
            assert!(cycles(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_have_units() {
        let cases = [
            ("0s", Some(0)),
            ("500us", Some(500_000)),
            ("10ms", Some(10_000_000)),
            ("1000s", Some(1_000_000_000_000)),
            ("7ns", Some(7)),
            ("1001s", None),
            ("99999999999999999999s", None),
            ("10", None),
            ("ms", None),
            ("-1s", None),
            ("1.5s", None),
            ("1h", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(nanos(text).ok(), expected.map(Nanos), "{text}");
        }
    }

    #[test]
    fn geometry_is_read() {
        assert_eq!(iotlb("16x4"), Ok((16, 4)));
        for wrong in ["", "16", "-1x4", "16x4x1", "x", "16x99999999999"] {
            assert!(iotlb(wrong).is_err(), "{wrong}");
        }
        assert_eq!(walk_cache("32,16,4"), Ok([32, 16, 4]));
        for wrong in ["", "1,2", "1,2,3,4", "a,b,c", "1,2,99999999999"] {
            assert!(walk_cache(wrong).is_err(), "{wrong}");
        }
    }
}
