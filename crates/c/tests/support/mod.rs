//! A machine for the C interface: memory, frames, and an IOMMU with an IOTLB that keeps each
//! translation until an invalidation covers it.
#![allow(dead_code, reason = "each test program uses a part")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence::*;

/// Calls a function of the interface. Each test promises what the functions demand of C programs.
#[macro_export]
macro_rules! c {
    ($call:expr) => {{
        // SAFETY: the test passes NULL or pointers to live objects of their types.
        unsafe { $call }
    }};
}

pub(crate) const PAGE: u64 = 4096;
/// Bytes of memory: buffers below, frames above the middle.
pub(crate) const BYTES: u64 = 4 << 20;
pub(crate) const NIC: u16 = 0x18;

pub(crate) struct Machine {
    pub(crate) memory: Vec<AtomicU64>,
    fresh: Cell<u64>,
    free: RefCell<Vec<u64>>,
    /// The translations that the IOMMU caches, by domain and page.
    iotlb: RefCell<BTreeMap<(u16, u64), u64>>,
    pub(crate) requests: RefCell<Vec<InvalidationRequest>>,
    pub(crate) released: RefCell<Vec<u64>>,
    pub(crate) disconnects: Cell<u32>,
    /// The results of the callbacks.
    pub(crate) submit_result: Cell<i32>,
    pub(crate) poll_result: Cell<i32>,
    /// The frame that `alloc_frame` returns in place of a good one.
    pub(crate) bad_frame: Cell<Option<u64>>,
    /// Number of frames that remain.
    pub(crate) frames_left: Cell<u64>,
    /// A layer that `submit` calls, and the result.
    pub(crate) reenter: Cell<*const Dma>,
    /// A layer that `released` calls.
    pub(crate) reenter_released: Cell<*const Dma>,
    pub(crate) reentered: Cell<Option<Status>>,
    /// Run by `submit` and by `released`.
    pub(crate) on_submit: RefCell<Option<Hook>>,
    pub(crate) on_released: RefCell<Option<Hook>>,
}

/// A part of a test that runs in a callback.
pub(crate) type Hook = Box<dyn Fn()>;

fn machine<'a>(context: *mut c_void) -> &'a Machine {
    c!(&*context.cast::<Machine>())
}

unsafe extern "C" fn address(context: *mut c_void, phys: u64, bytes: u64) -> *mut c_void {
    let machine = machine(context);
    match phys.checked_add(bytes) {
        Some(end) if end <= BYTES => {
            let word = machine.memory[(phys / 8) as usize..].as_ptr();
            word.cast_mut().cast()
        }
        _ => ptr::null_mut(),
    }
}

unsafe extern "C" fn alloc_frame(context: *mut c_void, frame: *mut u64) -> i32 {
    let machine = machine(context);
    let Some(left) = machine.frames_left.get().checked_sub(1) else {
        return -1;
    };
    machine.frames_left.set(left);
    let found = match (machine.bad_frame.get(), machine.free.borrow_mut().pop()) {
        (Some(bad), _) => bad,
        (None, Some(frame)) => frame,
        (None, None) => {
            let fresh = machine.fresh.get();
            machine.fresh.set(fresh + PAGE);
            // A frame is dirty: the library must clear it.
            let words = &machine.memory[(fresh / 8) as usize..][..512];
            words
                .iter()
                .for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
            fresh
        }
    };
    c!(frame.write(found));
    0
}

unsafe extern "C" fn free_frame(context: *mut c_void, frame: u64) {
    let machine = machine(context);
    machine.frames_left.set(machine.frames_left.get() + 1);
    if machine.bad_frame.get() == Some(frame) {
        return;
    }
    let mut free = machine.free.borrow_mut();
    assert!(!free.contains(&frame), "frame {frame:#x} is freed twice");
    free.push(frame);
}

unsafe extern "C" fn submit(
    context: *mut c_void,
    request: *const InvalidationRequest,
    ticket: *mut u64,
) -> i32 {
    let machine = machine(context);
    let request = c!(*request);
    machine.enter(machine.reenter.get());
    machine.on_submit.borrow().iter().for_each(|hook| hook());
    machine.requests.borrow_mut().push(request);
    c!(ticket.write(1));
    if machine.submit_result.get() == 0 && machine.poll_result.get() == 1 {
        machine.invalidate(&request);
    }
    machine.submit_result.get()
}

unsafe extern "C" fn poll(context: *mut c_void, ticket: u64) -> i32 {
    assert_eq!(ticket, 1);
    machine(context).poll_result.get()
}

unsafe extern "C" fn disconnect(context: *mut c_void, requester: u16) {
    assert_eq!(requester, NIC);
    let machine = machine(context);
    machine.disconnects.set(machine.disconnects.get() + 1);
}

unsafe extern "C" fn released(context: *mut c_void, cookie: u64) {
    let machine = machine(context);
    machine.released.borrow_mut().push(cookie);
    machine.enter(machine.reenter_released.get());
    machine.on_released.borrow().iter().for_each(|hook| hook());
}

