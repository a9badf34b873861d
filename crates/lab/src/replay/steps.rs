//! The loop that performs the steps of a plan.

use ringfence_dma::MapReason;
use ringfence_trace::{DeviceIndex, MappingId};

use super::hooks::{MapStep, ReplayHooks};
use super::{StalledMap, StalledMaps};
use crate::error::LabError;
use crate::layer::{DmaOps, MappingToken, OpKey};
use crate::plan::{Plan, Step, TimedStep};

/// A DMA layer and the tokens of its driver, driven by plans.
pub struct Replay<D: DmaOps + ?Sized> {
    tokens: Vec<MappingToken>,
    stalled: StalledMaps,
    /// The layer that the steps call.
    pub layer: Box<D>,
}

/// The result of a map.
enum MapAttempt {
    /// The map succeeded, or the layer refused it for good.
    Done,
    /// The ring is full.
    RingFull,
}

impl<D: DmaOps + ?Sized> Replay<D> {
    /// Creates a replay that drives `layer`.
    pub fn new(layer: Box<D>) -> Self {
        Self {
            tokens: Vec::new(),
            stalled: StalledMaps::default(),
            layer,
        }
    }

    /// Allocates everything that the steps of a plan need besides devices, so that the loop does
    /// not allocate.
    ///
    /// # Errors
    /// Memory is short.
    pub(crate) fn prepare(&mut self, needs: &PlanResources) -> Result<(), LabError> {
        if self.tokens.len() < needs.mappings {
            self.tokens
                .resize_with(needs.mappings, MappingToken::default);
        }
        self.layer.reserve(needs.cpus, needs.segments)
    }

