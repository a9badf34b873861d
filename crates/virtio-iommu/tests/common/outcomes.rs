//! Names of the outcomes of a session: every error and every kind of fault.

use ringfence_virtio_iommu::{
    EndpointError, RequestError, ReservedRegionsError, SnapshotError, TranslationFaultReason,
};

/// Checks that an error prints a text.
pub(crate) fn say(error: &impl ToString) {
    let text = error.to_string();
    assert!(!text.is_empty(), "an error without a word");
}

pub(crate) fn request_error(error: RequestError) -> &'static str {
    match error {
        RequestError::TooShort { .. } => "request: TooShort",
        RequestError::NoTail { .. } => "request: NoTail",
        RequestError::UnknownType(_) => "request: UnknownType",
        RequestError::NotNegotiated => "request: NotNegotiated",
        RequestError::ReservedField => "request: ReservedField",
        RequestError::UnknownFlags(_) => "request: UnknownFlags",
        RequestError::NoEndpoint(_) => "request: NoEndpoint",
        RequestError::NoDomain(_) => "request: NoDomain",
        RequestError::DomainOutOfRange(_) => "request: DomainOutOfRange",
        RequestError::BypassMismatch(_) => "request: BypassMismatch",
        RequestError::BypassDomain(_) => "request: BypassDomain",
        RequestError::NotAttached { .. } => "request: NotAttached",
        RequestError::Incompatible { .. } => "request: Incompatible",
        RequestError::EndBeforeStart { .. } => "request: EndBeforeStart",
        RequestError::Misaligned(_) => "request: Misaligned",
        RequestError::OutsideInput(_) => "request: OutsideInput",
        RequestError::OutsidePhysical(_) => "request: OutsidePhysical",
        RequestError::Reserved(_) => "request: Reserved",
        RequestError::Overlap(_) => "request: Overlap",
        RequestError::Splits(_) => "request: Splits",
        RequestError::ProbeTooShort { .. } => "request: ProbeTooShort",
        RequestError::LimitReached(_) => "request: Full",
        RequestError::Sink(_) => "request: Sink",
        RequestError::Blocked(_) => "request: Blocked",
        _ => "request: unknown",
    }
}

pub(crate) fn snapshot_error(error: SnapshotError) -> &'static str {
    match error {
        SnapshotError::NotReset => "snapshot: NotReset",
        SnapshotError::NoSnapshot => "snapshot: NoSnapshot",
        SnapshotError::Version(_) => "snapshot: Version",
        SnapshotError::Truncated => "snapshot: Truncated",
        SnapshotError::TrailingBytes(_) => "snapshot: TrailingBytes",
        SnapshotError::BadValue { .. } => "snapshot: BadValue",
        SnapshotError::Lazy(_) => "snapshot: Lazy",
        SnapshotError::Features(_) => "snapshot: Features",
        SnapshotError::Bypass => "snapshot: Bypass",
        SnapshotError::Endpoint(_) => "snapshot: Endpoint",
        SnapshotError::Domain(_) => "snapshot: Domain",
        SnapshotError::Mappings(_) => "snapshot: Mappings",
        SnapshotError::Refused(_) => "snapshot: Refused",
        SnapshotError::Events(_) => "snapshot: Events",
        SnapshotError::Sink(_) => "snapshot: Sink",
        _ => "snapshot: unknown",
    }
}

pub(crate) fn denied_reason(reason: TranslationFaultReason) -> &'static str {
    match reason {
        TranslationFaultReason::NoEndpoint => "denied: NoEndpoint",
        TranslationFaultReason::Unattached => "denied: Unattached",
        TranslationFaultReason::NotMapped => "denied: NotMapped",
        TranslationFaultReason::Permission => "denied: Permission",
        TranslationFaultReason::Reserved => "denied: Reserved",
        TranslationFaultReason::Blocked => "denied: Blocked",
    }
}

pub(crate) fn endpoint_error(error: EndpointError) -> &'static str {
    match error {
        EndpointError::Exists(_) => "endpoint: Exists",
        EndpointError::NoEndpoint(_) => "endpoint: NotThere",
        EndpointError::LimitReached(_) => "endpoint: Full",
        EndpointError::Reserved(ReservedRegionsError::TooMany { .. }) => "endpoint: TooMany",
        EndpointError::Reserved(ReservedRegionsError::Overlap(..)) => "endpoint: Overlap",
        EndpointError::Reserved(ReservedRegionsError::TwoMsi(..)) => "endpoint: TwoMsi",
        EndpointError::Sink(_) => "endpoint: Sink",
        _ => "endpoint: unknown",
    }
}

/// All outcomes that inputs can reach.
pub(crate) const OUTCOMES: &[&str] = &[
    "not begun",
    "done",
    "event",
    "event dropped",
    "buffer too small",
    "restored",
    "request: TooShort",
    "request: NoTail",
    "request: UnknownType",
    "request: NotNegotiated",
    "request: ReservedField",
    "request: UnknownFlags",
    "request: NoEndpoint",
    "request: NoDomain",
    "request: DomainOutOfRange",
    "request: BypassMismatch",
    "request: BypassDomain",
    "request: NotAttached",
    "request: Incompatible",
    "request: EndBeforeStart",
    "request: Misaligned",
    "request: OutsideInput",
    "request: OutsidePhysical",
    "request: Reserved",
    "request: Overlap",
    "request: Splits",
    "request: ProbeTooShort",
    "request: Full",
    "request: Sink",
    "request: Blocked",
    "snapshot: NotReset",
    "snapshot: NoSnapshot",
    "snapshot: Version",
    "snapshot: Truncated",
    "snapshot: TrailingBytes",
    "snapshot: BadValue",
    "snapshot: Lazy",
    "snapshot: Features",
    "snapshot: Bypass",
    "snapshot: Endpoint",
    "snapshot: Domain",
    "snapshot: Mappings",
    "snapshot: Refused",
    "snapshot: Events",
    "snapshot: Sink",
    "denied: NoEndpoint",
    "denied: Unattached",
    "denied: NotMapped",
    "denied: Permission",
    "denied: Reserved",
    "denied: Blocked",
    "endpoint: Exists",
    "endpoint: NotThere",
    "endpoint: Full",
    "endpoint: TooMany",
    "endpoint: Overlap",
    "endpoint: TwoMsi",
    "endpoint: Sink",
];
