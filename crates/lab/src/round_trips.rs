//! Round trips of a request-response trace, and the time that a mode adds to one.

use std::collections::BTreeMap;

use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, Nanos};
use serde::Serialize;

use crate::plan::{Plan, Step};
use crate::replay::Delays;

/// A trace has this many round trips at least.
const MIN_ROUNDS: u64 = 1000;
/// In this many of a hundred round trips, a device sends and receives no more than a message.
const TURNS_OF_100: u64 = 95;
/// Buffers of a sent message: headers and payload.
const SENT: u64 = 2;
/// Buffers of a received message.
const RECEIVED: u64 = 1;
/// Devices whose round trips are counted, in the order of their appearance. It bounds the memory.
const DEVICES: usize = 256;

/// Round trips of the device that has most of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundTrips {
    /// Number of round trips.
    pub count: u64,
    /// Median on the trace's clock, rounded up by at most 1/64.
    pub median_ns: u64,
    /// Maps in a round trip.
    pub maps: f64,
    /// Unmaps in a round trip.
    pub unmaps: f64,
    /// Unmaps of buffers that the device may write, in a round trip.
    pub received: f64,
}

/// The time that a mode adds to a round trip of the trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct RoundTripCost {
    /// Number of round trips.
    pub count: u64,
    /// Median round trip of the trace, by its timestamps.
    pub median_ns: u64,
    /// Time of the maps and unmaps of a round trip, and the mean time for which the layer withholds
    /// a received buffer. `None` without timing, or if the profile states no clock.
    pub added_ns: Option<f64>,
    /// `added_ns` as a share of `median_ns`.
    pub loss: Option<f64>,
}

impl RoundTripCost {
    /// Returns zeros with the `Some` fields of a run, timed or not.
    pub(crate) fn of_run(timed: bool) -> Self {
        Self {
            added_ns: timed.then_some(0.0),
            loss: timed.then_some(0.0),
            ..Self::default()
        }
    }
}

impl RoundTrips {
    /// Returns the cost in a mode. `cycles` are those of a map and of an unmap, `withheld_ns` is
    /// the mean delay of a received buffer.
    pub fn cost(
        &self,
        cycles: Option<(f64, f64)>,
        clock_ghz: Option<f64>,
        withheld_ns: Option<f64>,
    ) -> RoundTripCost {
        let added_ns = cycles.zip(clock_ghz).map(|((map, unmap), clock)| {
            let work = (map * self.maps + unmap * self.unmaps) / clock;
            work + self.received * withheld_ns.unwrap_or(0.0)
        });
        RoundTripCost {
            count: self.count,
            median_ns: self.median_ns,
            added_ns,
            loss: added_ns
                .filter(|_| self.median_ns > 0)
                .map(|added| added / self.median_ns as f64),
        }
    }
}

/// Finds the round trips in the steps of a trace.
///
/// A device begins a round trip when it maps a buffer to send while no sent buffer is mapped. In a
/// request-response trace, nearly all such rounds have one message in each direction. Drivers that
/// keep their receive buffers mapped show only the sent one.
#[derive(Debug, Clone, Default)]
pub struct RoundTripFinder {
    devices: BTreeMap<DeviceIndex, Device>,
}

#[derive(Debug, Clone, Default)]
struct Device {
    /// Sent buffers that are mapped.
    sending: u64,
    /// Start of the current round; `None` before the first.
    began: Option<Nanos>,
    /// The current round.
    round: Round,
    /// All complete rounds.
    all: Round,
    count: u64,
    turns: u64,
    times: Delays,
}

#[derive(Debug, Clone, Copy, Default)]
struct Round {
    sent: u64,
    maps: u64,
    unmaps: u64,
    received: u64,
}

impl RoundTripFinder {
    /// Adds the steps of a plan.
    pub fn observe(&mut self, plan: &Plan) {
        for timed in &plan.steps {
            match timed.step {
                Step::Map {
                    device, direction, ..
                } => {
                    if let Some(device) = self.device(device) {
                        device.map(timed.time, direction);
                    }
                }
                Step::Unmap {
                    device, direction, ..
                } => {
                    if let Some(device) = self.device(device) {
                        device.unmap(direction);
                    }
                }
                _ => {}
            }
        }
    }

    fn device(&mut self, index: DeviceIndex) -> Option<&mut Device> {
        if self.devices.len() >= DEVICES && !self.devices.contains_key(&index) {
            return None;
        }
        Some(self.devices.entry(index).or_default())
    }

    /// Returns the round trips of the device that has most; `None` if the trace is not
    /// request-response.
    pub fn finish(&self) -> Option<RoundTrips> {
        let takes_turns = |device: &&Device| {
            let needed = device.count.saturating_mul(TURNS_OF_100);
            device.count >= MIN_ROUNDS && device.turns.saturating_mul(100) >= needed
        };
        let devices = self.devices.values().filter(takes_turns);
        let device = devices.max_by_key(|device| device.count)?;
        let of_round = |total: u64| total as f64 / device.count as f64;
        Some(RoundTrips {
            count: device.count,
            median_ns: device.times.percentile(50)?,
            maps: of_round(device.all.maps),
            unmaps: of_round(device.all.unmaps),
            received: of_round(device.all.received),
        })
    }
}

impl Device {
    fn map(&mut self, now: Nanos, direction: Direction) {
        if direction == Direction::ToDevice {
            if self.sending == 0 {
                self.begin(now);
            }
            self.sending += 1;
            self.round.sent += 1;
        }
        self.round.maps += 1;
    }

