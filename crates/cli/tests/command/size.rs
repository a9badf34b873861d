//! `ringfence size`, and the rings of `compare`.

use ringfence_trace::SAMPLE;
use serde_json::Value;

use crate::{Scratch, failed, ringfence, ringfence_with, root, stderr, succeeded};

fn advice(args: &[&str], input: &[u8]) -> Value {
    // One mode: what the IOTLB is tried under makes no difference to the rest, and costs fifteen
    // replays.
    const SIZE: [&str; 4] = ["size", "--json", "--modes", "linux-lazy"];
    let args: Vec<&str> = SIZE.iter().chain(args).copied().collect();
    serde_json::from_str(&succeeded(&ringfence_with(&args, input))).unwrap()
}

#[test]
fn the_sample_and_standard_input_give_the_same_advice() {
    let mut sample = advice(&[], b"");
    let mut piped = advice(&["-"], SAMPLE);
    assert_eq!(sample["schema"], 3);
    assert_eq!(piped["traces"][0]["trace"], "stdin");
    for report in [&mut sample, &mut piped] {
        report["traces"][0]["trace"] = Value::Null;
    }
    assert_eq!(sample, piped);
    let rings = sample["traces"][0]["rings"].as_array().unwrap();
    assert!(!rings.is_empty());
    for ring in rings {
        assert!(ring["entries"].as_u64() >= ring["rule"].as_u64(), "{ring}");
        for point in ring["sweep"].as_array().unwrap() {
            for order in ["in_order", "any_order"] {
                assert_eq!(point[order], point[format!("{order}_predicted")], "{point}");
            }
        }
    }
}

#[test]
fn every_form_names_the_same_rings() {
    let json = advice(&["--ring-entries", "64,128"], b"");
    let rings = json["traces"][0]["rings"].as_array().unwrap();
    let of = |form: &str| {
        let output = ringfence(&["size", "--modes", "fence", "--ring-entries", "64,128", form]);
        succeeded(&output)
    };
    let (csv, markdown) = (of("--csv"), of("--markdown"));
    let text = succeeded(&ringfence(&["size", "--ring-entries", "64,128"]));
    assert!(text.contains("linux-strict ") && text.contains("linux-lazy "));
    assert_eq!(csv.lines().count(), 1 + 2 * rings.len());
    for ring in rings {
        let device = ring["device"].as_str().unwrap();
        let direction = ring["direction"].as_str().unwrap();
        assert!(csv.contains(&format!("{device},{direction},")), "{csv}");
        let name = format!("{device} {direction}");
        assert!(markdown.contains(&name) && text.contains(&name), "{name}");
    }
    let recommendation = json["traces"][0]["recommendation"].as_str().unwrap();
    // The second sentence is about the IOTLB, and the modes differ.
    let (rings, _) = recommendation.split_once(". ").unwrap();
    assert!(text.contains(rings) && markdown.contains(rings), "{rings}");
}

