//! Random programs through the C interface, beside the Rust types and beside a model.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr;

use proptest::prelude::*;
use ringfence::*;
use ringfence_iova::{
    AllocRequest, Allocation, CachedTree, Capacity, Eiovar, FreeBsdTree, IovaAllocator,
    LinuxRcache, Locked, MagazineLimits, Magazines,
};
use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Invalidator, Pending, Pfn, PfnRange,
    Ticket, Unmapped,
};
use support::{Machine, PAGE, attach, unmap};

/// An allocation of a number of pages, or a free of one of the live ranges.
#[derive(Debug, Clone, Copy)]
enum Step {
    Alloc(u64, u32),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1_u64..40, 0_u32..4).prop_map(|(pages, order)| Step::Alloc(pages, order)),
        2 => any::<usize>().prop_map(Step::Free),
    ];
    prop::collection::vec(step, 1..200)
}

/// An IOMMU that completes everything.
struct Prompt;

impl Invalidator for Prompt {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }
    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

fn flushed(range: PfnRange) -> Flushed {
    let unmapped = Unmapped::attest_cleared(DomainId::new(0), range);
    let pending = Pending::submit(&mut Prompt, Invalidation::Global, unmapped);
    pending.unwrap().wait(&mut Prompt).unwrap()
}

/// Runs `steps` in a C allocator and in `rust`: both return the same addresses.
fn compare<A: IovaAllocator<FreeProof = Flushed>>(kind: IovaKind, rust: &A, steps: &[Step]) {
    const LIMIT: u64 = 0xf_ffff;
    let (mut space, mut cpu) = (ptr::null_mut(), ptr::null_mut());
    c!(ringfence_iova_create(kind as u32, 1, LIMIT, 0, &mut space));
    c!(ringfence_iova_cpu_create(space, &mut cpu));
    let mut own = rust.per_cpu();
    let mut live: Vec<PfnRange> = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc(pages, order) => {
                let request = AllocRequest {
                    align_order: order as u8,
                    ..AllocRequest::new(pages, Pfn::new(LIMIT))
                };
                let Allocation { range, .. } = rust.alloc(&mut own, &request).unwrap();
                let mut first = 0;
                let status = c!(ringfence_iova_alloc(cpu, pages, order, LIMIT, &mut first));
                assert_eq!((status, first), (Status::Ok, range.lo().get()));
                live.push(range);
            }
            Step::Free(_) if live.is_empty() => {}
            Step::Free(at) => {
                let range = live.swap_remove(at % live.len());
                let (first, pages) = (range.lo().get(), range.pages());
                assert_eq!(c!(ringfence_iova_free(cpu, first, pages)), Status::Ok);
                assert!(rust.free(&mut own, flushed(range)));
                let again = c!(ringfence_iova_free(cpu, first, pages));
                assert_eq!(again, Status::NotAllocated);
            }
        }
        let mut stats = IovaStats {
            size: size_of::<IovaStats>(),
            footprint: 0,
            ranges: 0,
            pages: 0,
        };
        assert_eq!(c!(ringfence_iova_stats(space, &mut stats)), Status::Ok);
        let pages = live.iter().map(PfnRange::pages).sum();
        assert_eq!((stats.ranges, stats.pages), (live.len() as u64, pages));
    }
    c!(ringfence_iova_cpu_destroy(&mut cpu));
    c!(ringfence_iova_destroy(&mut space));
}

#[derive(Debug, Clone, Copy)]
enum Dma {
    Map {
        page: u64,
        bytes: u64,
        direction: u32,
    },
    Unmap(usize),
    EndBurst(u32),
    /// The next invalidations fail, or succeed again.
    Fail(bool),
    Access(usize),
    Detach(bool),
}

