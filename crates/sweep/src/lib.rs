//! Sweeps: traces, modes and parameters as tasks.
//!
//! A [`Plan`] expands into [`Task`]s in a fixed order. The name of a task is a digest of all that
//! its result depends on. [`run`] replays a task, and [`encode`] turns the outcome into a Parquet
//! file of one row. A task whose file exists and is intact is not run again. `docs/SWEEP.md`
//! specifies plans and columns.
//!
//! ```
//! use ringfence_sweep::{Machine, Plan, Stored, ensure, store, stored};
//!
//! # let scratch = tempfile::tempdir()?;
//! # let dir = scratch.path();
//! // A plan without traces sweeps the bundled one.
//! let plan = "modes = [\"fence\", \"linux-lazy\"]\nrepetitions = 0\n";
//! std::fs::write(dir.join("plan.toml"), plan)?;
//!
//! let tasks = Plan::load(&dir.join("plan.toml"))?.tasks()?;
//! let machine = Machine::this();
//! for task in &tasks {
//!     let done = ensure(dir, task, &machine, false, store)?;
//!     assert!(done.run && !done.failed);
//!     assert_eq!(stored(dir, &task.name)?, Stored::Intact { failed: false });
//! }
//! // Another worker with the same plan finds both files.
//! assert_eq!(tasks.len(), 2);
//! for task in &tasks {
//!     assert!(!ensure(dir, task, &machine, false, store)?.run);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod columns;
mod combine;
mod digest;
mod ensure;
mod error;
mod list;
mod machine;
mod mode;
mod plan;
mod run;
mod seal;
mod shard;
mod store;
mod table;
mod task;
mod traces;

pub use columns::{Column, ColumnType, columns};
pub use combine::{ADDITIVE, MAXIMA};
pub use ensure::{EnsureError, Ensured, ensure};
pub use error::{PlanError, Problem};
pub use list::{read_list, task_of_line};
pub use machine::Machine;
pub use plan::{MAX_TASKS, Plan};
pub use run::{Outcome, run};
pub use shard::Shard;
pub use store::{PartFile, Stored, file_name, store, stored};
pub use table::{EncodeError, encode};
pub use task::{CacheCycles, OUTPUT, Task, TaskContent};
