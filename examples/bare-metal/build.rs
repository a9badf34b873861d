//! Links without start files and C library, at the addresses of `link.ld`.

fn main() {
    println!("cargo::rerun-if-changed=link.ld");
    let script = format!("-T{}/link.ld", env!("CARGO_MANIFEST_DIR"));
    let others = ["-nostartfiles", "-nostdlib", "-static", "-no-pie"];
    for argument in others.into_iter().chain([script.as_str()]) {
        println!("cargo::rustc-link-arg-bins={argument}");
    }
}
