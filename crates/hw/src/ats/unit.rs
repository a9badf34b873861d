//! A unit that serves devices with device TLBs.

use alloc::vec::Vec;

use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Invalidation, InvalidationError, Invalidator, Iova,
    IovaRange, PhysAddr, PhysMemory, PhysRange, RequesterId, Ticket,
};

use super::invalidate::DeviceTlbQueue;
use crate::{
    CompletionError, ContextLookup, DeviceTlbPermission, DeviceTlbQueueConfig, InvalidateRequest,
    InvalidationTag, Iommu, PageGroupResponse, PageRequest, PageRequestQueue, Translate,
    TranslatedCheck, Translation, TranslationCompletion, TranslationService,
};

/// An [`Iommu`] with ATS and PRI.
///
/// As an [`Invalidator`], it completes a request only after each device TLB of the domain has
/// completed its own. It invalidates the IOTLB first: otherwise a device could refill its TLB from
/// a stale entry (VT-d specification, section 6.5.2.5). Linux keeps the same list of device TLBs
/// per domain ("cache tags").
///
/// The embedder carries messages between the unit and the devices:
///
/// | message | from | to |
/// |---|---|---|
/// | invalidate request | [`take_invalidate_request`](Self::take_invalidate_request) | device |
/// | invalidate completion | device | [`complete`](Self::complete) |
/// | page request | device | [`page_request`](Self::page_request) |
/// | page group response | its result, or software | device |
#[derive(Debug, Clone)]
pub struct AtsUnit<D: ContextLookup> {
    unit: Iommu<D>,
    check: TranslatedCheck,
    /// Device TLBs that invalidations must reach.
    device_tlbs: Vec<(RequesterId, DomainId)>,
    queue: DeviceTlbQueue,
    page_requests: PageRequestQueue,
    last_ticket: u64,
    /// First and last ticket that lost a request to a time-out.
    failed: Option<(u64, u64)>,
    completion_errors: u64,
}

impl<D: ContextLookup> AtsUnit<D> {
    /// Adds ATS and PRI to `unit`, with a page request queue of `page_requests` entries.
    pub fn new(
        unit: Iommu<D>,
        check: TranslatedCheck,
        queue: DeviceTlbQueueConfig,
        page_requests: usize,
    ) -> Self {
        Self {
            unit,
            check,
            device_tlbs: Vec::new(),
            queue: DeviceTlbQueue::new(queue),
            page_requests: PageRequestQueue::new(page_requests),
            last_ticket: 0,
            failed: None,
            completion_errors: 0,
        }
    }

    /// Returns the unit that translates.
    pub fn unit(&mut self) -> &mut Iommu<D> {
        &mut self.unit
    }

    /// Returns the check of translated requests.
    pub fn translated_check(&mut self) -> &mut TranslatedCheck {
        &mut self.check
    }

    /// Adds the device TLB of `device`, which caches translations of `domain`. Call this before the
    /// context entry allows the device to use it.
    pub fn add_device_tlb(&mut self, device: RequesterId, domain: DomainId) {
        self.remove_device_tlb(device);
        self.device_tlbs.push((device, domain));
    }

    /// Removes the device TLB of `device`. Call this after the context entry blocks the device and
    /// the context was invalidated, because later invalidations do not reach the device.
    pub fn remove_device_tlb(&mut self, device: RequesterId) {
        self.device_tlbs.retain(|(other, _)| *other != device);
    }

    /// Takes the next invalidate request, for delivery to its device. `None` if no request waits,
    /// no tag is free, or the device has too many outstanding.
    pub fn take_invalidate_request(&mut self) -> Option<InvalidateRequest> {
        self.queue.take()
    }

    /// Accepts an invalidate completion of `device`.
    ///
    /// # Errors
    /// [`CompletionError`] if no such request is outstanding at this device (ICE). Nothing
    /// completes.
    pub fn complete(
        &mut self,
        device: RequesterId,
        tag: InvalidationTag,
    ) -> Result<(), CompletionError> {
        self.queue.complete(device, tag).inspect_err(|_| {
            self.completion_errors = self.completion_errors.wrapping_add(1);
        })
    }

