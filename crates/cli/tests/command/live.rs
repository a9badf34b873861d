//! What serves guests, as far as it goes without a guest.

use std::io::Write;
use std::os::unix::net::UnixListener;

use crate::{Scratch, failed, ringfence, stderr, succeeded};

#[test]
fn top_shows_what_the_counters_say() {
    let scratch = Scratch::new("top");
    let dir = scratch.path("");
    let listener = UnixListener::bind(scratch.path("metrics.sock")).unwrap();
    let serve = std::thread::spawn(move || {
        for text in [
            "ringfence_requests_total{device=\"blk\"} 1234\n",
            "no counters\n",
        ] {
            listener
                .accept()
                .unwrap()
                .0
                .write_all(text.as_bytes())
                .unwrap();
        }
    });
    let text = succeeded(&ringfence(&["top", "--once", &dir]));
    let row = text.lines().nth(1).unwrap();
    assert!(row.starts_with("blk ") && row.contains(" 1234 "), "{text}");
    let said = failed(&ringfence(&["top", "--once", &dir]), 1);
    assert!(said.contains("metrics.sock"), "{said}");
    serve.join().unwrap();
    // The listener has gone, its socket has not.
    failed(&ringfence(&["top", &dir]), 1);
}

#[test]
fn a_network_device_that_cannot_be_is_wrong_usage() {
    for (net, expected) in [
        ("bridge=br0", "expected tap=NAME"),
        ("socket=a,queues=9", "from 1 to 8"),
        ("socket=a,mac=ff:ff:ff:ff:ff:ff", "mac has to be"),
        ("datagram=a", "a path is missing"),
        ("tap=a,speed=9", "neither queues=N nor mac=ADDRESS"),
    ] {
        let output = ringfence(&["serve", "--dir", "nowhere", "--net", net]);
        assert_eq!(output.status.code(), Some(2), "{net}");
        let said = stderr(&output);
        assert!(said.contains(expected), "{net}: {said}");
    }
    for wrong in [&["top"][..], &["top", ".", "--interval", "0"]] {
        assert_eq!(ringfence(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
