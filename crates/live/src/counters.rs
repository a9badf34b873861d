//! What is counted while guests run, and how it reads: Prometheus text.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($(#[$outer:meta])* $name:ident { $($(#[doc = $text:literal])+ $field:ident),+ $(,)? }) => {
        $(#[$outer])*
        #[derive(Debug, Default)]
        pub struct $name {
            $($(#[doc = $text])+ pub $field: Counter,)+
        }

        impl $name {
            /// Name, meaning and value of each.
            fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($field), concat!($($text),+), self.$field.get()),)+]
            }
        }
    };
}

counters! {
    /// Of one device.
    DeviceCounters {
        /// Messages of the client.
        messages,
        /// Messages that were refused.
        refused,
        /// Doorbells.
        doorbells,
        /// Requests of the driver.
        requests,
        /// Requests that ended with an error.
        failed,
        /// Requests that could not even be answered.
        malformed,
        /// Mappings asked for.
        maps,
        /// Unmappings asked for.
        unmaps,
        /// Accesses that the IOMMU stopped.
        faults,
        /// Accesses to try the IOMMU that it let through.
        strays_through,
        /// Flushes.
        flushes,
        /// Bytes of data towards the guest.
        bytes_read,
        /// Bytes of data from the guest.
        bytes_written,
        /// Interrupts.
        interrupts,
        /// Queues that could not be used any further.
        broken_queues,
    }
}

/// The counters of `devices`, each by its name, in the text format of Prometheus.
pub fn prometheus(devices: &[(&str, &DeviceCounters)]) -> String {
    let mut text = String::new();
    let all: Vec<_> = devices
        .iter()
        .map(|(device, counters)| (device, counters.each()))
        .collect();
    let Some((_, first)) = all.first() else {
        return text;
    };
    for (at, (name, help, _)) in first.iter().enumerate() {
        let _ = writeln!(text, "# HELP ringfence_{name}_total {}", help.trim());
        let _ = writeln!(text, "# TYPE ringfence_{name}_total counter");
        for (device, values) in &all {
            if let Some((_, _, value)) = values.get(at) {
                let _ = writeln!(
                    text,
                    "ringfence_{name}_total{{device=\"{device}\"}} {value}"
                );
            }
        }
    }
    text
}
