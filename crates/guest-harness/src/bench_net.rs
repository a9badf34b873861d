//! Measures the CPU work of datagrams, inside a guest; see [`bench_reads`](super::bench_reads) for
//! the method.
//!
//! The peer drops what arrives at the port [`DISCARD`], and returns what arrives at [`ECHO`].

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::bench_read::ReadTimes;
use super::idle_spinner::{IdleSpinner, nanoseconds};

/// Port of datagrams that get no answer.
pub const DISCARD: u16 = 9;
/// Port of datagrams that come back.
pub const ECHO: u16 = 7;
/// Payload of a datagram of a stream: a frame of 1514 bytes.
pub const STREAM_BYTES: usize = 1472;
/// Flows, so that their hashes reach all queues of a device.
const FLOWS: usize = 16;
/// Datagrams before the measurement.
const WARM_UP: usize = 64;
/// Limit of the wait for an answer.
const LOST: Duration = Duration::from_secs(20);

fn flows(peer: Ipv4Addr, port: u16) -> io::Result<Vec<UdpSocket>> {
    let flow = |_| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((peer, port))?;
        socket.set_read_timeout(Some(LOST))?;
        Ok(socket)
    };
    (0..FLOWS).map(flow).collect()
}

/// Sends `count` datagrams over all flows in turn, and returns the nanoseconds of CPU work that
/// they took together.
///
/// # Errors
/// Sending failed, or the spinning thread could not be started.
pub fn bench_stream(peer: Ipv4Addr, count: usize) -> io::Result<u64> {
    let flows = flows(peer, DISCARD)?;
    let beside = IdleSpinner::start()?;
    let payload = [0x5a; STREAM_BYTES];
    let send = |count| -> io::Result<()> {
        for socket in flows.iter().cycle().take(count) {
            socket.send(&payload)?;
        }
        Ok(())
    };
    send(WARM_UP)?;
    let (begun, turns) = (Instant::now(), beside.turns());
    send(count)?;
    let turns = beside.turns().wrapping_sub(turns);
    Ok(nanoseconds(begun.elapsed()).saturating_sub(beside.time(turns)))
}

/// Sends `count` datagrams of one byte over all flows in turn, each after the answer to the one
/// before, and returns the CPU work of each round trip.
///
/// # Errors
/// Sending failed, an answer did not come, or the spinning thread could not be started.
pub fn bench_round_trips(peer: Ipv4Addr, count: usize) -> io::Result<ReadTimes> {
    let flows = flows(peer, ECHO)?;
    let beside = IdleSpinner::start()?;
    let mut times = ReadTimes::default();
    let all = count.saturating_add(WARM_UP);
    for (at, socket) in flows.iter().cycle().take(all).enumerate() {
        let mut answer = [0; 1];
        let (begun, turns) = (Instant::now(), beside.turns());
        socket.send(&[0x5a])?;
        socket.recv(&mut answer)?;
        let turns = beside.turns().wrapping_sub(turns);
        let took = nanoseconds(begun.elapsed());
        if at >= WARM_UP {
            times.add(took, turns, &beside);
        }
    }
    Ok(times)
}

/// Number of datagrams before the measurement of either function.
pub const DATAGRAMS_BEFORE: usize = WARM_UP;

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// The payload fills a frame without offloads: 1500 bytes less 20 of IPv4 and 8 of UDP.
    #[test]
    fn stream_fills_frames() {
        assert_eq!(STREAM_BYTES + 20 + 8, 1500);
    }

    /// The loopback device stands in for the guest's.
    #[test]
    fn round_trips_are_counted_one_by_one() {
        // The peer's port is fixed, and needs privileges: without them there is nothing to test.
        let Ok(peer) = UdpSocket::bind((Ipv4Addr::LOCALHOST, ECHO)) else {
            return;
        };
        let echo = thread::spawn(move || {
            let mut byte = [0; 1];
            for _ in 0..WARM_UP + 5 {
                let (_, from) = peer.recv_from(&mut byte).unwrap();
                peer.send_to(&byte, from).unwrap();
            }
        });
        let times = bench_round_trips(Ipv4Addr::LOCALHOST, 5).unwrap();
        echo.join().unwrap();
        assert_eq!(times.waited.len() + times.at_once.len(), 5);
    }
}
