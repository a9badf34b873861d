//! `ringfence report`: the page, its output, and hostile names.

use std::fs;

use crate::{Scratch, ringfence, stderr, succeeded};

const QUICK: [&str; 6] = [
    "report",
    "--repeat",
    "0",
    "--no-attack",
    "--modes",
    "linux-strict,linux-lazy",
];

fn quick(more: &[&str]) -> String {
    succeeded(&ringfence(&[&QUICK[..], more].concat()))
}

/// The page shows the numbers of `compare` and of `size`, and equal inputs give an equal page.
#[test]
fn the_page_agrees_with_compare_and_size() {
    let page = quick(&[]);
    assert_eq!(page, quick(&[]));
    let compared = succeeded(&ringfence(&[
        "compare",
        "--repeat",
        "0",
        "--no-attack",
        "--modes",
        "linux-lazy",
        "--json",
    ]));
    let compared: serde_json::Value = serde_json::from_str(&compared).unwrap();
    let window = compared["results"][0]["stale_window_max_ns"]
        .as_u64()
        .unwrap();
    assert!(window > 0);
    assert!(
        page.contains(&format!("data-value=\"{window}\"")),
        "{window}"
    );
    let sized = succeeded(&ringfence(&["size", "--json"]));
    let sized: serde_json::Value = serde_json::from_str(&sized).unwrap();
    let text = sized["traces"][0]["recommendation"].as_str().unwrap();
    assert!(page.contains(text), "{text}");
    // A mode with a stale window has a line in the plot of released bytes.
    assert!(page.contains("Released bytes that the device still reaches"));
    assert!(page.contains(">linux-lazy</text>"));
}

#[test]
fn the_page_goes_to_the_file_of_out() {
    let scratch = Scratch::new("report-out");
    let path = scratch.path("report.html");
    let out = quick(&["-o", &path]);
    assert_eq!(out, "");
    assert_eq!(fs::read_to_string(&path).unwrap(), quick(&[]));
    let output = ringfence(&[&QUICK[..], &["-o", "/no/such/directory/report.html"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/no/such/directory/report.html"));
}

/// The names of a file and of a device are markup that must stay text.
#[test]
fn hostile_names_stay_text() {
    let scratch = Scratch::new("report-names");
    let line = |time: &str, event: &str| {
        format!(
            "t-1 [000] ..... {time}: {event}: <img/src/onerror> dir=TO_DEVICE dma_addr=1000 \
             size=512"
        )
    };
    let text = format!(
        "{} phys_addr=5000 attrs=\n{} attrs=\n",
        line("1.0", "dma_map_phys"),
        line("1.1", "dma_unmap_phys")
    );
    let path = scratch.file("<script>alert(1)<.txt", text.as_bytes());
    let page = quick(&[&path]);
    assert!(page.contains("&lt;script&gt;alert(1)&lt;"), "{page}");
    assert!(page.contains("&lt;img/src/onerror&gt;"));
    assert_eq!(page.matches("<script").count(), 1);
    assert!(!page.contains("<img"));
}
