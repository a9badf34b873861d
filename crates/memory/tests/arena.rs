//! The arena: bounds, bytes, write-back instructions.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use ringfence_memory::{Arena, ArenaError, WriteBack};
use ringfence_types::{MemoryError, PhysAddr, PhysMemory};

const SIZE: u64 = 64 << 10;

fn at(raw: u64) -> PhysAddr {
    PhysAddr::new(raw)
}

/// Byte `n` of a word is bits 8n to 8n+7.
#[test]
fn bytes_of_every_alignment_are_those_of_the_words() {
    for offset in 0..8 {
        for length in 0..40_usize {
            let arena = Arena::new(SIZE).expect("arena");
            let data: Vec<u8> = (1..=length as u8).collect();
            arena.write_bytes(at(64 + offset), &data).expect("inside");
            for index in 0..64 {
                let word = arena.word(at(64 + index / 8 * 8)).expect("inside");
                let byte = (word.load(Ordering::Relaxed) >> (8 * (index % 8))) as u8;
                let from = index.checked_sub(offset).map(|index| index as usize);
                let expected = from.and_then(|index| data.get(index));
                assert_eq!(
                    byte,
                    expected.copied().unwrap_or(0),
                    "{offset} {length} {index}"
                );
                assert_eq!(arena.read_byte(at(64 + index)), Ok(byte));
            }
            let mut back = vec![0; length];
            arena
                .read_bytes(at(64 + offset), &mut back)
                .expect("inside");
            assert_eq!(back, data, "{offset}");
        }
    }
}

#[test]
fn errors_count_the_words_of_the_bytes() {
    let arena = Arena::new(SIZE).expect("arena");
    for (from, bytes, words) in [(SIZE - 1, 2, 2), (SIZE, 1, 1), (SIZE - 8, 9, 2)] {
        let outside = MemoryError::Outside {
            at: at(from),
            words,
        };
        let read = arena.read_bytes(at(from), &mut vec![0; bytes]);
        assert_eq!(read, Err(outside), "{from:#x} {bytes}");
    }
}

#[test]
fn sixty_four_gibibytes_and_more_are_sparse() {
    let size = (64 << 30) + (1 << 30);
    let arena = Arena::new(size).expect("address space for a sparse arena");
    for offset in [0, 1 << 30, (64 << 30) - 8, size - 8] {
        let word = arena.word(at(offset)).expect("inside");
        assert_eq!(word.load(Ordering::Relaxed), 0);
        word.store(offset ^ 0x5a, Ordering::Relaxed);
        assert_eq!(arena.read_byte(at(offset)), Ok((offset ^ 0x5a) as u8));
    }
    assert_eq!(
        arena.word(at(size)).err(),
        Some(MemoryError::Outside {
            at: at(size),
            words: 1
        })
    );
}

#[test]
fn bounds_and_alignment() {
    let arena = Arena::new(SIZE).expect("arena");
    let outside = |raw, words| Some(MemoryError::Outside { at: at(raw), words });
    let misaligned = |raw| Some(MemoryError::Misaligned { at: at(raw) });
    assert_eq!(arena.word(at(4)).err(), misaligned(4));
    assert_eq!(arena.word(at(u64::MAX - 7)).err(), outside(u64::MAX - 7, 1));
    assert!(arena.word(at(SIZE - 8)).is_ok());
    assert_eq!(arena.table(at(8)).err(), misaligned(8));
    assert_eq!(arena.table(at(SIZE)).err(), outside(SIZE, 512));
    assert!(arena.table(at(SIZE - 4096)).is_ok());
    assert_eq!(arena.words(at(SIZE - 8), 2).err(), outside(SIZE - 8, 2));
    assert_eq!(
        arena.words(at(0), usize::MAX).err(),
        outside(0, usize::MAX as u64)
    );
    assert_eq!(arena.words(at(SIZE - 16), 2).map(<[_]>::len), Ok(2));
    let mut byte = [0];
    assert!(arena.read_bytes(at(SIZE), &mut byte).is_err());
    assert!(arena.read_bytes(at(u64::MAX), &mut byte).is_err());
    assert!(arena.write_bytes(at(SIZE - 1), &[1, 2]).is_err());
    assert_eq!(
        arena.read_byte(at(SIZE - 1)),
        Ok(0),
        "a refused write writes nothing"
    );
    assert!(arena.write_bytes(at(SIZE - 1), &[1]).is_ok());
    // Write-backs ignore lines outside the arena.
    arena.write_back(at(SIZE), 64);
    arena.write_back(at(SIZE - 1), u64::MAX);
    arena.write_back(at(u64::MAX), u64::MAX);
    arena.drain();
}

