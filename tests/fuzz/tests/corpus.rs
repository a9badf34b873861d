//! The committed corpora: every input runs through its target, and together they reach every
//! outcome.

use std::collections::BTreeSet;

use ringfence_fuzz::{TARGETS, corpus, serve};

#[test]
fn every_corpus_reaches_every_outcome() {
    serve::set_program(env!("CARGO_BIN_EXE_sandboxed-device").as_ref());
    for target in TARGETS {
        let mut reached = BTreeSet::new();
        for (_, data) in corpus::read(target.name).expect("the corpus can be read") {
            (target.run)(&data, &mut |outcome| {
                reached.insert(outcome);
            });
        }
        let wanted: BTreeSet<&str> = target.outcomes.iter().copied().collect();
        let missing: Vec<_> = wanted.difference(&reached).collect();
        assert!(
            missing.is_empty(),
            "{}: not reached: {missing:?}",
            target.name
        );
        let unlisted: Vec<_> = reached.difference(&wanted).collect();
        assert!(
            unlisted.is_empty(),
            "{}: not listed: {unlisted:?}",
            target.name
        );
    }
}

#[test]
fn every_target_has_its_binary() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/fuzz_targets");
    let binaries: BTreeSet<String> = std::fs::read_dir(directory)
        .expect("the targets can be listed")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| {
            path.file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let targets: BTreeSet<String> = TARGETS.iter().map(|t| t.name.to_owned()).collect();
    assert_eq!(binaries, targets);
}

#[test]
fn a_seed_names_a_run() {
    use ringfence_fuzz::random::{Random, input};
    let seeds = corpus::read("walk").expect("the corpus can be read");
    let inputs = |seed| {
        let mut random = Random::new(seed);
        (0..50)
            .map(|_| input(&mut random, &seeds))
            .collect::<Vec<_>>()
    };
    assert_eq!(inputs(2), inputs(2));
    assert_ne!(inputs(2), inputs(4));
}
