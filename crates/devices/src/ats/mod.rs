//! Functions with a device TLB (ATS) and page requests (PRI), and the operating system's handler of
//! I/O page faults.
//!
//! A function with both accesses memory in this order (PCI Express Base Specification, chapter 10):
//!
//! ```text
//! access ── hit in the device TLB ───────────────────────► translated request ──► memory
//!    └───── miss ──► translation request ── page ── fill ─────────┘
//!                                         └ not mapped ──► page request ──► handler maps the page
//!                                                              ▲                     │
//!                                   try again ── success ──────┴──── response ───────┘
//! ```
//!
//! | attack | method |
//! |---|---|
//! | A13, spoofed translated request | [`Bus::probe_translated`](crate::Bus::probe_translated) |
//! | A14, retained translation | a function with [`OnInvalidate::CompletesAndKeeps`] |
//! | A38, storm of page requests | [`Bus::page_request`](crate::Bus::page_request) in a loop |

mod device_tlb;
mod fault_handler;
mod function;
mod page_requester;

pub use device_tlb::{CachedTranslation, DeviceTlb};
pub use fault_handler::{HandlerStats, PageFaultHandler};
pub use function::{AtsControl, AtsError, AtsFunction, OnInvalidate};
pub use page_requester::{PageRequestError, PageRequestStatus, PageRequester, UnexpectedResponse};