#[test]
fn plots_are_written_where_they_are_wanted() {
    let scratch = Scratch::new("size-plots");
    let dir = scratch.path("new/dir");
    let output = ringfence(&["size", "--plot", &dir]);
    succeeded(&output);
    assert_eq!(stderr(&output).lines().count(), 2);
    for question in ["stalls", "iotlb"] {
        let svg = std::fs::read_to_string(format!("{dir}/sample-{question}.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}

#[test]
fn one_device_can_be_chosen_and_unknown_ones_are_hinted_at() {
    let all = advice(&[], b"");
    let one = advice(&["--device", "0000:00:03.0"], b"");
    assert_eq!(one["traces"], all["traces"], "the sample has one device");
    let output = ringfence(&["size", "--device", "0000:99:00.0"]);
    assert!(failed(&output, 1).contains("did you mean 0000:00:03.0?"));
}

#[test]
fn wrong_usage_ends_with_2_and_bad_traces_with_1() {
    let cases: [(&[&str], &str); 6] = [
        (&["size", "--ring-entries", "0"], "1 to 262143"),
        (&["size", "--ring-entries", "262144"], "1 to 262143"),
        (&["size", "--modes", "riommu"], "does not map pages"),
        (&["size", "--modes", "none"], "does not map pages"),
        (&["size", "-", "-"], "name it once"),
        (&["size", "--json", "--csv"], "cannot be used with"),
    ];
    for (args, expected) in cases {
        let output = ringfence(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    let scratch = Scratch::new("size-bad");
    let bad = scratch.file("bad", b"# tracer: nop\nnonsense\n");
    let text = failed(&ringfence(&["size", &bad]), 1);
    assert!(text.contains("bad:2"), "{text}");
    let gone = scratch.path("gone");
    assert!(failed(&ringfence(&["size", &gone]), 1).contains("cannot be read"));
    let output = ringfence(&["size", "--plot", "/proc/no/plots"]);
    assert!(failed(&output, 1).contains("/proc/no/plots") && output.stdout.is_empty());
}

#[test]
fn a_trace_of_nothing_is_no_error() {
    let report = advice(&["-"], b"");
    assert_eq!(report["traces"][0]["rings"], serde_json::json!([]));
    let text = report["traces"][0]["recommendation"].as_str().unwrap();
    assert!(text.contains("contains no map"), "{text}");
}

fn compared(args: &[&str], input: &[u8]) -> Vec<Value> {
    const COMPARE: [&str; 7] = [
        "compare",
        "--json",
        "--repeat",
        "0",
        "--no-attack",
        "--modes",
        "riommu,riommu-ooo",
    ];
    let args: Vec<&str> = COMPARE.iter().chain(args).copied().collect();
    let text = succeeded(&ringfence_with(&args, input));
    let mut report: Value = serde_json::from_str(&text).unwrap();
    let rows = report["results"].as_array_mut().unwrap();
    for row in rows.iter_mut() {
        row["trace"] = Value::Null;
    }
    rows.clone()
}

#[test]
fn compare_uses_the_given_ring_entries() {
    let counted = compared(&[], b"");
    let few = compared(&["--ring-entries", "8"], b"");
    let many = compared(&["--ring-entries", "8192"], b"");
    for (counted, (few, many)) in counted.iter().zip(few.iter().zip(&many)) {
        let bytes = |row: &Value| row["table_bytes"].as_u64().unwrap();
        assert!(bytes(few) < bytes(counted) && bytes(counted) < bytes(many));
        assert!(few["stalled_maps"].as_u64() > Some(0), "{few}");
        assert_eq!(many["stalled_maps"], 0, "{many}");
    }
    // What `size` measures is what `compare` counts.
    let sized = advice(&["--ring-entries", "8"], b"");
    let rings = sized["traces"][0]["rings"].as_array().unwrap();
    let sum = |order: &str| -> u64 {
        let points = rings
            .iter()
            .map(|ring| &ring["sweep"][0][order]["stalled_maps"]);
        points.map(|stalls| stalls.as_u64().unwrap()).sum()
    };
    assert_eq!(few[0]["stalled_maps"], sum("in_order"));
    assert_eq!(few[1]["stalled_maps"], sum("any_order"));
}

/// Rings are counted before the replay: standard input is read twice.
#[test]
fn compare_keeps_standard_input_for_a_second_reading() {
    assert_eq!(compared(&["-"], SAMPLE), compared(&[], b""));
}

#[test]
fn json_page_lists_the_fields_of_size() {
    let text = std::fs::read_to_string(root().join("docs/JSON.md")).unwrap();
    let (_, text) = text
        .split_once("# The JSON form of advice on sizes")
        .unwrap();
    let (text, _) = text.split_once("## Other JSON output").unwrap();
    let text = text.replace("traces[].", "").replace("[]`", "`");
    fn names(value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                out.push(name.clone());
                names(value, out);
            }),
            Value::Array(items) => items.iter().for_each(|item| names(item, out)),
            _ => {}
        }
    }
    let report = advice(&[], b"");
    let mut found = Vec::new();
    names(&report["traces"], &mut found);
    found.sort();
    found.dedup();
    for name in found {
        assert!(
            text.contains(&format!("`{name}`")),
            "not documented: {name}"
        );
    }
}
