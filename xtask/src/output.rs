//! Output of a thread: printed at once, or kept until it can be printed as a block.

use std::cell::RefCell;

thread_local! {
    static KEPT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the output of this thread from now on.
pub(crate) fn keep() {
    KEPT.set(Some(String::new()));
}

/// Returns true if this thread keeps its output.
pub(crate) fn is_kept() -> bool {
    KEPT.with_borrow(Option::is_some)
}

/// Returns the output kept since the last call.
pub(crate) fn take() -> String {
    KEPT.with_borrow_mut(|kept| kept.as_mut().map(std::mem::take))
        .unwrap_or_default()
}

/// Prints or keeps a line of this thread.
pub(crate) fn line(text: &str) {
    KEPT.with_borrow_mut(|kept| match kept {
        Some(kept) => {
            kept.push_str(text);
            kept.push('\n');
        }
        None => println!("{text}"),
    });
}
