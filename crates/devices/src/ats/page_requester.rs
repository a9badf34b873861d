//! The page request extended capability of a function.

use std::collections::BTreeSet;

use ringfence_hw::{GroupPosition, PageGroupResponse, PageRequest, PrgIndex, ResponseCode};
use ringfence_types::{Permissions, Pfn, RequesterId};

/// Page requests of a function: its groups without a response, and its status register.
#[derive(Debug, Clone)]
pub struct PageRequester {
    device: RequesterId,
    enabled: bool,
    /// Outstanding Page Request Allocation: maximum number of groups without a response.
    allocation: usize,
    outstanding: BTreeSet<PrgIndex>,
    next: u16,
    status: PageRequestStatus,
}

/// Status register of the capability.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageRequestStatus {
    /// Response Failure (RF): the function got such a response and has disabled page requests.
    pub response_failure: bool,
    /// Unexpected Page Request Group Index (UPRGI): a response named no outstanding group.
    pub unexpected_group: bool,
}

/// Error: the function may not make a page request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageRequestError {
    /// Page requests are disabled.
    #[error("page requests of {0} are disabled")]
    Disabled(RequesterId),
    /// As many groups are outstanding as the driver allows. Wait for a response.
    #[error("{0} page request groups of {1} are outstanding")]
    AllocationUsed(usize, RequesterId),
}

/// Error: a response names a group that is not outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} has no outstanding page request group {}", .0.device, .0.group.get())]
pub struct UnexpectedResponse(pub PageGroupResponse);

impl PageRequester {
    pub(super) const fn new(device: RequesterId) -> Self {
        Self {
            device,
            enabled: false,
            allocation: 0,
            outstanding: BTreeSet::new(),
            next: 0,
            status: PageRequestStatus {
                response_failure: false,
                unexpected_group: false,
            },
        }
    }

    /// Enables page requests, with at most `allocation` outstanding groups, and clears the status.
    pub fn enable(&mut self, allocation: usize) {
        self.enabled = true;
        self.allocation = allocation.min(usize::from(PrgIndex::COUNT));
        self.status = PageRequestStatus::default();
    }

    /// Disables page requests. Outstanding groups can still have a response.
    pub fn disable(&mut self) {
        self.enabled = false;
    }

    /// Returns true if page requests are enabled.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the status register.
    pub fn status(&self) -> PageRequestStatus {
        self.status
    }

    /// Returns the number of groups without a response.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Creates a group of requests, one for each page. Returns an empty group for no pages.
    ///
    /// # Errors
    /// [`PageRequestError`]; nothing changes.
    pub fn group(
        &mut self,
        pages: &[(Pfn, Permissions)],
    ) -> Result<Vec<PageRequest>, PageRequestError> {
        if !self.enabled {
            return Err(PageRequestError::Disabled(self.device));
        }
        let Some(group) = self.free_index() else {
            return Err(PageRequestError::AllocationUsed(
                self.outstanding.len(),
                self.device,
            ));
        };
        let Some(last) = pages.len().checked_sub(1) else {
            return Ok(Vec::new());
        };
        self.outstanding.insert(group);
        self.next = (group.get() + 1) % PrgIndex::COUNT;
        let requests = pages
            .iter()
            .enumerate()
            .map(|(index, (page, permissions))| PageRequest {
                device: self.device,
                page: *page,
                permissions: *permissions,
                group,
                position: if index == last {
                    GroupPosition::Last
                } else {
                    GroupPosition::More
                },
            });
        Ok(requests.collect())
    }

    fn free_index(&self) -> Option<PrgIndex> {
        if self.outstanding.len() >= self.allocation {
            return None;
        }
        (0..PrgIndex::COUNT)
            .filter_map(|step| PrgIndex::new((self.next + step) % PrgIndex::COUNT))
            .find(|index| !self.outstanding.contains(index))
    }

    /// Accepts a response and returns its code.
    ///
    /// # Errors
    /// [`UnexpectedResponse`] if it names no outstanding group of this function. Sets UPRGI.
    pub fn respond(
        &mut self,
        response: &PageGroupResponse,
    ) -> Result<ResponseCode, UnexpectedResponse> {
        if response.device != self.device || !self.outstanding.remove(&response.group) {
            self.status.unexpected_group = true;
            return Err(UnexpectedResponse(*response));
        }
        if response.code == ResponseCode::ResponseFailure {
            self.status.response_failure = true;
            self.enabled = false;
        }
        Ok(response.code)
    }
}