fn dma_steps() -> impl Strategy<Value = Vec<Dma>> {
    let step = prop_oneof![
        8 => (0_u64..64, 1..3 * PAGE, 0_u32..3).prop_map(|(page, bytes, direction)| Dma::Map {
            page,
            bytes,
            direction,
        }),
        8 => any::<usize>().prop_map(Dma::Unmap),
        3 => (0_u32..3).prop_map(Dma::EndBurst),
        1 => any::<bool>().prop_map(Dma::Fail),
        4 => any::<usize>().prop_map(Dma::Access),
        1 => any::<bool>().prop_map(Dma::Detach),
    ];
    prop::collection::vec(step, 1..120)
}

/// The model's state of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    /// Cleared, not invalidated.
    Failed,
    Withheld,
    Released,
}

#[derive(Debug, Clone, Copy)]
struct Mapped {
    token: u64,
    iova: u64,
    phys: u64,
    bytes: u64,
    direction: u32,
    state: State,
    /// Its domain was removed.
    detached: bool,
}

impl Mapped {
    /// Returns its pages, each with the number of the physical page.
    fn pages(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (first, phys) = (self.iova / PAGE, self.phys / PAGE);
        let last = (self.iova + self.bytes - 1) / PAGE;
        (first..=last).map(move |page| (page, phys + (page - first)))
    }
}

/// The mappings so far. The cookie of a mapping is its index.
#[derive(Default)]
struct Model(RefCell<Vec<Mapped>>);

impl Model {
    fn set(&self, at: usize, state: State) {
        let mapped = &mut self.0.borrow_mut()[at];
        assert_ne!(mapped.state, State::Released, "a buffer is released twice");
        mapped.state = state;
    }

    /// Checks that the device reaches exactly the buffers that it may reach.
    ///
    /// A full part of a burst is invalidated before the burst ends. Its addresses may be in use
    /// again while its buffers are still withheld.
    fn check(&self, machine: &Machine, at: &DmaAttachment) {
        let mappings = self.0.borrow();
        let of_domain = || mappings.iter().filter(|mapped| !mapped.detached);
        let mut owners: BTreeMap<u64, Vec<(u64, State)>> = BTreeMap::new();
        for mapped in of_domain() {
            for (page, phys) in mapped.pages() {
                let owners = owners.entry(page).or_default();
                if mapped.state != State::Released {
                    owners.push((phys, mapped.state));
                }
            }
        }
        for (page, owners) in owners {
            let found = machine.translate(at, page * PAGE).map(|phys| phys / PAGE);
            let mut held = owners.iter().filter(|owner| owner.1 != State::Withheld);
            match (held.next(), held.next()) {
                (Some((phys, State::Live)), None) => assert_eq!(found, Some(*phys)),
                (_, None) => {
                    let known = |found| owners.iter().any(|owner| owner.0 == found);
                    assert!(found.is_none_or(known), "page {page:#x} is released");
                }
                (_, Some(_)) => panic!("page {page:#x} is mapped twice"),
            }
        }
    }

    /// Takes the buffers that `released` received.
    fn take_released(&self, machine: &Machine) {
        for cookie in machine.released.borrow_mut().drain(..) {
            assert_eq!(self.0.borrow()[cookie as usize].state, State::Withheld);
            self.set(cookie as usize, State::Released);
        }
    }
}

fn unmap_one(machine: &Machine, dma: *const ringfence::Dma, model: &Model, at: usize) {
    let mapped = model.0.borrow()[at];
    let failing = machine.poll_result.get() != 1;
    let (status, cookie) = unmap(dma, mapped.token);
    match (mapped.state, status) {
        (State::Live | State::Failed, Status::Ok) => {
            assert_eq!(cookie, at as u64);
            model.set(at, State::Released);
        }
        (State::Live, Status::Withheld) => model.set(at, State::Withheld),
        (State::Live | State::Failed, Status::Invalidation) => {
            assert!(failing);
            model.set(at, State::Failed);
        }
        (State::Live, Status::BurstFull) => {}
        (State::Withheld, Status::AlreadyUnmapped) => {}
        (State::Released, Status::StaleToken) => {}
        other => panic!("{other:?}"),
    }
}

