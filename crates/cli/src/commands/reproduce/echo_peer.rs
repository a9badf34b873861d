//! The peer of a guest's network device: answers datagrams to the port `ECHO`, drops all else.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringfence_guest_harness::ECHO;

/// Time after which the peer looks whether it is to end.
const PATIENCE: Duration = Duration::from_millis(100);

/// Ethernet header, IPv4 header without options, UDP header.
const HEADER_BYTES: usize = 14 + 20 + 8;
const IPV4: [u8; 2] = [8, 0];
const UDP: u8 = 17;

/// A thread that answers until the value is dropped.
pub(super) struct EchoPeer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoPeer {
    /// Binds `here` and answers to `guest`.
    pub(super) fn start(here: &Path, guest: PathBuf) -> io::Result<Self> {
        let socket = UnixDatagram::bind(here)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let stop = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&stop);
        let thread = thread::Builder::new().spawn(move || {
            let mut frame = [0; 2048];
            while !ends.load(Ordering::Relaxed) {
                let Ok(length) = socket.recv(&mut frame) else {
                    continue;
                };
                if let Some(answer) = frame.get_mut(..length)
                    && turn(answer)
                {
                    // A lost answer ends the guest's program, which reports it.
                    let _ = socket.send_to(answer, &guest);
                }
            }
        })?;
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }
}

impl Drop for EchoPeer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Exchanges the two sides of a frame. Returns false for a frame that gets no answer. The checksums
/// stay valid, because they are sums.
fn turn(frame: &mut [u8]) -> bool {
    let Some(header) = frame.get_mut(..HEADER_BYTES) else {
        return false;
    };
    let wanted = header[12..14] == IPV4
        && header[14] == 0x45
        && header[23] == UDP
        && header[36..38] == ECHO.to_be_bytes();
    if wanted {
        for (from, to, bytes) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
            for byte in 0..bytes {
                header.swap(from + byte, to + byte);
            }
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame whose bytes all differ, except for those that name its protocols.
    fn frame(port: u16) -> Vec<u8> {
        let mut frame: Vec<u8> = (100..150).collect();
        frame[12..14].copy_from_slice(&IPV4);
        (frame[14], frame[23]) = (0x45, UDP);
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame
    }

    #[test]
    fn answers_exchange_both_sides() {
        let (sent, mut answer) = (frame(ECHO), frame(ECHO));
        assert!(turn(&mut answer));
        for (of, from) in [(0..6, 6..12), (26..30, 30..34), (34..36, 36..38)] {
            assert_eq!(answer[of.clone()], sent[from.clone()]);
            assert_eq!(answer[from], sent[of]);
        }
        for same in [12..26, 38..50] {
            assert_eq!(answer[same.clone()], sent[same]);
        }
    }

    #[test]
    fn other_frames_get_no_answer() {
        for (at, value) in [(13, 6), (14, 0x46), (23, 6), (37, 9)] {
            let mut other = frame(ECHO);
            other[at] = value;
            let before = other.clone();
            assert!(!turn(&mut other), "{at}");
            assert_eq!(other, before);
        }
        assert!(!turn(&mut frame(ECHO)[..HEADER_BYTES - 1]));
    }

    #[test]
    fn peer_answers_over_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let (guest, there) = (dir.path().join("guest"), dir.path().join("there"));
        let socket = UnixDatagram::bind(&guest).unwrap();
        let peer = EchoPeer::start(&there, guest).unwrap();
        socket.send_to(&frame(9), &there).unwrap();
        socket.send_to(&frame(ECHO), &there).unwrap();
        let mut answer = [0; 2048];
        let length = socket.recv(&mut answer).unwrap();
        let mut wanted = frame(ECHO);
        turn(&mut wanted);
        assert_eq!(answer[..length], wanted);
        drop(peer);
    }
}
