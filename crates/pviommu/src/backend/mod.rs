//! The host's side (sections 4.1 to 4.4 and 4.6): request bytes in, a status out, and mappings
//! where devices find them.
//!
//! ```text
//! bytes -> wire::Request -> every address checked -> GuestBacking::pin -> DeviceMappings -> IoTables::map -> IoTables::commit -> status
//! ```
//! A guest may write anything: what it forges is answered with a status, and costs it at most its
//! own devices' mappings. Memory is bounded by [`BackendLimits`] and by the sources of frames that
//! the embedder passes in. There is no queue here, no thread and no clock: whoever has a virtqueue
//! calls [`Backend::handle`] for each request in turn.

mod any_tables;
mod device;
mod device_mappings;
mod events;
mod guest_backing;
mod handle;
mod hardware;
mod invalidate;
mod io_tables;
mod last_table;
mod migrate;
mod on_demand;
mod pool;
mod resident;
mod simulated;

pub use any_tables::AnyTables;
pub use events::EVENTS;
pub use guest_backing::{GuestBacking, PinError};
pub use handle::{Backend, BackendLimits, CommitFailed, Counts};
pub use hardware::{HardwareTables, KEPT_TABLES};
pub use io_tables::{DeviceSlot, IoError, IoTables};
pub use last_table::{FixedLastTable, LastTable, LastTableAsPublished, NoLastTable};
pub use migrate::RestoreError;
pub use on_demand::{OnDemand, OnDemandStats, Pager, ReclaimError, SetupError};
pub use pool::{POOL_PAGES, PagePool, PoolStats, REFILL_BELOW};
pub use resident::Resident;
pub use simulated::{GrantError, Grants, HostVirtual, Hva, SimulatedTables};
