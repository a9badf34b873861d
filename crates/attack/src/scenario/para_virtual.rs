//! A30, A32, A33: attacks on the host of the para-virtual IOMMU, and on Xen.

use std::sync::atomic::Ordering;

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Owner};
use ringfence_papers::LastTableAsPublished;
use ringfence_pviommu::backend::{DeviceSlot, FixedLastTable, GuestBacking, LastTable};
use ringfence_pviommu::wire::{Devid, Gpa, Status, StreamWriter};
use ringfence_types::{Access, Direction, FrameSource, Iova, PhysAddr, PhysMemory};

use super::{ScenarioResult, forged_virtio, hypercall};
use crate::evidence::{Evidence, Executed, Found};
use crate::guest_host::{
    ATTACKER, GUEST_BYTES, GuestHost, PAGE, VICTIM, WINDOW, map_request, unmap_request,
};

/// Memory of the host outside the guest.
const SECRET: u64 = 0x1234_5000;
const TO: Direction = Direction::ToDevice;

/// A30: the guest sends forged requests. The attack succeeds if the host executes one, the
/// attacker's device reaches memory, or the victim's device loses its mapping. The host must
/// execute the valid request beside each. For comparison, a host executes the requests without
/// checks, of which the published design names none.
pub(crate) fn forged_request(mode: &Mode) -> ScenarioResult {
    match mode.owner {
        Owner::Pviommu | Owner::PviommuHopt => {}
        owner if owner.is_xen() => return hypercall::forged(),
        owner if owner.is_virtio() => return forged_virtio::requests(owner),
        _ => return Ok(Found::NotApplicable("no host executes requests")),
    }
    let mut evidence = Evidence::default();
    for (request, valid) in forged()? {
        let with_victim = || {
            let mut host = GuestHost::new(FixedLastTable::default(), |_| ())?;
            expect(&mut host, &map_request(VICTIM, TO, &[(WINDOW, 0)])?)?;
            Ok::<_, LabError>(host)
        };
        expect(&mut with_victim()?, &valid)?;
        let mut host = with_victim()?;
        let executed = host.backend.handle(&request) == Status::Ok;
        let reached = reaches(&mut host, ATTACKER);
        let lost = host.reach(VICTIM, WINDOW, Access::Read).is_none()
            || host.reach(VICTIM, WINDOW, Access::Write).is_some();
        evidence.count_if(executed || reached || lost, u64::from(reached));
    }
    let mut executed = Executed::default();
    executed.trial("host checks requests", evidence);
    executed.trial("destination checks records", forged_record()?);
    executed.comparison("host without checks", without_checks()?);
    Ok(Found::Executed(executed))
}

fn expect<K: LastTable>(host: &mut GuestHost<K>, request: &[u8]) -> Result<(), LabError> {
    match host.backend.handle(request) {
        Status::Ok => Ok(()),
        _ => Err(LabError::Internal("a request that the host refuses")),
    }
}

fn reaches<K: LastTable>(host: &mut GuestHost<K>, device: Devid) -> bool {
    host.reach(device, WINDOW, Access::Read).is_some()
}

/// A request that no correct guest sends, and one that a correct guest may send in its place.
type Forgery = (Vec<u8>, Vec<u8>);

