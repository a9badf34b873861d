//! The fuzz targets as functions of bytes, so that libFuzzer and the plain random run on stable
//! share them.
//!
//! A target panics when the code under test breaks an invariant. It passes the name of each outcome
//! to `reached`, so that a test can require the committed corpus to reach every error.
#![forbid(unsafe_code)]

pub mod corpus;
pub mod drivers;
pub mod firmware;
pub mod handover;
mod memory;
pub mod parquet;
mod pieces;
pub mod pviommu;
pub mod pviommu_request;
pub mod pviommu_stream;
pub mod random;
pub mod replay;
pub mod riommu;
pub mod rtranslate;
pub mod serve;
pub mod trace_operations;
pub mod trace_text;
pub mod translate;
pub mod vfio_user;
pub mod vhost_iotlb;
pub mod vhost_user;
pub mod virtio_iommu;
pub mod walk;

/// Callback that takes the name of an outcome, such as an error's variant.
pub type OutcomeHook<'a> = &'a mut dyn FnMut(&'static str);

/// A target with its name, and every outcome that its corpus must reach.
pub struct Target {
    /// Name of the target, of its corpus and of its libFuzzer binary.
    pub name: &'static str,
    /// Runs one input.
    pub run: fn(&[u8], OutcomeHook<'_>),
    /// Names of the outcomes.
    pub outcomes: &'static [&'static str],
}

/// All targets, in alphabetical order.
pub const TARGETS: &[Target] = &[
    Target {
        name: "drivers",
        run: drivers::run,
        outcomes: drivers::OUTCOMES,
    },
    Target {
        name: "firmware",
        run: firmware::run,
        outcomes: firmware::OUTCOMES,
    },
    Target {
        name: "handover",
        run: handover::run,
        outcomes: handover::OUTCOMES,
    },
    Target {
        name: "parquet",
        run: parquet::run,
        outcomes: parquet::OUTCOMES,
    },
    Target {
        name: "pviommu",
        run: pviommu::run,
        outcomes: pviommu::OUTCOMES,
    },
    Target {
        name: "pviommu_request",
        run: pviommu_request::run,
        outcomes: pviommu_request::OUTCOMES,
    },
    Target {
        name: "pviommu_stream",
        run: pviommu_stream::run,
        outcomes: pviommu_stream::OUTCOMES,
    },
    Target {
        name: "replay",
        run: replay::run,
        outcomes: replay::OUTCOMES,
    },
    Target {
        name: "riommu",
        run: riommu::run,
        outcomes: riommu::OUTCOMES,
    },
    Target {
        name: "rtranslate",
        run: rtranslate::run,
        outcomes: rtranslate::OUTCOMES,
    },
    Target {
        name: "serve",
        run: serve::run,
        outcomes: serve::OUTCOMES,
    },
    Target {
        name: "trace_operations",
        run: trace_operations::run,
        outcomes: trace_operations::OUTCOMES,
    },
    Target {
        name: "trace_text",
        run: trace_text::run,
        outcomes: trace_text::OUTCOMES,
    },
    Target {
        name: "translate",
        run: translate::run,
        outcomes: translate::OUTCOMES,
    },
    Target {
        name: "vfio_user",
        run: vfio_user::run,
        outcomes: vfio_user::OUTCOMES,
    },
    Target {
        name: "vhost_iotlb",
        run: vhost_iotlb::run,
        outcomes: vhost_iotlb::OUTCOMES,
    },
    Target {
        name: "vhost_user",
        run: vhost_user::run,
        outcomes: vhost_user::OUTCOMES,
    },
    Target {
        name: "virtio_iommu",
        run: virtio_iommu::run,
        outcomes: virtio_iommu::OUTCOMES,
    },
    Target {
        name: "walk",
        run: walk::run,
        outcomes: walk::OUTCOMES,
    },
];
