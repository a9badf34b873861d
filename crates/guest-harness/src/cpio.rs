//! An initramfs archive in the "newc" format (Linux,
//! Documentation/driver-api/early-userspace/buffer-format.rst).

use std::fmt::Write as _;

/// An archive under construction.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const TRAILER: &str = "TRAILER!!!";

impl Archive {
    pub(super) fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, &[]);
    }

    pub(super) fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, PROGRAM, content);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode == DIRECTORY { 2 } else { 1 };
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_length = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let mut header = String::from("070701");
        // Inode, mode, owner, group, links, time, length, device, device number, length of the
        // name, checksum.
        for field in [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            length,
            0,
            0,
            0,
            0,
            name_length,
            0,
        ] {
            let _ = write!(header, "{field:08X}");
        }
        self.bytes.extend(header.into_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}
