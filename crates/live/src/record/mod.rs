//! Records of a guest's IOMMU in files.

mod dmas;
mod file;
mod requests;

pub(crate) use dmas::DmaRecord;
pub(crate) use file::RecordFile;
pub use file::{PENDING_BYTES, RecordState};
pub use requests::Recorder;