    /// Performs some steps of `plan`.
    ///
    /// # Errors
    /// A hook failed.
    #[inline]
    pub(crate) fn run<H: ReplayHooks>(
        &mut self,
        plan: &Plan,
        steps: &[TimedStep],
        hooks: &mut H,
    ) -> Result<(), LabError> {
        for timed in steps {
            self.layer.set_time(timed.time);
            hooks.begin_step(timed.time);
            match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    direction,
                    first,
                    count,
                } => {
                    hooks.begin_map();
                    hooks.attach(&mut *self.layer, device)?;
                    let step = MapStep {
                        id,
                        key: OpKey::new(device, cpu, direction),
                        pieces: plan.segments(first, count),
                    };
                    self.map_in_turn(step, hooks)?;
                }
                Step::Unmap {
                    id,
                    device,
                    cpu,
                    direction,
                } => {
                    hooks.begin_unmap();
                    let key = OpKey::new(device, cpu, direction);
                    self.unmap(id, key, hooks)?;
                    self.retry_stalled(key, hooks)?;
                }
                Step::EndBurst {
                    device,
                    cpu,
                    direction,
                } => {
                    hooks.begin_unmap();
                    // A descriptor continues across the loops of a driver.
                    if self.layer.space_traits().descriptors.is_none() {
                        self.end_burst(OpKey::new(device, cpu, direction), hooks)?;
                    }
                }
                Step::EndDescriptor {
                    device,
                    cpu,
                    direction,
                    of,
                } => {
                    hooks.begin_unmap();
                    if self.layer.space_traits().descriptors == Some(of) {
                        self.end_burst(OpKey::new(device, cpu, direction), hooks)?;
                    }
                }
                Step::Doorbell {
                    device,
                    cpu,
                    direction,
                } => {
                    // The write-backs belong to the preceding maps.
                    hooks.begin_map();
                    self.layer.sync_map(OpKey::new(device, cpu, direction));
                }
                Step::Tick => {
                    hooks.begin_unmap();
                    if hooks.takes_tick(&*self.layer, plan, timed.time) {
                        self.layer.tick();
                        hooks.ticked(&mut *self.layer);
                    }
                }
            }
            hooks.end_step();
        }
        Ok(())
    }

    #[inline(always)]
    fn end_burst<H: ReplayHooks>(&mut self, key: OpKey, hooks: &mut H) -> Result<(), LabError> {
        self.layer.end_burst(key, hooks.returned());
        hooks.burst_ended();
        self.retry_stalled(key, hooks)
    }

    /// Maps a buffer. If the ring is full or other maps wait for it, queues the map.
    #[inline(always)]
    fn map_in_turn<H: ReplayHooks>(
        &mut self,
        step: MapStep<'_>,
        hooks: &mut H,
    ) -> Result<(), LabError> {
        let MapStep { id, key, pieces } = step;
        if (self.stalled.is_empty() || !self.stalled.queues(key.device, key.direction))
            && let MapAttempt::Done = self.map(step, hooks)?
        {
            return Ok(());
        }
        let map = StalledMap {
            id,
            cpu: key.cpu,
            pieces: pieces.into(),
        };
        self.stalled.push_back(key.device, key.direction, map);
        hooks.stalled(key);
        Ok(())
    }

    #[inline(always)]
    fn map<H: ReplayHooks>(
        &mut self,
        step: MapStep<'_>,
        hooks: &mut H,
    ) -> Result<MapAttempt, LabError> {
        let buffer = hooks.buffer(step.id);
        let Some(slot) = self.tokens.get_mut(step.id.index()) else {
            return Ok(MapAttempt::Done);
        };
        match self.layer.map(step.key, buffer, step.pieces) {
            Ok(made) => {
                *slot = made.token;
                hooks.mapped(&*self.layer, step, slot, made.steps)?;
            }
            Err(error) if matches!(error.reason, MapReason::RingFull(_)) => {
                hooks.ring_full();
                return Ok(MapAttempt::RingFull);
            }
            Err(error) => hooks.refused(step.key, error)?,
        }
        Ok(MapAttempt::Done)
    }

    /// Unmaps a mapping. Without a mapping, the layer refused its map, or the map still waits.
    ///
    /// # Errors
    /// A hook failed.
    #[inline(always)]
    pub(crate) fn unmap<H: ReplayHooks>(
        &mut self,
        id: MappingId,
        key: OpKey,
        hooks: &mut H,
    ) -> Result<(), LabError> {
        let Some(slot) = self.tokens.get_mut(id.index()) else {
            return Ok(());
        };
        let token = core::mem::take(slot);
        if let MappingToken::None = token {
            self.give_up(id, key, hooks);
            return Ok(());
        }
        hooks.unmapping(&*self.layer, key, &token);
        let outcome = self.layer.unmap(key, token);
        hooks.unmapped(&*self.layer, key, outcome)
    }

    /// Removes the waiting map of a mapping that ends.
    #[cold]
    fn give_up<H: ReplayHooks>(&mut self, id: MappingId, key: OpKey, hooks: &mut H) {
        if self.stalled.give_up(key.device, key.direction, id) {
            hooks.stalled_out(key);
        }
    }

    #[inline(always)]
    fn retry_stalled<H: ReplayHooks>(&mut self, key: OpKey, hooks: &mut H) -> Result<(), LabError> {
        match self.stalled.is_empty() {
            true => Ok(()),
            false => self.retry(key, hooks),
        }
    }

    /// Performs the waiting maps of a ring in order until the ring is full.
    #[cold]
    fn retry<H: ReplayHooks>(&mut self, key: OpKey, hooks: &mut H) -> Result<(), LabError> {
        // In other spaces no map waits: avoid another copy of the map code.
        if !self.layer.space_traits().can_be_full {
            return Ok(());
        }
        let OpKey {
            device, direction, ..
        } = key;
        while let Some(first) = self.stalled.pop(device, direction) {
            let StalledMap { id, cpu, pieces } = &first;
            let step = MapStep {
                id: *id,
                key: OpKey { cpu: *cpu, ..key },
                pieces,
            };
            if let MapAttempt::RingFull = self.map(step, hooks)? {
                self.stalled.push_front(device, direction, first);
                break;
            }
        }
        Ok(())
    }

    /// Returns the token of a mapping.
    pub(crate) fn token(&self, id: MappingId) -> &MappingToken {
        self.tokens.get(id.index()).unwrap_or(&MappingToken::None)
    }

    /// Returns the number of waiting maps.
    pub(crate) fn waiting(&self) -> usize {
        self.stalled.len()
    }

    /// Removes all waiting maps and returns their number by ring.
    pub(crate) fn clear_stalled(&mut self) -> Vec<u64> {
        self.stalled.clear()
    }
}

/// The resources that the steps of a plan need.
#[derive(Debug, Default)]
pub struct PlanResources {
    mappings: usize,
    /// Number of segments of the longest list.
    segments: usize,
    cpus: usize,
    /// Devices in order of their first steps.
    pub(crate) devices: Vec<DeviceIndex>,
}

impl PlanResources {
    /// Returns the resources for the steps of `plan`.
    pub fn of(plan: &Plan) -> Self {
        let mut needs = Self {
            segments: 1,
            ..Self::default()
        };
        for timed in &plan.steps {
            let (device, cpu) = match timed.step {
                Step::Map {
                    id,
                    device,
                    cpu,
                    count,
                    ..
                } => {
                    needs.mappings = needs.mappings.max(id.index() + 1);
                    needs.segments = needs.segments.max(count as usize);
                    (device, cpu)
                }
                Step::Unmap { device, cpu, .. }
                | Step::EndBurst { device, cpu, .. }
                | Step::Doorbell { device, cpu, .. } => (device, cpu),
                Step::EndDescriptor { .. } | Step::Tick => continue,
            };
            needs.cpus = needs.cpus.max(usize::from(cpu) + 1);
            if needs.devices.last() != Some(&device) && !needs.devices.contains(&device) {
                needs.devices.push(device);
            }
        }
        needs
    }
}
