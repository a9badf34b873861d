//! The host's side (PVIOMMU paper, sections 4.1 to 4.4 and 4.6). It decodes requests, validates
//! them and maps the pages in the devices' tables.
//!
//! ```text
//! bytes -> wire::Request -> every address checked -> GuestBacking::pin -> DeviceMappings
//!       -> IoTables::map -> IoTables::commit -> status
//! ```
//! A guest may write anything: a forged request gets an error status, and affects only the mappings
//! of its own devices. [`BackendLimits`] and the embedder's frame sources bound the memory use. The
//! backend has no queue, thread or clock: the owner of the virtqueue calls [`Backend::handle`] for
//! each request in order.

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

pub use any_tables::{AnyTables, AnyTablesMut};
pub use events::EVENTS;
pub use guest_backing::{GuestBacking, PinError};
pub use handle::{Backend, BackendLimits, CommitFailed, Counts};
pub use hardware::{HardwareTables, HardwareTablesMut, KEPT_TABLES};
pub use io_tables::{DeviceSlot, IoError, IoTables, TablesHandle};
pub use last_table::{FixedLastTable, LastTable, NoLastTable};
pub use migrate::{DeviceState, ExportError, RestoreError};
pub use on_demand::{OnDemand, OnDemandStats, Pager, ReclaimError, SetupError};
pub use pool::{POOL_PAGES, PagePool, PoolStats, REFILL_BELOW};
pub use resident::Resident;
pub use simulated::{GrantError, Grants, HostVirtual, Hva, SimulatedTables, SimulatedTablesMut};
