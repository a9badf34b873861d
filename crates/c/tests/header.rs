//! The committed header is the one that cbindgen generates from the sources.
//!
//! After a change of the interface, `RINGFENCE_WRITE_HEADER=1` makes this test write the header.

use std::fs;
use std::path::{Path, PathBuf};

fn generated(package: &Path) -> String {
    let config = cbindgen::Config::from_file(package.join("cbindgen.toml")).unwrap();
    let root = package.join("src/lib.rs");
    let builder = cbindgen::Builder::new().with_config(config).with_src(root);
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn the_header_is_the_generated_one() {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let path = package.join("include/ringfence.h");
    let generated = generated(&package);
    if std::env::var_os("RINGFENCE_WRITE_HEADER").is_some() {
        fs::write(&path, &generated).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let differs = committed
        .lines()
        .zip(generated.lines())
        .find(|(a, b)| a != b);
    assert_eq!(differs, None, "the header is out of date");
    assert!(
        committed == generated,
        "the header is out of date: its length differs"
    );
}
