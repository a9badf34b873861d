//! The command `ringfence`.
fn main() {}
