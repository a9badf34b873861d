//! Where a thread's words go: shown at once, or kept until somebody has time for them.

use std::cell::RefCell;

thread_local! {
    static KEPT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on this thread keeps its words.
pub(crate) fn keep() {
    KEPT.set(Some(String::new()));
}

/// Whether it does.
pub(crate) fn is_kept() -> bool {
    KEPT.with_borrow(Option::is_some)
}

/// What it has kept since it was last asked.
pub(crate) fn take() -> String {
    KEPT.with_borrow_mut(|kept| kept.as_mut().map(std::mem::take))
        .unwrap_or_default()
}

/// A line of this thread's.
pub(crate) fn line(text: &str) {
    KEPT.with_borrow_mut(|kept| match kept {
        Some(kept) => {
            kept.push_str(text);
            kept.push('\n');
        }
        None => println!("{text}"),
    });
}
