//! Numbers for people.

/// Formats cycles: integers, with tenths below ten.
pub(super) fn cycles(value: f64) -> String {
    if value.abs() < 9.95 && value != 0.0 {
        format!("{value:.1}")
    } else {
        grouped_f64(value)
    }
}

/// Formats the cycles of a component; as `<n` if they are below the resolution of n cycles.
pub(super) fn component(value: f64, resolution: f64) -> String {
    if value < resolution {
        format!("<{}", grouped_f64(resolution.ceil()))
    } else {
        cycles(value)
    }
}

/// Formats a count with thousands separators.
pub(super) fn count(value: u64) -> String {
    let digits = value.to_string();
    group(&digits)
}

fn grouped_f64(value: f64) -> String {
    let rounded = format!("{value:.0}");
    match rounded.strip_prefix('-') {
        Some("0") => "0".to_owned(),
        Some(digits) => format!("-{}", group(digits)),
        None => group(&rounded),
    }
}

/// Separates thousands by commas from five digits on: 2150 stays as is.
fn group(digits: &str) -> String {
    if digits.len() <= 4 {
        return digits.to_owned();
    }
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a share in per cent.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Formats a share in per cent with one decimal; a dash if `whole` is 0.
pub(super) fn percent_of(share: f64, whole: u64) -> String {
    if whole == 0 {
        "-".to_owned()
    } else {
        format!("{:.1}%", share * 100.0)
    }
}

/// Formats a number; a dash for `None`.
pub(super) fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), text)
}

/// Formats a time span in nanoseconds.
pub(super) fn span(nanos: u64) -> String {
    let value = nanos as f64;
    match nanos {
        0 => "0".to_owned(),
        1..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => short(value / 1e3, "us"),
        1_000_000..1_000_000_000 => short(value / 1e6, "ms"),
        _ => short(value / 1e9, "s"),
    }
}

/// Formats an amount of memory.
pub(super) fn bytes(value: u64) -> String {
    match value {
        0..1024 => format!("{value} B"),
        1024..1_048_576 => short(value as f64 / 1024.0, "KiB"),
        _ => short(value as f64 / 1_048_576.0, "MiB"),
    }
}

/// Formats bytes times seconds, which span many orders of magnitude.
pub(super) fn byte_seconds(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value >= 1e6 {
        format!("{:.1}M", value / 1e6)
    } else if value >= 1e3 {
        format!("{:.1}k", value / 1e3)
    } else {
        short(value, "").trim_end().to_owned()
    }
}

/// Formats three significant digits.
fn short(value: f64, unit: &str) -> String {
    let decimals = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        let cases = [
            (cycles(0.0), "0"),
            (cycles(9.94), "9.9"),
            (cycles(9.96), "10"),
            (cycles(2150.4), "2150"),
            (cycles(14830.0), "14,830"),
            (cycles(-0.2), "-0.2"),
            (cycles(-12345.0), "-12,345"),
            (component(20.1, 20.1), "20"),
            (component(20.0, 20.1), "<21"),
            (component(0.0, 1.0), "<1"),
            (component(-900.0, 12.0), "<12"),
            (component(1.5, 1.0), "1.5"),
            (component(-5.0, 12_345.0), "<12,345"),
            (count(1_234_567), "1,234,567"),
            (count(9999), "9999"),
            (percent(0.966), "97%"),
            (percent_of(0.5, 0), "-"),
            (percent_of(0.123, 10), "12.3%"),
            (span(0), "0"),
            (span(999), "999 ns"),
            (span(50_000), "50.0 us"),
            (span(10_998_000), "11.0 ms"),
            (span(1_487_272_000), "1.49 s"),
            (bytes(512), "512 B"),
            (bytes(24_576), "24.0 KiB"),
            (bytes(5 << 20), "5.00 MiB"),
            (byte_seconds(0.0), "0"),
            (byte_seconds(0.034), "0.03"),
            (byte_seconds(123_456.0), "123.5k"),
        ];
        for (got, expected) in cases {
            assert_eq!(got, expected);
        }
    }
}
