//! Gives the shared library its name for the dynamic linker: the major number of the interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libringfence.so.1");
}