fn run(policy: DmaPolicy, steps: &[Dma]) {
    let machine = Machine::new();
    let mut dma = machine.layer(policy);
    let mut at = attach(dma);
    let model = Model::default();
    let count = || model.0.borrow().len();
    for step in steps {
        match *step {
            Dma::Map {
                page,
                bytes,
                direction,
            } => {
                let cookie = count() as u64;
                let phys = page * 3 * PAGE + cookie % PAGE;
                let mut mapping = DmaMapping { token: 0, iova: 0 };
                let status = c!(ringfence_dma_map(
                    dma,
                    at.token,
                    phys,
                    bytes,
                    direction,
                    cookie,
                    &mut mapping
                ));
                assert_eq!(status, Status::Ok);
                assert_eq!(mapping.iova % PAGE, phys % PAGE);
                model.0.borrow_mut().push(Mapped {
                    token: mapping.token,
                    iova: mapping.iova,
                    phys,
                    bytes,
                    direction,
                    state: State::Live,
                    detached: false,
                });
            }
            Dma::Unmap(which) if count() > 0 => {
                unmap_one(&machine, dma, &model, which % count());
            }
            Dma::EndBurst(direction) => {
                let status = c!(ringfence_dma_end_burst(dma, at.token, direction));
                model.take_released(&machine);
                let left =
                    model.0.borrow().iter().any(|mapped| {
                        mapped.direction == direction && mapped.state == State::Withheld
                    });
                assert_eq!(status == Status::Ok, !left);
            }
            Dma::Fail(fails) => machine.poll_result.set(if fails { -1 } else { 1 }),
            Dma::Access(which) if count() > 0 => {
                let mapped = model.0.borrow()[which % count()];
                machine.translate(&at, mapped.iova);
            }
            Dma::Detach(force) => {
                let status = c!(ringfence_dma_detach(dma, at.token, force));
                model.take_released(&machine);
                if status == Status::Ok {
                    for mapped in model.0.borrow_mut().iter_mut() {
                        assert!(force || mapped.detached || mapped.state != State::Live);
                        assert_ne!(mapped.state, State::Withheld);
                        mapped.detached = true;
                    }
                    at = attach(dma);
                } else {
                    let live = !force && status == Status::MappingsLive;
                    assert!(live || status == Status::Invalidation);
                }
            }
            Dma::Unmap(_) | Dma::Access(_) => {}
        }
        model.check(&machine, &at);
    }
    machine.poll_result.set(1);
    for at in 0..count() {
        unmap_one(&machine, dma, &model, at);
    }
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    model.take_released(&machine);
    assert!(machine.all_frames_are_back());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn allocators_return_the_addresses_of_the_rust_types(steps in steps()) {
        let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).unwrap();
        let tree = || CachedTree::new(space);
        let magazines = Magazines::new(space, MagazineLimits::DEFAULT, RefCell::new).unwrap();
        compare(IovaKind::Magazines, &magazines, &steps);
        let linux = LinuxRcache::new(tree(), RefCell::new);
        compare(IovaKind::LinuxRcache, &linux, &steps);
        compare(IovaKind::CachedTree, &Locked::new(tree(), RefCell::new), &steps);
        let eiovar = Eiovar::new(tree(), Capacity::Unbounded);
        compare(IovaKind::Eiovar, &Locked::new(eiovar, RefCell::new), &steps);
        let freebsd = Locked::new(FreeBsdTree::new(space), RefCell::new);
        compare(IovaKind::FreebsdTree, &freebsd, &steps);
    }

    #[test]
    fn a_strict_layer_releases_only_what_no_device_reaches(steps in dma_steps()) {
        run(DmaPolicy::Strict, &steps);
    }

    #[test]
    fn a_burst_releases_only_what_no_device_reaches(steps in dma_steps()) {
        run(DmaPolicy::Burst, &steps);
    }
}
