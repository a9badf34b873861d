//! Suggestions for mistyped names.

/// Returns the candidate with the smallest edit distance from `given`, if that is at most a third
/// of the letters of `given`.
fn nearest<'a>(given: &str, candidates: &'a [String]) -> Option<&'a str> {
    let distances = candidates.iter().map(|name| (distance(given, name), name));
    let (least, name) = distances.min_by_key(|(distance, _)| *distance)?;
    (least * 3 <= given.chars().count().max(3)).then_some(name.as_str())
}

/// Returns `did you mean fence? ` if a candidate is close; an empty string otherwise.
pub fn hint(given: &str, candidates: &[String]) -> String {
    nearest(given, candidates).map_or_else(String::new, |name| format!("did you mean {name}? "))
}

/// Returns the Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (y, above) in b.iter().zip(row.iter_mut().skip(1)) {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = *above;
            left = replaced.min(left + 1).min(*above + 1);
            *above = left;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_levenshteins() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("fence", "fence", 0),
            ("flaw", "lawn", 2),
        ] {
            assert_eq!(
                (distance(a, b), distance(b, a)),
                (expected, expected),
                "{a} {b}"
            );
        }
    }

    #[test]
    fn only_similar_names_are_suggested() {
        let names = ["strict", "strict+", "fence", "fence-burst"].map(str::to_owned);
        for (given, expected) in [
            ("fense", Some("fence")),
            ("stric", Some("strict")),
            ("fence_burst", Some("fence-burst")),
            ("bitmap", None),
            ("", None),
        ] {
            assert_eq!(nearest(given, &names), expected, "{given}");
        }
    }
}
