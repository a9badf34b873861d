//! Address Translation Services (ATS) and the Page Request Interface (PRI) of PCI Express, as an
//! IOMMU implements them (PCI Express Base Specification 6.0, chapter 10; VT-d specification,
//! chapter 4 "Support for Device-TLBs" and section 7.4 "Recoverable fault reporting").
//!
//! | file | content |
//! |---|---|
//! | `address_type.rs` | the AT field of a memory request |
//! | `requests.rs` | translation requests and translated requests |
//! | `permission_table.rs` | a check of translated requests by host address |
//! | `invalidate.rs` | invalidate requests to device TLBs and their completions |
//! | `page_request.rs`, `page_request_queue.rs` | page requests, their queue and responses |
//! | `unit.rs` | [`AtsUnit`], a unit with all of them |
//!
//! The context entry of a device decides which requests it may make
//! ([`DeviceTlbPermission`](crate::DeviceTlbPermission)). By default a device may make untranslated
//! requests only.

mod address_type;
mod invalidate;
mod page_request;
mod page_request_queue;
mod permission_table;
mod requests;
mod unit;

pub use address_type::AddressType;
pub use invalidate::{CompletionError, DeviceTlbQueueConfig, InvalidateRequest, InvalidationTag};
pub use page_request::{GroupPosition, PageGroupResponse, PageRequest, PrgIndex, ResponseCode};
pub use page_request_queue::{PageRequestQueue, PageRequestStats};
pub use permission_table::TranslatedCheck;
pub use requests::{TranslationCompletion, TranslationService};
pub use unit::AtsUnit;
