//! A session: a driver, its device, and the invariants after every step.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use ringfence_devices::api::{DmaHooks, UnmapOutcome};
use ringfence_devices::block::BlockError;
use ringfence_devices::nic::Environment;
use ringfence_devices::ring::{CompletionFault, MalformedCompletion};
use ringfence_devices::{Buffer, DeviceMapping, Transfer};
use ringfence_types::{Iova, PhysRange};

use super::rig::{self, OracleChecked};
use crate::OutcomeHook;

/// Maximum number of remembered mappings.
const REMEMBERED: usize = 256;
/// Maximum number of frames for tables and rings of a machine beyond those of an opened port: those
/// of a page table with at most [`LIVE`] mappings at any addresses.
const FRAMES: u64 = 4 * LIVE as u64;
/// Maximum number of mapped buffers of any of these drivers.
const LIVE: usize = 512;

/// Mappings that the device received, the latest last.
#[derive(Debug, Clone, Default)]
pub(super) struct MappingLog(Rc<RefCell<Vec<DeviceMapping>>>);

impl<P> DmaHooks<P> for MappingLog {
    fn mapped(&mut self, _: &mut P, mapping: &DeviceMapping, _: PhysRange) {
        let mut all = self.0.borrow_mut();
        if all.len() == REMEMBERED {
            all.remove(0);
        }
        all.push(*mapping);
    }
    fn unmapping(&mut self, _: &mut P, _: &DeviceMapping) {}
    fn unmapped(&mut self, _: &mut P, _: &DeviceMapping, _: UnmapOutcome) {}
    fn released(&mut self, _: &mut P, _: &Buffer) {}
}

impl MappingLog {
    /// Returns the mapping received `ago` mappings ago.
    fn ago(&self, ago: u8) -> Option<DeviceMapping> {
        let all = self.0.borrow();
        all.iter().rev().nth(usize::from(ago)).copied()
    }
}

/// A step of the input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) a: u8,
    pub(super) b: u16,
    pub(super) c: u32,
}

/// Start and size of an area in the device's address space.
pub(super) type Area = (Iova, u64);

/// A driver with a hostile device.
pub(super) trait Hostile<H>: Sized {
    /// Opens the driver without any request.
    fn open<W: OracleChecked + Environment<Handle = H>>(world: &mut W, seed: u8) -> Self;
    /// Returns all memory of its rings, lists and tables.
    fn areas(&self) -> Vec<Area>;
    /// The driver makes a request.
    fn request<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    );
    /// The driver handles completions.
    fn service<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    );
    /// Returns the address and the bytes of a completion that the device forges; `None` if this
    /// device has no completions in memory.
    fn claim(&self, step: Step) -> Option<(Iova, [u8; 16])>;
    /// The device works. Its own rings are mapped while it is open, so its accesses to them are
    /// never stopped.
    fn work<W: OracleChecked + Environment<Handle = H>>(&mut self, world: &mut W);
    /// The driver rings a doorbell.
    fn doorbell(&mut self, value: u32);
    /// Returns the number of buffers taken from the driver's pool.
    fn out(&self) -> usize;
    /// Closes the driver and returns the number of buffers that were not returned.
    fn close<W: OracleChecked + Environment<Handle = H>>(
        self,
        world: &mut W,
        reached: OutcomeHook<'_>,
    ) -> usize;
}

/// A session of `D` in a world.
pub(super) struct Session<W, D> {
    world: W,
    driver: D,
    told: MappingLog,
    /// True if protection is exact to the byte: no byte next to a buffer is reached.
    byte_granular: bool,
    opened_with: u64,
    of: PhantomData<D>,
}

impl<W: OracleChecked + Environment, D: Hostile<W::Handle>> Session<W, D> {
    pub(super) fn run(
        mut world: W,
        told: MappingLog,
        byte_granular: bool,
        seed: u8,
        steps: &[u8],
        reached: OutcomeHook<'_>,
    ) {
        let driver = D::open(&mut world, seed);
        let opened_with = world.frames_in_use();
        let mut this = Self {
            world,
            driver,
            told,
            byte_granular,
            opened_with,
            of: PhantomData,
        };
        for step in steps.as_chunks::<8>().0 {
            this.step(step, reached);
            this.holds(reached);
        }
        let Self {
            mut world, driver, ..
        } = this;
        let lost = driver.close(&mut world, reached);
        assert_eq!((lost, world.judge().live()), (0, 0), "everything is back");
    }

