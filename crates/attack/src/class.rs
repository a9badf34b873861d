//! The attack classes A01 to A38.

use ringfence_lab::modes::Mode;

use crate::scenario::{
    ScenarioResult, alias, ats, batch, cache, direction, emulated_device, fabric, freed_table,
    iotlb, page_request, para_virtual, posted, recycled_address, rings, scan, sub_page, toctou,
    unbound, unmapped, window, write_back, wrong_unmap,
};

/// The execution of a class.
#[derive(Debug, Clone, Copy)]
pub enum Method {
    /// A scenario of this crate.
    Scenario(fn(&Mode) -> ScenarioResult),
    /// A scenario that scans an address space of this many pages.
    Scan(fn(&Mode, u64) -> ScenarioResult),
}

/// An attack class.
#[derive(Debug, Clone, Copy)]
pub struct Class {
    /// Number, for example `A02`.
    pub id: &'static str,
    /// Attack in a few words, as the table of classes prints it.
    pub name: &'static str,
    /// Executes the class on a mode.
    pub method: Method,
}

impl Class {
    /// Returns the class with this number.
    pub fn find(id: &str) -> Option<&'static Self> {
        CLASSES
            .iter()
            .find(|class| class.id.eq_ignore_ascii_case(id))
    }
}

const fn class(id: &'static str, name: &'static str, method: Method) -> Class {
    Class { id, name, method }
}

/// All classes, in the order of their numbers.
#[rustfmt::skip]
pub const CLASSES: &[Class] = {
    use Method::Scenario as S;
    &[
    class("A01", "address without a mapping", S(unmapped::never_mapped)),
    class("A02", "stale IOTLB entry after unmap", S(window::warm)),
    class("A03", "stale table entry after unmap", S(window::cold)),
    class("A04", "address reused before the flush", S(recycled_address::recycled_address)),
    class("A05", "page reused before the flush", S(window::recycled_page)),
    class("A06", "wrong direction", S(direction::wrong_direction)),
    class("A07", "read beside the buffer", S(sub_page::read_beside)),
    class("A08", "callback beside the buffer", S(sub_page::overwrite_callback)),
    class("A09", "released buffer in a mapped page", S(sub_page::page_mate)),
    class("A10", "page freed with a second mapping", S(alias::alias)),
    class("A11", "address of another device", S(unmapped::foreign)),
    class("A12", "forged requester ID", S(fabric::forged_requester)),
    class("A13", "ATS translated request", S(ats::translated)),
    class("A14", "device TLB keeps entries", S(ats::retained)),
    class("A15", "MSI write", S(fabric::interrupt)),
    class("A16", "peer-to-peer below a switch", S(fabric::peer_to_peer)),
    class("A17", "payload changed after the check", S(toctou::payload)),
    class("A18", "descriptor changed in the ring", S(toctou::descriptors)),
    class("A19", "access past the end", S(sub_page::straddle)),
    class("A20", "freed table page", S(freed_table::freed_table)),
    class("A21", "table update not written back", S(write_back::stale_line)),
    class("A22", "torn table entry", S(write_back::early_link)),
    class("A23", "posted write at unmap", S(posted::posted_write)),
    class("A24", "fault storm, eviction, timing", S(iotlb::contention)),
    class("A25", "unmap by another device", S(wrong_unmap::foreign_unmap)),
    class("A26", "ring slot overwritten", S(rings::out_of_order)),
    class("A27", "rIOTLB within a burst", S(rings::within_a_burst)),
    class("A28", "cache ignores direction, length", S(cache::direction_and_range)),
    class("A29", "cache forgets a second user", S(cache::two_users)),
    class("A30", "forged para-virtual request", S(para_virtual::forged_request)),
    class("A31", "emulated device outside its grant", S(emulated_device::outside_the_grant)),
    class("A32", "host reclaims a mapped frame", S(para_virtual::reclaimed_frame)),
    class("A33", "stale last-table pointer", S(para_virtual::stale_table_pointer)),
    class("A34", "residue in the slot", S(sub_page::residue)),
    class("A35", "released before the batch's flush", S(batch::batch)),
    class("A36", "device without a context", S(unbound::without_driver)),
    class("A37", "scan after release", Method::Scan(scan::scan)),
    class("A38", "page request abuse", S(page_request::page_requests)),
    ]
};
