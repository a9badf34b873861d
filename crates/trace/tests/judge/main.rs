//! Judgements of traces with known answers, and of random traces against a brute-force reference.

use ringfence_trace::{JudgeOptions, Judgement, Operations, TraceError, TraceOptions};

mod errors;
mod known_answers;
mod lines;
mod random;
mod reference;

fn judge_with(text: &str, options: &JudgeOptions) -> Result<Judgement, TraceError> {
    let reading = TraceOptions::default().with_page_events();
    Judgement::read(&mut Operations::new("t", text.as_bytes(), reading), options)
}

fn judge(text: &str) -> Judgement {
    judge_with(text, &JudgeOptions::default()).unwrap()
}

fn file(name: &str) -> String {
    let path = format!("{}/tests/data/judge/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap()
}