    fn step(&mut self, raw: &[u8; 8], reached: OutcomeHook<'_>) {
        let step = Step {
            a: raw[1],
            b: u16::from_le_bytes([raw[2], raw[3]]),
            c: u32::from_le_bytes([raw[4], raw[5], raw[6], raw[7]]),
        };
        let world = &mut self.world;
        match raw[0] % 8 {
            0 => self.driver.request(world, step, reached),
            1 => self.driver.service(world, step, reached),
            2 => {
                let target = match step.a {
                    0..128 => {
                        let areas = self.driver.areas();
                        let (at, bytes) = areas[usize::from(step.a) % areas.len()];
                        // All pages of a long area are reached, at offsets that `b` can express.
                        Some(at.wrapping_add(u64::from(step.b) * 16 % bytes))
                    }
                    _ => self.told.ago(step.a - 128).map(|mapping| {
                        let offset = u64::from(step.b) % mapping.range.bytes();
                        mapping.range.start().wrapping_add(offset & !15)
                    }),
                };
                let mut bytes = [0; 16];
                bytes
                    .as_chunks_mut::<4>()
                    .0
                    .iter_mut()
                    .for_each(|word| *word = step.c.to_le_bytes());
                if let Some(target) = target {
                    let written = world.bus().write(rig::NIC, target, &bytes);
                    reached(match written {
                        Ok(()) => "write let through",
                        Err(_) => "write stopped",
                    });
                }
            }
            3 => {
                if let Some((at, bytes)) = self.driver.claim(step) {
                    let written = world.bus().write(rig::NIC, at, &bytes);
                    assert_eq!(written, Ok(()), "completions are the device's to write");
                }
            }
            4 => self.driver.work(world),
            5 => self.driver.doorbell(step.c),
            6 => {
                let at =
                    u64::from_be_bytes([raw[2], raw[3], raw[4], raw[5], raw[6], raw[7], raw[1], 0]);
                let (through, stopped) = ("wild let through", "wild stopped");
                reached(match self.touch(Iova::new(at & !63), raw[1]) {
                    true => through,
                    false => stopped,
                });
            }
            _ => {
                if let Some(mapping) = self.told.ago(step.a) {
                    let at = mapping
                        .range
                        .start()
                        .wrapping_add(u64::from(step.b) & 4095 & !63);
                    reached(match self.touch(at, raw[4]) {
                        true => "old let through",
                        false => "old stopped",
                    });
                }
            }
        }
    }

    /// The device accesses 64 bytes; returns true if the access passes. If the judge knows no
    /// buffer at that address, the access must be to the device's own rings.
    fn touch(&mut self, at: Iova, write: u8) -> bool {
        let judged = self.world.judge().accesses;
        let mut bytes = [0x5a; 64];
        let done = match write & 1 {
            0 => self.world.bus().read(rig::NIC, at, &mut bytes),
            _ => self.world.bus().write(rig::NIC, at, &bytes),
        };
        if done.is_ok() && self.world.judge().accesses == judged {
            let inside = |(start, bytes): &Area| {
                let (first, end) = (start.get() & !4095, start.get() + bytes);
                (first..end.next_multiple_of(4096)).contains(&at.get())
            };
            assert!(
                self.driver.areas().iter().any(inside),
                "{at} leads into memory that is nobody's buffer and no ring"
            );
        }
        done.is_ok()
    }

    fn holds(&mut self, reached: OutcomeHook<'_>) {
        let frames = self.world.frames_in_use();
        let judge = self.world.judge();
        if judge.colocated > 0 {
            reached("colocated");
        }
        let beside = match self.byte_granular {
            true => 0,
            false => judge.colocated,
        };
        assert_eq!(judge.violations, beside, "{:?}", judge.reached);
        assert_eq!(judge.false_faults, 0);
        assert!(judge.live() <= LIVE, "{} buffers are mapped", judge.live());
        assert!(frames <= self.opened_with + FRAMES, "{frames} frames");
        assert!(self.driver.out() <= LIVE);
    }
}

/// Returns the name of a malformed completion. A kind added later has none here, which the corpus
/// test reports.
pub(super) fn lie(lie: &MalformedCompletion) -> &'static str {
    match lie.kind {
        CompletionFault::Nothing => "lie: Nothing",
        CompletionFault::OutOfOrder { .. } | CompletionFault::NotOutstanding { .. } => "lie: Index",
        CompletionFault::Length { .. } => "lie: Length",
        CompletionFault::Status(_) => "lie: Status",
        CompletionFault::Queue(_) => "lie: Queue",
        _ => "lie: unknown",
    }
}

/// Returns the name of a disk driver's error. Other errors must not occur here.
pub(super) fn block_error(error: &BlockError) -> &'static str {
    match error {
        BlockError::Device(found) => lie(found),
        BlockError::Full => "full",
        BlockError::Size { .. } => "refused: Size",
        other => panic!("{other}"),
    }
}
