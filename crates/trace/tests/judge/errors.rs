//! Traces that end with an error, and limits of the work.

use ringfence_trace::{
    JudgeOptions, LimitExceeded, Malformed, Operations, TraceError, TraceOptions,
};

use crate::lines::{map, page};
use crate::{file, judge, judge_with};

#[test]
fn errors_name_file_and_line() {
    let options = JudgeOptions::default();
    let error = judge_with(&file("no-pages"), &options).unwrap_err();
    assert!(matches!(error, TraceError::NoPageEvents { .. }), "{error}");
    let mut two = String::new();
    map(&mut two, 0, 0, 1 << 40, 0x5000_0000, 8192, "TO_DEVICE");
    page(&mut two, 0, 300, "alloc", 0x5000, 0);
    let mut one_page = JudgeOptions::default();
    one_page.pages = 1;
    let error = judge_with(&two, &one_page).unwrap_err();
    assert!(
        matches!(
            error,
            TraceError::Limit {
                line: 1,
                excess: LimitExceeded::Pages { limit: 1 },
                ..
            }
        ),
        "{error}"
    );
    let prefix = "t-1 [000] ..... 1.000000: ";
    let cases = [
        (
            "mm_page_alloc: page=0 pfn=0x1 order=21",
            Malformed::OrderTooLarge,
        ),
        (
            "mm_page_free: page=0 pfn=0x1000000000000 order=0",
            Malformed::RangeWraps(ringfence_trace::Field::Pfn),
        ),
        (
            "mm_page_free_batched: page=0 pfn=0xg order=0",
            Malformed::BadNumber(ringfence_trace::Field::Pfn),
        ),
        (
            "mm_page_alloc: page=0 pfn=0x1 migratetype=0",
            Malformed::MissingField(ringfence_trace::Field::Order),
        ),
    ];
    for (line, expected) in cases {
        let error = judge_with(&format!("\n{prefix}{line}\n"), &options).unwrap_err();
        match error {
            TraceError::Malformed {
                line: 2, reason, ..
            } => assert_eq!(reason, expected, "{line}"),
            other => panic!("{line}: {other}"),
        }
    }
    // Kernels before 5.12 print the number in decimal; a failed allocation has the number 0.
    let text = format!(
        "{prefix}mm_page_alloc: page=0 pfn=77 order=0\n{prefix}mm_page_alloc: page=0 pfn=0 \
        order=3\n"
    );
    assert_eq!(judge(&text).page_allocs, 1);
    // A reader that does not ask for page events skips even malformed ones.
    let skipped = format!("{prefix}mm_page_alloc: page=0 pfn=? order=99\n");
    let mut operations = Operations::new("t", skipped.as_bytes(), TraceOptions::default());
    assert!(!operations.next_chunk(&mut Default::default()).unwrap());
    assert_eq!(operations.summary().unknown, 1);
}

#[test]
fn work_is_bounded() {
    // Many mappings of one page.
    let mut text = String::new();
    for number in 0..4100u64 {
        let dir = "TO_DEVICE";
        map(
            &mut text,
            0,
            0,
            (1 << 40) + (number << 12),
            0x5000_0000,
            1,
            dir,
        );
    }
    page(&mut text, 0, 300, "alloc", 1, 0);
    let error = judge_with(&text, &JudgeOptions::default()).unwrap_err();
    let TraceError::Limit { excess, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(excess, LimitExceeded::Sharing { limit: 4096 });
    // Blocks that cover many reachable pages, time and again.
    let mut text = String::new();
    map(&mut text, 0, 0, 1 << 40, 0x4000_0000, 1 << 30, "TO_DEVICE");
    for _ in 0..300 {
        page(&mut text, 0, 300, "free", 0x40000, 18);
    }
    let error = judge_with(&text, &JudgeOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("t:"), "{error}");
    let TraceError::Limit { excess, .. } = error else {
        panic!("{error}");
    };
    assert!(matches!(excess, LimitExceeded::Visits { .. }), "{excess}");
}
