//! `ringfence attack`: forms and exit codes.

use serde_json::Value;

use crate::{ringfence, stderr, succeeded};

const SMALL: [&str; 5] = [
    "attack",
    "--modes",
    "none,riommu",
    "--classes",
    "A01,A22,A27",
];

fn small(more: &[&str]) -> Vec<&'static str> {
    let mut args = SMALL.to_vec();
    for arg in more {
        args.push(Box::leak(arg.to_string().into_boxed_str()));
    }
    args
}

#[test]
fn every_form_has_the_same_cells() {
    let text = succeeded(&ringfence(&small(&[])));
    assert!(
        text.contains("none    none           x    -    -"),
        "{text}"
    );
    assert!(
        text.contains("riommu  byte-granular  .    ?    ."),
        "{text}"
    );
    let markdown = succeeded(&ringfence(&small(&["--markdown"])));
    assert!(
        markdown.contains("| riommu | byte-granular | . | ? | . |"),
        "{markdown}"
    );
    let page = succeeded(&ringfence(&small(&["--html"])));
    assert!(
        page.starts_with("<!DOCTYPE html>") && page.contains(">riommu</th>"),
        "{page}"
    );
    let json: Value = serde_json::from_str(&succeeded(&ringfence(&small(&["--json"])))).unwrap();
    let cells = json["cells"].as_array().unwrap();
    let statuses: Vec<_> = cells
        .iter()
        .map(|cell| cell["status"].as_str().unwrap())
        .collect();
    assert_eq!(
        statuses,
        [
            "succeeded",
            "stopped",
            "not_applicable",
            "not_executed",
            "not_applicable",
            "stopped"
        ]
    );
    assert_eq!(
        cells[0]["total"]["successes"],
        cells[0]["total"]["attempts"]
    );
}

#[test]
fn a_success_fails_the_command_on_request() {
    let run = ringfence(&small(&["--fail-on-success"]));
    assert_eq!(run.status.code(), Some(3));
    assert!(
        stderr(&run).contains("1 attack succeeds:"),
        "{}",
        stderr(&run)
    );
    assert!(
        stderr(&run).contains("A01 none: 16 of 16 attempts"),
        "{}",
        stderr(&run)
    );
    let args = [
        "attack",
        "--modes",
        "fence",
        "--classes",
        "A01,A02",
        "--fail-on-success",
    ];
    succeeded(&ringfence(&args));
}

#[test]
fn an_unknown_class_is_wrong_usage() {
    let run = ringfence(&["attack", "--classes", "A39"]);
    assert_eq!(run.status.code(), Some(2));
    assert!(stderr(&run).contains("the attack classes are A01 to A38"));
}