    /// Returns the number of completions that answered no request.
    pub fn completion_errors(&self) -> u64 {
        self.completion_errors
    }

    /// Ends the wait for completions that did not arrive in time (ITE): all waiting and outstanding
    /// requests fail. Returns the devices that were late. Software must block them, because they
    /// may still use the old translations.
    pub fn time_out(&mut self) -> Vec<RequesterId> {
        let mut late: Vec<_> = self.queue.late().collect();
        late.sort_unstable();
        late.dedup();
        if let Some((first, last)) = self.queue.abort() {
            self.failed = Some(match self.failed {
                Some((earliest, latest)) => (earliest.min(first), latest.max(last)),
                None => (first, last),
            });
        }
        late
    }

    /// Accepts a page request. Returns the automatic response if software will not see the request:
    /// the device may not make page requests, or the queue is full.
    pub fn page_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        request: &PageRequest,
    ) -> Option<PageGroupResponse> {
        let reason = match self.unit.device_tlb_table(mem, request.device) {
            Ok((table, _)) if table.device_tlb == DeviceTlbPermission::AllowedWithPageRequests => {
                return self.page_requests.push(request);
            }
            Ok(_) => FaultReason::RequestTypeBlocked,
            Err(reason) => reason,
        };
        let access = if request.permissions.allows(Access::Write) {
            Access::Write
        } else {
            Access::Read
        };
        let at = request.page.iova();
        let _ = self.unit.blocked(request.device, at, access, reason);
        self.page_requests.block(request)
    }

    /// Returns the queue of page requests.
    pub fn page_requests(&mut self) -> &mut PageRequestQueue {
        &mut self.page_requests
    }

    /// Returns the device TLBs that may cache entries of `request`, with the addresses.
    fn targets(&self, request: &Invalidation) -> impl Iterator<Item = (RequesterId, IovaRange)> {
        let request = *request;
        self.device_tlbs
            .iter()
            .filter_map(move |(device, domain)| match request {
                Invalidation::Pages {
                    domain: requested,
                    range,
                    ..
                } => (requested == *domain).then(|| (*device, range.iovas())),
                Invalidation::Domain(requested) => {
                    (requested == *domain).then_some((*device, IovaRange::ALL))
                }
                Invalidation::Global => Some((*device, IovaRange::ALL)),
                Invalidation::Context(requested) => {
                    (requested == *device).then_some((*device, IovaRange::ALL))
                }
                Invalidation::Ring { .. } => None,
            })
    }
}

impl<D: ContextLookup> Invalidator for AtsUnit<D> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if self.targets(&request).count() > self.queue.room() {
            return Err(InvalidationError::QueueFull);
        }
        self.unit.submit(request)?;
        self.last_ticket = self.last_ticket.wrapping_add(1);
        let targets: Vec<_> = self.targets(&request).collect();
        for (device, range) in targets {
            self.queue.push(self.last_ticket, device, &range);
        }
        Ok(Ticket::new(self.last_ticket))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let ticket = ticket.get();
        let failed = self
            .failed
            .is_some_and(|(first, last)| (first..=last).contains(&ticket));
        if ticket > self.last_ticket || failed {
            return Err(InvalidationError::Failed);
        }
        Ok(self.queue.completed(ticket))
    }
}

impl<D: ContextLookup> Translate for AtsUnit<D> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        self.unit.translate(mem, device, iova, bytes, access)
    }
}

impl<D: ContextLookup> TranslationService for AtsUnit<D> {
    fn translation_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
    ) -> TranslationCompletion {
        self.unit.translation_request(mem, device, iova)
    }

    fn translated_request<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        at: PhysAddr,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let checked = match self.unit.device_tlb_table(mem, device) {
            Ok((table, _)) => match PhysRange::new(at, bytes) {
                Some(range) => self.check.check(mem, table.domain, range, access),
                None => Ok(()),
            },
            // The unit blocks the request below.
            Err(_) => Ok(()),
        };
        match checked {
            Ok(()) => self.unit.translated_request(mem, device, at, bytes, access),
            Err((at, reason)) => {
                Err(self
                    .unit
                    .blocked(device, Iova::new(at.get()), access, reason))
            }
        }
    }
}
