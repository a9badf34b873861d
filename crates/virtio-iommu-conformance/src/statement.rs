//! The statements: ids, sections, levels and checks.

use alloc::format;
use alloc::string::String;
use core::cell::RefCell;
use core::fmt;

use crate::driver::{Failure, TestContext};
use crate::{
    Make, attach, bypass, config, events, map, probe, regions, requests, robustness, unmap,
};

/// Obligation of a statement, in descending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The specification says MUST or MUST NOT.
    Must,
    /// The specification says SHOULD or SHOULD NOT.
    Should,
    /// The specification describes the behaviour without a keyword.
    Text,
    /// The specification says MAY: a device that differs conforms.
    May,
    /// The specification is silent: a monitor needs the behaviour against a hostile driver, or
    /// Linux relies on it.
    Robustness,
}

impl Level {
    /// Returns true if a device that fails the statement does not conform.
    pub const fn is_required(self) -> bool {
        matches!(self, Self::Must | Self::Should | Self::Text)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Must => "MUST",
            Self::Should => "SHOULD",
            Self::Text => "text",
            Self::May => "MAY",
            Self::Robustness => "robustness",
        })
    }
}

/// Result of a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The statement holds.
    Pass,
    /// The violated requirement and the last observation.
    Fail(String),
    /// The reason why the statement does not apply to the device.
    NotApplicable(String),
}

/// A statement about a device.
#[derive(Debug, Clone, Copy)]
pub struct Statement {
    /// Name that no other statement has.
    pub id: &'static str,
    /// Section of virtio 1.3.
    pub section: &'static str,
    /// Obligation of the device under the section.
    pub level: Level,
    /// Text of the statement.
    pub text: &'static str,
    check: fn(&TestContext<'_>) -> Result<(), Failure>,
}

impl Statement {
    /// Checks the statement on devices that `make` creates.
    pub fn run(&self, make: Make<'_>) -> Verdict {
        let context = TestContext {
            make,
            seen: RefCell::default(),
        };
        match (self.check)(&context) {
            Ok(()) => Verdict::Pass,
            Err(Failure::NotApplicable(reason)) => Verdict::NotApplicable(reason),
            Err(Failure::Broken(requirement)) => {
                let seen = context.seen.take();
                Verdict::Fail(match seen.is_empty() {
                    true => requirement.into(),
                    false => format!("{requirement}: {seen}"),
                })
            }
        }
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.id, self.text)
    }
}

macro_rules! statements {
    ($($id:literal $section:literal $level:ident $check:path: $text:literal;)*) => {
        /// All statements, in the order of the specification.
        pub const STATEMENTS: &[Statement] = &[
            $(Statement {
                id: $id,
                section: $section,
                level: Level::$level,
                text: $text,
                check: $check,
            },)*
        ];
    };
}

