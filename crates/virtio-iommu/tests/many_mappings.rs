//! Many mappings: compares every page with a list of pages, while leaves split, merge and
//! disappear.

use ringfence_types::{Access, Iova, IovaRange};
use ringfence_virtio_iommu::{AccessTarget, Device, EndpointId, Options};

const PAGE: u64 = 4096;
const PAGES: u64 = 8192;
const ENDPOINT: EndpointId = EndpointId::new(1);

/// A small generator (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % bound
    }
}

/// The device, and the first and last page of the mapping of each page.
struct Both {
    device: Device<()>,
    pages: Vec<Option<(u64, u64)>>,
    count: usize,
}

impl Both {
    fn new() -> Self {
        let mut device = Device::new(Options::default(), ()).expect("sound options");
        device.add_endpoint(ENDPOINT, &[]).expect("an endpoint");
        device.accept_features(device.features());
        let mut reply = [0xff; 4];
        let attach = [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        device.handle(&attach, &mut reply).expect("no sink");
        assert_eq!(reply, [0; 4]);
        Self {
            device,
            pages: vec![None; PAGES as usize],
            count: 0,
        }
    }

    fn send(&mut self, kind: u8, first: u64, last: u64, rest: &[u8]) -> u8 {
        let mut request = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        request.extend((first * PAGE).to_le_bytes());
        request.extend((last * PAGE + (PAGE - 1)).to_le_bytes());
        request.extend(rest);
        let mut reply = [0xff; 4];
        self.device.handle(&request, &mut reply).expect("no sink");
        reply[0]
    }

    fn map(&mut self, first: u64, last: u64) {
        let mut rest = ((PAGES + first) * PAGE).to_le_bytes().to_vec();
        rest.extend(3_u32.to_le_bytes());
        let status = self.send(3, first, last, &rest);
        let range = first as usize..=last as usize;
        if self.pages[range.clone()].iter().any(Option::is_some) {
            assert_eq!(status, 4, "{first}..={last} overlaps");
        } else {
            assert_eq!(status, 0, "{first}..={last} is free");
            self.pages[range].fill(Some((first, last)));
            self.count += 1;
        }
    }

    fn unmap(&mut self, first: u64, last: u64) {
        let status = self.send(4, first, last, &[0; 4]);
        let covered = &self.pages[first as usize..=last as usize];
        let whole = |&(start, end): &(u64, u64)| first <= start && end <= last;
        if covered.iter().flatten().all(whole) {
            assert_eq!(status, 0, "{first}..={last} splits nothing");
            let pages = first..;
            let gone = covered
                .iter()
                .zip(pages)
                .filter(|(found, page)| found.is_some_and(|(start, _)| start == *page));
            self.count -= gone.count();
            self.pages[first as usize..=last as usize].fill(None);
        } else {
            assert_eq!(status, 5, "{first}..={last} splits");
        }
        assert_eq!(self.device.mappings(), self.count);
    }

    fn check(&self) {
        assert_eq!(self.device.mappings(), self.count);
        for (page, found) in (0..PAGES).zip(&self.pages) {
            let range = IovaRange::new(Iova::new(page * PAGE + 5), 1).expect("a byte");
            let reached = match self.device.translate(ENDPOINT, range, Access::Write) {
                Ok(AccessTarget::Memory { physical, .. }) => Some(physical.start().get()),
                _ => None,
            };
            let expected = found.map(|_| (PAGES + page) * PAGE + 5);
            assert_eq!(reached, expected, "page {page}");
        }
    }
}

#[test]
fn random_mappings_agree_page_by_page() {
    for seed in [1, 3, 5, 7, 9] {
        let mut random = Random(seed);
        let mut both = Both::new();
        for step in 0..12_000 {
            let first = random.below(PAGES);
            // Alternate phases of growth and decay.
            let growing = step / 3000 % 2 == 0;
            if random.below(10) < if growing { 8 } else { 3 } {
                both.map(first, (first + random.below(3)).min(PAGES - 1));
            } else {
                let pages = match random.below(40) {
                    0 => random.below(PAGES),
                    1..10 => random.below(200),
                    _ => random.below(6),
                };
                both.unmap(first, (first + pages).min(PAGES - 1));
            }
            if step % 1000 == 999 {
                both.check();
            }
        }
        both.unmap(0, PAGES - 1);
        both.check();
        assert_eq!(both.count, 0, "seed {seed}");
    }
}

#[test]
fn up_and_down_and_every_other() {
    let mut both = Both::new();
    let (up, down) = (0..PAGES, (0..PAGES).rev());
    up.clone().for_each(|page| both.map(page, page));
    both.check();
    up.clone()
        .step_by(2)
        .for_each(|page| both.unmap(page, page));
    both.check();
    up.step_by(2).for_each(|page| both.map(page, page));
    both.check();
    down.clone().for_each(|page| both.unmap(page, page));
    both.check();
    down.for_each(|page| both.map(page, page));
    both.check();
    // Unmap all but the first and the last with one request.
    both.unmap(1, PAGES - 2);
    assert_eq!(both.count, 2);
    both.check();
}

/// The slot of the last removed mapping stays vacant. A longer mapping at its address overlaps the
/// next one, in the same leaf or another.
#[test]
fn a_place_that_is_free_again_has_no_more_room_than_before() {
    let mut both = Both::new();
    for page in 0..=200 {
        both.map(page, page);
    }
    for page in 0..200 {
        both.unmap(page, page);
        both.map(page, page + 1);
        both.map(page, page);
    }
}
