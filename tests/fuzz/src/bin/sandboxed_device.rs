//! The sandboxed process of the target `serve`.

fn main() {
    ringfence_fuzz::serve::run_if_sandboxed();
}
