//! The private instance of tracefs.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::RecordError;

/// The private instance. Dropping it removes it, on every path out.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) path: PathBuf,
}

impl Instance {
    pub(super) fn create(tracefs: &Path, name: &str) -> Result<Self, RecordError> {
        let path = tracefs.join("instances").join(name);
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self { path }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(RecordError::InstanceExists { path })
            }
            Err(error) => Err(RecordError::at(&path, error)),
        }
    }

    pub(super) fn write(&self, file: &str, value: &str) -> Result<(), RecordError> {
        let path = self.path.join(file);
        fs::write(&path, value).map_err(|error| RecordError::at(&path, error))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Errors cannot be reported here. The switches disappear with the directory, but some
        // kernel versions refuse to remove the directory while they are on.
        for switch in ["tracing_on", "events/enable"] {
            let _ = fs::write(self.path.join(switch), "0");
        }
        let _ = fs::remove_dir(&self.path);
    }
}
