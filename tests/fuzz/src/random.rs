//! Random inputs without instrumentation: mutations of the corpus, from a seed.

/// A small generator (xorshift64*); a seed identifies a run.
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }
}

/// Maximum length of an input.
const LONGEST: usize = 4096;

/// Values that are often at a limit.
const INTERESTING: [&[u8]; 8] = [
    b"\0",
    b"\n",
    b"18446744073709551615",
    b"0xffffffffffffffff",
    b"0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\0\0\0\0\0\0\0\x80",
    b"{}",
];

/// Builds an input from one or two of `seeds` by a few mutations.
pub fn input(random: &mut Random, seeds: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut data = match seeds {
        [] => Vec::new(),
        _ => seeds[random.below(seeds.len())].1.clone(),
    };
    for _ in 0..=random.below(8) {
        mutate(random, &mut data, seeds);
    }
    data.truncate(LONGEST);
    data
}

fn mutate(random: &mut Random, data: &mut Vec<u8>, seeds: &[(String, Vec<u8>)]) {
    let at = random.below(data.len() + 1);
    match random.below(7) {
        0 if at < data.len() => data[at] ^= 1 << random.below(8),
        1 if at < data.len() => data[at] = random.next() as u8,
        2 => data.insert(at, random.next() as u8),
        3 => {
            let end = (at + 1 + random.below(16)).min(data.len());
            data.drain(at..end);
        }
        4 => {
            let piece = INTERESTING[random.below(INTERESTING.len())];
            data.splice(at..at, piece.iter().copied());
        }
        5 => {
            let piece = INTERESTING[random.below(INTERESTING.len())];
            let end = (at + piece.len()).min(data.len());
            data.splice(at..end, piece.iter().copied());
        }
        _ if !seeds.is_empty() => {
            // The rest of another input.
            let other = &seeds[random.below(seeds.len())].1;
            let from = random.below(other.len() + 1);
            data.truncate(at);
            data.extend_from_slice(&other[from..]);
        }
        _ => {}
    }
}