/// Requests that no correct guest sends, each beside one that a correct guest may send in its
/// place. The victim's device has one page at [`WINDOW`].
fn forged() -> Result<Vec<Forgery>, LabError> {
    let one = |device, gpa| map_request(device, TO, &[(WINDOW, gpa)]);
    let next = |gpa| map_request(VICTIM, TO, &[(WINDOW + PAGE, gpa)]);
    let with_pages = |pages: u32| {
        let mut request = one(ATTACKER, 0)?;
        if let Some(field) = request.get_mut(12..16) {
            field.copy_from_slice(&pages.to_le_bytes());
        }
        Ok::<_, LabError>(request)
    };
    let valid = || one(ATTACKER, 0);
    let behind = |gpa| map_request(ATTACKER, TO, &[(WINDOW, 0), (WINDOW + PAGE, gpa)]);
    let back = || unmap_request(VICTIM, &[WINDOW]);
    let wider = |device| map_request(device, Direction::Bidirectional, &[(WINDOW, 0)]);
    Ok(vec![
        // A device of the host, and one of another segment.
        (one(Devid::new(0x20), 0)?, valid()?),
        (one(Devid::new(0x1_0010), 0)?, valid()?),
        // Memory of the host, also behind a valid page.
        (one(ATTACKER, SECRET)?, valid()?),
        (next(SECRET)?, next(GUEST_BYTES - PAGE)?),
        (behind(GUEST_BYTES)?, behind(GUEST_BYTES - PAGE)?),
        // A misaligned address of the device, and one of the guest.
        (map_request(ATTACKER, TO, &[(WINDOW + 99, 0)])?, valid()?),
        (one(ATTACKER, 99)?, valid()?),
        // Lengths that overflow. 2^28 pages of 16 bytes are 0 in 32-bit arithmetic.
        (with_pages(u32::MAX)?, with_pages(1)?),
        (with_pages(1 << 28)?, with_pages(1)?),
        // An address of another device, one that was never mapped, one twice.
        (unmap_request(ATTACKER, &[WINDOW])?, back()?),
        (unmap_request(VICTIM, &[WINDOW, WINDOW + PAGE])?, back()?),
        (unmap_request(VICTIM, &[WINDOW, WINDOW])?, back()?),
        (
            map_request(ATTACKER, TO, &[(WINDOW, 0), (WINDOW, PAGE)])?,
            behind(PAGE)?,
        ),
        // More rights for a mapping.
        (wider(VICTIM)?, wider(ATTACKER)?),
    ])
}

/// Migration streams of a hostile source: memory outside the guest, and a device of the host. The
/// attack succeeds if the destination restores one, or the device reaches memory. It must restore
/// the same stream with the guest's memory and device.
fn forged_record() -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let records = [
        (ATTACKER, SECRET),
        (ATTACKER, GUEST_BYTES),
        (ATTACKER, PAGE + 1),
        (Devid::new(0x20), 0),
    ];
    // Returns whether the destination restores the stream, and the pages that the device reaches.
    let restore = |device, gpa| {
        let mut stream = StreamWriter::new();
        for (giova, gpa) in [(WINDOW, gpa), (WINDOW + PAGE, 0)] {
            let page = stream.page(device, Iova::new(giova), Gpa::new(gpa), TO);
            page.map_err(|_| LabError::Internal("a stream out of order"))?;
        }
        let mut host = GuestHost::new(FixedLastTable::default(), |_| ())?;
        let restored = host.backend.restore(&stream.finish()).is_ok();
        let pages = [WINDOW, WINDOW + PAGE].into_iter();
        let reached = pages.filter(|at| host.reach(ATTACKER, *at, Access::Read).is_some());
        Ok::<_, LabError>((restored, reached.count()))
    };
    if restore(ATTACKER, GUEST_BYTES - PAGE)? != (true, 2) {
        return Err(LabError::Internal("a stream that the destination refuses"));
    }
    for (device, gpa) in records {
        let (restored, reached) = restore(device, gpa)?;
        let reached = reached > 0;
        evidence.count_if(restored || reached, u64::from(reached));
    }
    Ok(evidence)
}

/// The steps of three forged requests, executed as a host without checks executes them: a map to
/// the host's memory, a map of another device's address, and an unmap of one.
fn without_checks() -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let (secret, at) = (PhysAddr::new(SECRET), Iova::new(WINDOW));
    let mut stored = Ok(());
    for slot in [0, 1] {
        let slot = DeviceSlot::new(slot);
        let mut host = GuestHost::new(FixedLastTable::default(), |tables| {
            stored = tables.map(slot, at, secret, TO);
        })?;
        let device = [ATTACKER, VICTIM][slot.index()];
        let reached = host.reach(device, WINDOW, Access::Read) == Some(secret);
        evidence.count_if(stored.is_ok() && reached, 1);
    }
    let mut host = GuestHost::new(FixedLastTable::default(), |tables| {
        let victim = DeviceSlot::new(1);
        stored = tables
            .map(victim, at, PhysAddr::new(0), TO)
            .and_then(|()| tables.unmap(victim, at))
            .and_then(|()| tables.commit(victim));
    })?;
    let lost = !reaches(&mut host, VICTIM);
    evidence.count_if(stored.is_ok() && lost, 0);
    Ok(evidence)
}