#[test]
fn sizes_that_cannot_be() {
    for bytes in [0, 1, 4095, u64::MAX, u64::MAX - 4095] {
        let error = Arena::new(bytes).err();
        assert!(
            matches!(
                error,
                Some(ArenaError::BadSize { .. } | ArenaError::Refused { .. })
            ),
            "{bytes}: {error:?}"
        );
    }
}

#[test]
fn errors_name_the_size_and_the_remedy() {
    let text = |error: ArenaError| error.to_string();
    assert_eq!(
        text(ArenaError::BadSize { bytes: 1 }),
        "invalid arena size 1: expected a non-zero multiple of 4096 that this host can address"
    );
    let (bytes, errno) = (1 << 40, 12);
    let refused = text(ArenaError::Refused { bytes, errno });
    assert!(refused.starts_with("cannot map 1099511627776 bytes: "));
    assert!(refused.ends_with("; allow memory overcommit or use a smaller arena"));
    let kind = WriteBack::FenceOnly;
    assert_eq!(
        text(ArenaError::NoSuchInstruction(kind)),
        format!("this CPU lacks {kind}")
    );
}

#[test]
fn every_write_back_instruction_runs_and_changes_nothing() {
    for kind in WriteBack::available() {
        let arena = Arena::with_write_back(SIZE, kind).expect("available");
        assert_eq!(arena.write_back_kind(), kind);
        arena.write_bytes(at(100), &[7; 1000]).expect("inside");
        arena.write_back(at(100), 1000);
        arena.drain();
        let mut back = [0; 1000];
        arena.read_bytes(at(100), &mut back).expect("inside");
        assert_eq!(back, [7; 1000], "{kind:?}");
    }
}

#[test]
fn bytes_of_one_word_are_written_by_several_threads() {
    let arena = Arena::new(SIZE).expect("arena");
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let arena = &arena;
            scope.spawn(move || {
                for value in 0..=u8::MAX {
                    arena
                        .write_bytes(at(64 + 2 * thread), &[value, value])
                        .expect("inside");
                    assert_eq!(arena.read_byte(at(64 + 2 * thread)), Ok(value));
                }
            });
        }
    });
    let mut all = [0; 8];
    arena.read_bytes(at(64), &mut all).expect("inside");
    assert_eq!(all, [u8::MAX; 8], "no thread undid another's bytes");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(0x0a7e_0a01),
        ..ProptestConfig::with_cases(256)
    })]

    #[test]
    fn bytes_agree_with_a_vector(
        writes in prop::collection::vec(
            (0_u64..300, prop::collection::vec(any::<u8>(), 0..40)),
            1..20,
        ),
        reads in prop::collection::vec((0_u64..300, 0_usize..40), 1..10),
    ) {
        let arena = Arena::new(SIZE).expect("arena");
        let mut model = vec![0_u8; 400];
        for (offset, bytes) in &writes {
            arena.write_bytes(at(*offset), bytes).expect("inside");
            model[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        for (offset, length) in reads {
            let mut got = vec![0xaa; length];
            arena.read_bytes(at(offset), &mut got).expect("inside");
            prop_assert_eq!(&got[..], &model[offset as usize..][..length]);
        }
        for (offset, want) in model.iter().enumerate() {
            prop_assert_eq!(arena.read_byte(at(offset as u64)), Ok(*want));
        }
    }
}