    fn unmap(&mut self, direction: Direction) {
        self.round.unmaps += 1;
        if direction == Direction::ToDevice {
            self.sending = self.sending.saturating_sub(1);
        } else {
            self.round.received += 1;
        }
    }

    /// Ends the current round, if any, and begins the next.
    fn begin(&mut self, now: Nanos) {
        let round = std::mem::take(&mut self.round);
        let Some(began) = self.began.replace(now) else {
            return;
        };
        self.count += 1;
        self.turns += u64::from(round.sent <= SENT && round.received <= RECEIVED);
        self.times.record(now.0.saturating_sub(began.0));
        self.all.maps += round.maps;
        self.all.unmaps += round.unmaps;
        self.all.received += round.received;
    }
}

#[cfg(test)]
mod tests {
    use ringfence_trace::MappingId;

    use super::*;
    use crate::plan::TimedStep;

    const SEND: Direction = Direction::ToDevice;
    const RECEIVE: Direction = Direction::FromDevice;

    /// A plan of `rounds` rounds of `sent` and `received` buffers that begin every `period` ns.
    fn plan(rounds: u64, sent: u32, received: u32, period: u64) -> Plan {
        let mut plan = Plan::default();
        let device = DeviceIndex(3);
        for round in 0..rounds {
            let time = Nanos(round * period);
            let mut push = |maps: bool, number: u32, direction| {
                let id = MappingId(number);
                let (cpu, first, count) = (0, 0, 1);
                let step = if maps {
                    Step::Map {
                        id,
                        device,
                        cpu,
                        direction,
                        first,
                        count,
                    }
                } else {
                    Step::Unmap {
                        id,
                        device,
                        cpu,
                        direction,
                    }
                };
                plan.steps.push(TimedStep { time, step });
            };
            (0..sent).for_each(|number| push(true, number, SEND));
            (0..sent).for_each(|number| push(false, number, SEND));
            for number in 0..received {
                push(false, sent + number, RECEIVE);
                push(true, sent + number, RECEIVE);
            }
        }
        plan
    }

    fn found(plans: &[Plan]) -> Option<RoundTrips> {
        let mut finder = RoundTripFinder::default();
        plans.iter().for_each(|plan| finder.observe(plan));
        finder.finish()
    }

    #[test]
    fn turns_of_single_messages_are_round_trips() {
        for (sent, received, turns) in [
            (1, 1, true),
            (2, 1, true),
            (2, 0, true),
            // Segments of a stream; acknowledgements of one; requests of a disk.
            (3, 0, false),
            (1, 2, false),
            (0, 1, false),
        ] {
            let trips = found(&[plan(1200, sent, received, 60)]);
            let case = format!("{sent} sent, {received} received: {trips:?}");
            assert_eq!(trips.is_some(), turns, "{case}");
            if let Some(trips) = trips {
                // The last round has no end.
                assert_eq!((trips.count, trips.median_ns), (1199, 60), "{case}");
                let each = f64::from(sent + received);
                assert_eq!((trips.maps, trips.unmaps), (each, each), "{case}");
                assert_eq!(trips.received, f64::from(received), "{case}");
            }
        }
        assert_eq!(found(&[plan(1000, 1, 1, 60)]), None, "too few");
    }

    #[test]
    fn some_rounds_may_be_longer() {
        // A round that follows the other plan ends at its first step.
        for (longer, wanted) in [(60, true), (70, false)] {
            let plans = [plan(1241, 1, 1, 50), plan(longer, 3, 1, 50)];
            assert_eq!(found(&plans).is_some(), wanted, "{longer}");
        }
    }

    #[test]
    fn a_cost_is_the_work_and_the_wait_for_the_received_buffer() {
        let trips = RoundTrips {
            count: 1199,
            median_ns: 10_000,
            maps: 3.0,
            unmaps: 3.0,
            received: 0.5,
        };
        let cost = trips.cost(Some((200.0, 2400.0)), Some(2.0), Some(1000.0));
        assert_eq!(cost.added_ns, Some(3.0 * 2600.0 / 2.0 + 500.0));
        assert_eq!(cost.loss, Some(0.44));
        for (cycles, clock) in [(None, Some(2.0)), (Some((1.0, 1.0)), None)] {
            let cost = trips.cost(cycles, clock, None);
            assert_eq!(
                (cost.median_ns, cost.added_ns, cost.loss),
                (10_000, None, None)
            );
        }
    }

    /// A disk's requests are no round trips, however many they are.
    #[test]
    fn another_device_does_not_hide_round_trips() {
        let of = |mut plan: Plan, index| {
            for timed in &mut plan.steps {
                if let Step::Map { device, .. } | Step::Unmap { device, .. } = &mut timed.step {
                    *device = DeviceIndex(index);
                }
            }
            plan
        };
        let (card, disk) = (of(plan(1200, 1, 1, 60), 0), of(plan(1300, 3, 0, 55), 1));
        let trips = found(&[card, disk]);
        assert_eq!(trips.map(|trips| trips.count), Some(1199));
    }

    #[test]
    fn the_number_of_devices_is_bounded() {
        let mut finder = RoundTripFinder::default();
        let followed = (0..1000).filter(|n| finder.device(DeviceIndex(*n)).is_some());
        assert_eq!(followed.count(), DEVICES);
        assert!(finder.device(DeviceIndex(0)).is_some());
    }
}