impl Machine {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self {
            memory: (0..BYTES / 8).map(|_| AtomicU64::new(0)).collect(),
            fresh: Cell::new(BYTES / 2),
            free: RefCell::default(),
            iotlb: RefCell::default(),
            requests: RefCell::default(),
            released: RefCell::default(),
            disconnects: Cell::new(0),
            submit_result: Cell::new(0),
            poll_result: Cell::new(1),
            bad_frame: Cell::new(None),
            frames_left: Cell::new(BYTES / 2 / PAGE),
            reenter: Cell::new(ptr::null()),
            reenter_released: Cell::new(ptr::null()),
            reentered: Cell::new(None),
            on_submit: RefCell::default(),
            on_released: RefCell::default(),
        })
    }

    /// Maps with a token of no attachment, as a callback of `dma`.
    fn enter(&self, dma: *const Dma) {
        if dma.is_null() {
            return;
        }
        let mut mapping = DmaMapping { token: 0, iova: 0 };
        let status = c!(ringfence_dma_map(dma, 0, 0, 1, 0, 0, &mut mapping));
        self.reentered.set(Some(status));
    }

    fn context(&self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }

    pub(crate) fn memory_port(&self) -> Memory {
        Memory {
            size: size_of::<Memory>(),
            context: self.context(),
            address: Some(address),
            alloc_frame: Some(alloc_frame),
            free_frame: Some(free_frame),
            write_back: None,
            drain: None,
        }
    }

    pub(crate) fn ports(&self) -> DmaPorts {
        DmaPorts {
            size: size_of::<DmaPorts>(),
            memory: self.memory_port(),
            context: self.context(),
            submit: Some(submit),
            poll: Some(poll),
            disconnect: Some(disconnect),
            released: Some(released),
            poll_limit: 100,
        }
    }

    pub(crate) fn layer(&self, policy: DmaPolicy) -> *mut Dma {
        let mut dma = ptr::null_mut();
        let status = c!(ringfence_dma_create(
            &self.ports(),
            &options(policy),
            &mut dma
        ));
        assert_eq!(status, Status::Ok);
        dma
    }

    /// Returns true if no frame is in use.
    pub(crate) fn all_frames_are_back(&self) -> bool {
        self.frames_left.get() == BYTES / 2 / PAGE
    }

    /// Translates as the device's IOMMU does: the IOTLB first, then four levels of tables.
    pub(crate) fn translate(&self, at: &DmaAttachment, iova: u64) -> Option<u64> {
        let key = (at.domain, iova / PAGE);
        if let Some(phys) = self.iotlb.borrow().get(&key) {
            return Some(phys | (iova % PAGE));
        }
        let mut table = at.root;
        for level in (0..4).rev() {
            let index = iova >> (12 + 9 * level) & 511;
            let entry = self.memory[(table / 8 + index) as usize].load(Ordering::Relaxed);
            if entry & 3 == 0 {
                return None;
            }
            table = entry & 0xf_ffff_ffff_f000;
        }
        self.iotlb.borrow_mut().insert(key, table);
        Some(table | (iova % PAGE))
    }

    fn invalidate(&self, request: &InvalidationRequest) {
        let pages = request.iova / PAGE..(request.iova + request.bytes) / PAGE;
        self.iotlb.borrow_mut().retain(|(domain, page), _| {
            let covered = match request.kind {
                0 | 1 => *domain == request.domain && pages.contains(page),
                2 => *domain == request.domain,
                3 => true,
                4 => false,
                other => panic!("unknown kind {other}"),
            };
            !covered
        });
    }
}

pub(crate) fn options(policy: DmaPolicy) -> DmaOptions {
    DmaOptions {
        size: size_of::<DmaOptions>(),
        policy: policy as u32,
        levels: 4,
        first_page: 1,
        last_page: 0xf_ffff,
        burst_longest: 4,
        burst_most: 8,
    }
}

pub(crate) fn attach(dma: *const Dma) -> DmaAttachment {
    let mut at = DmaAttachment {
        token: 0,
        root: 0,
        domain: 0,
        reserved: [0; 3],
    };
    let status = c!(ringfence_dma_attach(dma, NIC, u64::from(u32::MAX), &mut at));
    assert_eq!(status, Status::Ok);
    at
}

/// Maps `bytes` bytes at `phys` for reads and writes.
pub(crate) fn map(dma: *const Dma, at: &DmaAttachment, phys: u64, cookie: u64) -> DmaMapping {
    let mut mapping = DmaMapping { token: 0, iova: 0 };
    let status = c!(ringfence_dma_map(
        dma,
        at.token,
        phys,
        100,
        2,
        cookie,
        &mut mapping
    ));
    assert_eq!(status, Status::Ok);
    mapping
}

pub(crate) fn unmap(dma: *const Dma, token: u64) -> (Status, u64) {
    let mut cookie = u64::MAX;
    (c!(ringfence_dma_unmap(dma, token, &mut cookie)), cookie)
}
