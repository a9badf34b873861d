//! Cost profiles by name or from a TOML file.

use std::io;
use std::path::{Path, PathBuf};

use ringfence_lab::{MachineProfile, ProfileError};

use crate::input_file::read_file;

/// Maximum size of a profile in bytes; a profile has a few hundred bytes and comments.
const MAX_BYTES: u64 = 1 << 20;

/// An error of loading a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileFileError {
    /// The string is neither a profile name nor a file.
    #[error(
        "no profile and no file is named {0}; the profiles are {known}, and `ringfence calibrate` \
        writes one",
        known = known_profiles()
    )]
    NoSuchProfile(String),
    /// The file cannot be read.
    #[error("{path}: {1}", path = .0.display())]
    Io(PathBuf, io::Error),
    /// The file is not a profile. TOML's own message draws the line over several lines.
    #[error("{path}: {text}", path = .0.display(), text = .1.message())]
    Toml(PathBuf, Box<toml::de::Error>),
    /// A value in the file is invalid.
    #[error("{path}: {1}", path = .0.display())]
    Invalid(PathBuf, ProfileError),
}

/// Returns the names of the bundled profiles.
fn known_profiles() -> String {
    let known: Vec<String> = MachineProfile::builtin()
        .into_iter()
        .map(|p| p.name)
        .collect();
    known.join(", ")
}

/// Loads the profile of that name, or otherwise the profile in that file.
///
/// # Errors
/// [`ProfileFileError`].
pub fn load_profile(name: &str) -> Result<MachineProfile, ProfileFileError> {
    if let Some(profile) = MachineProfile::builtin()
        .into_iter()
        .find(|p| p.name == name)
    {
        return Ok(profile);
    }
    let path = Path::new(name);
    let text = match read_file(path, MAX_BYTES) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(ProfileFileError::NoSuchProfile(name.to_owned()));
        }
        Err(e) => return Err(ProfileFileError::Io(path.to_owned(), e)),
    };
    let profile: MachineProfile =
        toml::from_str(&text).map_err(|e| ProfileFileError::Toml(path.to_owned(), Box::new(e)))?;
    profile
        .validate()
        .map_err(|e| ProfileFileError::Invalid(path.to_owned(), e))?;
    Ok(profile)
}
