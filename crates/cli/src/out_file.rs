//! Files that appear whole or not at all.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A file under way, or standard output for `-`. Compressed if its name ends in `.zst`.
pub(crate) struct OutFile {
    path: PathBuf,
    part: Option<PathBuf>,
    writer: Writer,
}

enum Writer {
    Plain(BufWriter<Box<dyn Write + Send>>),
    Zstd(zstd::Encoder<'static, Box<dyn Write + Send>>),
}

/// Ratio before speed would be wasted on traces, which shrink to a tenth anyway.
const LEVEL: i32 = 6;

impl OutFile {
    /// Begins a file.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let (part, sink): (_, Box<dyn Write + Send>) = if path == OsStr::new("-") {
            (None, Box::new(io::stdout()))
        } else {
            let mut part = path.as_os_str().to_owned();
            part.push(".part");
            let part = PathBuf::from(part);
            let file = File::create(&part).map_err(Failure::io(path))?;
            (Some(part), Box::new(file))
        };
        let writer = if path.extension() == Some(OsStr::new("zst")) {
            Writer::Zstd(zstd::Encoder::new(sink, LEVEL).map_err(Failure::io(path))?)
        } else {
            Writer::Plain(BufWriter::with_capacity(1 << 18, sink))
        };
        Ok(Self {
            path: path.to_owned(),
            part,
            writer,
        })
    }

    /// Ends the file and gives it its name.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        let ended = match &mut self.writer {
            Writer::Plain(writer) => writer.flush(),
            Writer::Zstd(encoder) => encoder.do_finish().and_then(|()| encoder.get_mut().flush()),
        };
        let named = ended.and_then(|()| match self.part.take() {
            Some(part) => fs::rename(part, &self.path),
            None => Ok(()),
        });
        named.map_err(|source| match source.kind() {
            io::ErrorKind::BrokenPipe => Failure::Closed,
            _ => Failure::Io {
                path: self.path.clone(),
                source,
            },
        })
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Writer::Plain(writer) => writer.write(bytes),
            Writer::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.writer {
            Writer::Plain(writer) => writer.flush(),
            Writer::Zstd(encoder) => encoder.flush(),
        }
    }
}

impl Drop for OutFile {
    /// Leaves no half of a file behind.
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            // There is nobody left to tell.
            let _ = fs::remove_file(part);
        }
    }
}