/// A32: the host takes the frame of a page while a device has it mapped. The attack succeeds if the
/// device then reaches the frame. For comparison, the host does not count pins.
pub(crate) fn reclaimed_frame(mode: &Mode) -> ScenarioResult {
    match mode.owner {
        Owner::Pviommu | Owner::PviommuHopt => {}
        owner if owner.is_xen() => return hypercall::released_frame(),
        _ => {
            return Ok(Found::NotApplicable(
                "this kernel owns the frames, or the host pins all of the guest's",
            ));
        }
    }
    let mut executed = Executed::default();
    executed.trial("mapped frames are pinned", taken(true)?);
    executed.comparison("without pin counts", taken(false)?);
    Ok(Found::Executed(executed))
}

fn taken(counts: bool) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let mut host = GuestHost::new(FixedLastTable::default(), |_| ())?;
    for page in 0..16 {
        let (giova, gpa) = (WINDOW + page * PAGE, page * PAGE);
        let request = map_request(ATTACKER, TO, &[(giova, gpa)])?;
        if host.backend.handle(&request) != Status::Ok {
            return Err(LabError::Internal("a request that the host refuses"));
        }
        if !counts {
            host.backend.backing().unpin(Gpa::new(gpa));
        }
        let backing = host.backend.backing();
        let taken = backing.reclaim(Gpa::new(gpa), &mut host.processors);
        let reached = host.reach(ATTACKER, giova, Access::Read);
        evidence.count_if(taken.is_ok_and(|frame| reached == Some(frame)), 1);
        evidence.false_faults += u64::from(counts && reached.is_none());
    }
    Ok(evidence)
}

/// A33: the host frees the table that its pointer refers to, and its frame gets other content. The
/// attack succeeds if the next map takes an entry from there.
pub(crate) fn stale_table_pointer(mode: &Mode) -> ScenarioResult {
    if mode.owner != Owner::PviommuHopt {
        return Ok(Found::NotApplicable("the host keeps no pointer to a table"));
    }
    let mut executed = Executed::default();
    executed.trial(
        "pointer ends with its table",
        freed(FixedLastTable::default())?,
    );
    executed.comparison("as published", freed(LastTableAsPublished::default())?);
    Ok(Found::Executed(executed))
}

fn freed<K: LastTable>(last: K) -> Result<Evidence, LabError> {
    let refused = LabError::Internal("a request that the host refuses");
    let mut host = GuestHost::new(last, |_| ())?;
    let request = map_request(ATTACKER, TO, &[(WINDOW, 0)])?;
    let back = unmap_request(ATTACKER, &[WINDOW])?;
    let done = [&request, &back].map(|request| host.backend.handle(request));
    let backing = host.backend.backing();
    let frame = backing.reclaim(Gpa::new(0), &mut host.processors);
    let (true, Ok(frame)) = (done == [Status::Ok; 2], frame) else {
        return Err(refused);
    };
    host.frames.free(frame);
    // The host uses the freed tables for other data, whose words look like entries.
    for _ in 0..3 {
        let reused = host.tables.alloc_zeroed();
        let reused = reused.map_err(|_| LabError::Internal("no frame is left"))?;
        let words = host.arena.table(reused);
        for word in words.map_err(|_| LabError::Internal("a frame"))? {
            word.store(SECRET | 3, Ordering::Relaxed);
        }
    }
    let mut evidence = Evidence::default();
    if host.backend.handle(&request) != Status::Ok {
        return Err(refused);
    }
    let reached = host.reach(ATTACKER, WINDOW, Access::Read);
    evidence.count_if(reached == Some(PhysAddr::new(SECRET)), PAGE);
    evidence.false_faults += u64::from(reached.is_none());
    Ok(evidence)
}