statements! {
    "features-map-unmap" "5.13.3.2" Should config::map_unmap: "MAP_UNMAP is offered";
    "features-bypass" "5.13.3.2" Should config::bypass_superseded: "BYPASS is not offered, in \
        particular not beside BYPASS_CONFIG";
    "config-page-size-mask" "5.13.4.2" Must config::page_size_mask: "`page_size_mask` is not zero";
    "config-bypass-value" "5.13.4.2" Must config::bypass_value: "`bypass` reads 0 or 1, whatever \
        the driver writes";
    "config-bypass-reset" "5.13.4.2" Should config::bypass_reset: "`bypass` survives a device \
        reset";
    "config-bypass-system-reset" "5.13.4.2" Should config::bypass_system_reset: "`bypass` has its \
        initial value after a system reset";
    "config-ranges" "5.13.4" Text config::ranges: "offered ranges do not end before they begin, \
        and `probe_size` is not zero if PROBE is offered";
    "reset-detaches" "5.13.5" Text config::reset_detaches: "a device reset leaves no endpoint \
        attached";
    "status-ok" "5.13.6.2" Should requests::status_ok: "a request that succeeds has status OK";
    "type-unknown" "5.13.6.2" Should requests::unknown_type: "an unknown request type: nothing \
        written, used length 0";
    "request-short" "5.13.6" Text requests::short: "a request that is too short for its type: \
        returned, nothing written";
    "request-no-tail" "5.13.6" Text requests::no_tail: "a request without room for the tail: \
        returned, nothing written";
    "head-reserved" "5.13.6.2" Must requests::head_reserved: "reserved bytes of the head are \
        ignored";
    "tail-reserved" "5.13.6.2" Should requests::tail_reserved: "reserved bytes of the tail are \
        zero";
    "failure-used-length" "5.13.6.1" Text requests::failures_are_written: "every other failure: \
        the status is written and the used length is not zero";
    "unattached-blocked" "5.13.6.2" Should bypass::unattached: "an unattached endpoint that is not \
        in bypass mode reaches no memory";
    "bypass-unattached" "5.13.6" Text bypass::without_acceptance: "`bypass` = 1: unattached \
        endpoints have the identity, even if the driver does not accept the feature";
    "bypass-domain" "5.13.6" Text bypass::domain: "endpoints in a bypass domain have the identity";
    "domain-range" "5.13.6" Text attach::domain_range: "ATTACH outside the domain range fails; \
        both ends of the range are valid";
    "input-range" "5.13.6" Text map::input_range: "MAP outside the input range fails; the whole \
        range can be mapped";
    "attach-reserved" "5.13.6.3.2" Must attach::reserved: "ATTACH with a reserved field that is \
        not zero: INVAL";
    "attach-flags" "5.13.6.3.2" Must attach::flags: "ATTACH with an unknown flag: INVAL";
    "attach-bypass-flag" "5.13.6.3" Text attach::bypass_flag: "ATTACH with the bypass flag but \
        without the feature: INVAL";
    "attach-endpoint" "5.13.6.3.2" Must attach::endpoint: "ATTACH of an endpoint that does not \
        exist: NOENT";
    "attach-effect" "5.13.6.3.2" Must attach::effect: "an ATTACH that is not rejected attaches the \
        endpoint";
    "attach-contradiction" "5.13.6.3.2" Should attach::contradiction: "ATTACH whose bypass flag \
        contradicts the domain: INVAL";
    "attach-rejection" "5.13.6.3.2" Text attach::rejection: "a rejected ATTACH changes nothing";
    "attach-move" "5.13.6.3.2" Should attach::again: "ATTACH of an attached endpoint: as DETACH \
        then ATTACH, or UNSUPP";
    "attach-join" "5.13.6.3" Text attach::join: "endpoints of one domain share its mappings, also \
        earlier ones";
    "attach-isolation" "5.13.6.3" Text attach::isolation: "endpoints of different domains are \
        isolated";
    "detach-reserved" "5.13.6.4.2" Must attach::detach_reserved: "reserved bytes of DETACH are \
        ignored";
    "detach-endpoint" "5.13.6.4.2" Must attach::detach_endpoint: "DETACH of an endpoint that does \
        not exist: NOENT";
    "detach-domain" "5.13.6.4.2" May attach::detach_domain: "DETACH from a domain that the \
        endpoint is not in: INVAL";
    "detach-blocks" "5.13.6.4.2" Must attach::detached: "after DETACH no access through the domain \
        succeeds";
    "domain-ends" "5.13.6.4" Text attach::last_detach: "the last DETACH ends the domain: its \
        number is reusable, and the new domain is empty";
    "map-translation" "5.13.6.5" Text map::translation: "a mapping translates its whole range and \
        nothing else";
    "map-top" "5.13.6.5" Text map::top: "the last page of the input range can be mapped and \
        unmapped";
    "map-alignment" "5.13.6.5.2" Should map::misaligned: "MAP misaligned: RANGE";
    "map-overlap" "5.13.6.5.2" Should map::overlapping: "MAP over a mapping: INVAL, nothing \
        changed";
    "map-flags" "5.13.6.5.2" Must map::flags: "MAP with an unknown flag: INVAL";
    "map-mmio" "5.13.6.5" Text map::mmio_not_negotiated: "MAP with the MMIO flag but without the \
        feature: INVAL";
    "map-mmio-negotiated" "5.13.6.5" Text map::mmio: "MAP with the MMIO flag and the feature is \
        accepted";
    "map-domain" "5.13.6.5.2" Should map::absent_domain: "MAP in a domain that does not exist: \
        NOENT";
    "map-bypass-domain" "5.13.6.5.2" Should map::bypass_domain: "MAP in a bypass domain: INVAL";
    "map-write-permission" "5.13.6.5.2" Must map::write_permission: "no write without WRITE";
    "map-read-permission" "5.13.6.5.2" May map::read_permission: "no read without READ";
    "unmap-reserved" "5.13.6.6.2" May unmap::reserved: "UNMAP with a reserved field that is not \
        zero: OK and unmapped, or INVAL";
    "unmap-domain" "5.13.6.6.2" Should unmap::absent_domain: "UNMAP in a domain that does not \
        exist: NOENT";
    "unmap-bypass-domain" "5.13.6.6.2" Should unmap::bypass_domain: "UNMAP in a bypass domain: \
        INVAL";
    "unmap-split" "5.13.6.6.2" Should unmap::split: "UNMAP that would split a mapping: RANGE";
    "unmap-split-keeps" "5.13.6.6.2" Should unmap::split_keeps: "UNMAP that would split a mapping \
        removes nothing";
    "unmap-gaps" "5.13.6.6.2" Should unmap::gaps: "UNMAP over gaps: OK, every covered mapping \
        removed";
    "unmap-examples" "5.13.6.6" Text unmap::examples: "the specification's seven examples of UNMAP";
    "unmap-everything" "5.13.6.6" Text unmap::everything: "UNMAP of the whole input range: OK, \
        every mapping removed";
    "probe-reserved" "5.13.6.7.2" Must probe::reserved: "reserved bytes of PROBE are ignored";
    "probe-endpoint" "5.13.6.7.2" Should probe::endpoint: "PROBE of an endpoint that does not \
        exist: NOENT";
    "probe-not-offered" "5.13.6.7.2" Should probe::not_offered: "PROBE that is not offered: \
        nothing written, used length 0";
    "probe-property-reserved" "5.13.6.7.2" Should probe::property_reserved: "reserved bits of a \
        property are zero";
    "probe-lengths" "5.13.6.7.2" Must probe::lengths: "the length of a property is exact, and the \
        next one follows it";
    "probe-short" "5.13.6.7.2" Should probe::short: "PROBE with less room than `probe_size`: INVAL \
        and no property";
    "probe-rest" "5.13.6.7.2" Should probe::rest: "bytes without properties are zero";
    "region-reserved" "5.13.6.8.1.2" Should regions::reserved: "reserved bytes of a region are \
        zero";
    "region-msi" "5.13.6.8.1.2" Should regions::one_msi: "an endpoint has at most one region of \
        MSIs";
    "region-overlap" "5.13.6.8.1.2" Should regions::overlap: "regions of an endpoint do not \
        overlap";
    "region-map" "5.13.6.8.1.2" Should regions::map: "MAP over a region is rejected";
    "region-access" "5.13.6.8.1.2" Should regions::access: "accesses to a reserved region reach no \
        memory";
    "fault-reserved" "5.13.6.9.2" Should events::reserved: "reserved fields of a report are zero";
    "fault-flags" "5.13.6.9.2" Should events::flags: "undefined flags of a report are zero";
    "fault-endpoint" "5.13.6.9.2" Should events::endpoint: "a report names the endpoint";
    "fault-split" "5.13.6.9.2" Should events::split: "a report that does not fit is not split over \
        buffers";
    "fault-reason" "5.13.6.9" Text events::reason: "the reason of a report is what happened, or \
        UNKNOWN";
    "fault-address" "5.13.6.9" Text events::address: "the address of a report is the one of the \
        access, and a write is not reported as a read";
    "fault-no-buffer" "5.13.6.9" Text events::no_buffer: "faults without event buffers stall no \
        request";
    "fault-count" "5.13.6.9" Robustness events::counted: "every fault is delivered or counted as \
        dropped";
    "config-other-fields" "5.13.4.1" Robustness config::other_fields: "writes to other fields than \
        `bypass` are ignored";
    "request-complete" "2.7.8.2" Robustness requests::complete_when_published: "a request has \
        taken effect when its used index is published";
    "attach-endpoint-alias" "5.13.6.3" Robustness attach::alias: "ids of endpoints are compared \
        with all 32 bits";
    "map-reversed" "5.13.6.5.1" Robustness robustness::map_reversed: "MAP that ends before it \
        begins fails";
    "map-physical-wrap" "5.13.6.5" Robustness robustness::physical_wrap: "MAP whose physical range \
        exceeds 2^64 fails";
    "unmap-reversed" "5.13.6.6" Robustness robustness::unmap_reversed: "UNMAP that ends before it \
        begins fails";
    "unmap-outstanding" "5.13.6.6" Robustness robustness::outstanding: "after the reply to UNMAP \
        no outstanding access reaches the page";
    "caps-mappings" "5.13.6" Robustness robustness::mapping_limit: "mappings beyond the cap: NOMEM";
    "caps-domains" "5.13.6" Robustness robustness::domain_limit: "domains beyond the cap: NOMEM";
}
