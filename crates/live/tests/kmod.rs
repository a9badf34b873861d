//! The kernel module's idea of the wire format, in user space: `kmod/tests/vectors.c`.

use std::path::Path;
use std::process::Command;

#[test]
fn the_module_builds_what_the_vectors_say() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let kmod = repository.join("kmod");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vectors");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-fsanitize=undefined"])
        .arg("-fno-sanitize-recover")
        .arg("-I")
        .arg(&kmod)
        .arg(kmod.join("tests/vectors.c"))
        .arg("-o")
        .arg(&program)
        .status()
        .expect("a C compiler");
    assert!(status.success(), "it compiles without warnings");
    let vectors = repository.join("crates/pviommu/vectors/requests.txt");
    let output = Command::new(&program).arg(&vectors).output().unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(output.status.success(), "{said}{complained}");
    // Both kinds were there.
    let counts: Vec<u32> = said
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(
        matches!(counts[..], [built, malformed] if built > 20 && malformed > 10),
        "{said}"
    );
}
