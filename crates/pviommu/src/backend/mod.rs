//! The host's side (sections 4.1 to 4.4 and 4.6): request bytes in, a status out, and mappings where devices find them.
//!
//! ```text
//! bytes -> wire::Request -> every address checked -> Backing::pin -> View -> IoTables::map -> IoTables::settle -> status
//! ```
//! A guest may write anything: what it forges is answered with a status, and costs it at most its own devices' mappings. Memory is bounded by
//! [`Limits`] and by the sources of frames that the embedder passes in. There is no queue here, no thread and no clock: whoever has a virtqueue calls
//! [`Backend::handle`] for each request in turn.

mod backing;
mod device;
mod events;
mod handle;
mod hardware;
mod invalidate;
mod io_tables;
mod last_table;
mod migrate;
mod mixed;
mod on_demand;
mod pool;
mod resident;
mod simulated;
mod view;

pub use backing::{Backing, PinError};
pub use events::EVENTS;
pub use handle::{Backend, Counts, Limits, Unsettled};
pub use hardware::{HardwareTables, KEPT_TABLES};
pub use io_tables::{IoError, IoTables, Slot};
pub use last_table::{LastTable, LiteralLastTable, NoLastTable, RepairedLastTable};
pub use migrate::RestoreError;
pub use mixed::Mixed;
pub use on_demand::{OnDemand, OnDemandStats, Pager, ReclaimError, SetupError};
pub use pool::{POOL_PAGES, PagePool, PoolStats, REFILL_BELOW};
pub use resident::Resident;
pub use simulated::{GrantError, Grants, HostVirtual, Hva, SimulatedTables};
