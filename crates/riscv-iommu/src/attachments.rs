//! The attached devices and the domains that they use.

use alloc::collections::BTreeMap;

use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, GuestPhysAddr, PhysAddr, RequesterId};

use crate::directory::Directory;
use crate::error::UnitError;
use crate::translation::{Ats, GuestFirstStage, PageTable, Translation};

/// The stage whose entries a domain-id tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// PSCID of entries without a second stage.
    First,
    /// GSCID of entries with a second stage.
    Second,
}

/// A domain with at least one user: a device, or a process of a device.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) stage: Stage,
    table: PageTable,
    users: u32,
    /// Users whose guest has a first stage.
    pub(crate) nested: u32,
}

/// An attached device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) id: u32,
    /// Address of the device context.
    pub(crate) entry: PhysAddr,
    pub(crate) domain: DomainId,
    pub(crate) translation: Translation,
    pub(crate) ats: Option<Ats>,
    /// The process directory of [`Translation::Processes`].
    pub(crate) directory: Option<Directory>,
    /// Domains of the attached processes.
    pub(crate) processes: BTreeMap<u32, DomainId>,
}

impl Device {
    /// Returns true if the guest has a first stage.
    pub(crate) fn is_nested(&self) -> bool {
        is_nested(&self.translation)
    }
}

fn is_nested(translation: &Translation) -> bool {
    match translation {
        Translation::SecondStage { guest, .. } => *guest != GuestFirstStage::Bare,
        _ => false,
    }
}

/// Returns the stage and the table of a domain that `translation` uses.
fn table_of(translation: &Translation) -> Option<(Stage, PageTable)> {
    match *translation {
        Translation::FirstStage(table) => Some((Stage::First, table)),
        Translation::SecondStage { table, .. } => Some((Stage::Second, table)),
        Translation::PassThrough | Translation::Processes(_) => None,
    }
}

/// Returns the PSCID of a guest's table, with its root and depth.
fn guest_space(translation: &Translation) -> Option<(u32, GuestPhysAddr, Levels)> {
    let Translation::SecondStage { guest, .. } = translation else {
        return None;
    };
    match *guest {
        GuestFirstStage::Table {
            root,
            levels,
            space,
        } => Some((space, root, levels)),
        GuestFirstStage::Bare | GuestFirstStage::Processes { .. } => None,
    }
}

/// The attached devices and their domains.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    pub(crate) devices: BTreeMap<RequesterId, Device>,
    domains: BTreeMap<DomainId, Domain>,
    /// Devices with address translation services.
    pub(crate) with_ats: u32,
}

impl Attachments {
    pub(crate) fn domain(&self, domain: DomainId) -> Option<&Domain> {
        self.domains.get(&domain)
    }

    /// Returns the domains whose guests have a first stage.
    pub(crate) fn nested_domains(&self) -> impl Iterator<Item = DomainId> {
        let nested = self.domains.iter().filter(|(_, domain)| domain.nested > 0);
        nested.map(|(id, _)| *id)
    }

    /// Returns the attached device.
    pub(crate) fn device(&self, device: RequesterId) -> Result<&Device, UnitError> {
        let found = self.devices.get(&device);
        found.ok_or(UnitError::NotAttached { device })
    }

    /// Checks that a device may use `domain` with `translation`: all users of a domain-id have the
    /// same table, because its cached entries bear only the id. `replaced` will be detached.
    pub(crate) fn check(
        &self,
        domain: DomainId,
        translation: &Translation,
        replaced: RequesterId,
    ) -> Result<(), UnitError> {
        let Some((stage, table)) = table_of(translation) else {
            return Ok(());
        };
        let own = self
            .devices
            .get(&replaced)
            .map_or(0, |old| old.uses(domain));
        self.check_table(domain, stage, &table, own)?;
        self.check_guest_space(domain, translation, replaced)
    }

    /// Checks that all users of an address space of a guest (GSCID and PSCID) have the same
    /// first-stage table.
    fn check_guest_space(
        &self,
        domain: DomainId,
        translation: &Translation,
        replaced: RequesterId,
    ) -> Result<(), UnitError> {
        let Some(new) = guest_space(translation) else {
            return Ok(());
        };
        let others = self
            .devices
            .iter()
            .filter(|(id, device)| **id != replaced && device.domain == domain);
        let mut spaces = others.filter_map(|(_, device)| guest_space(&device.translation));
        match spaces.any(|old| old.0 == new.0 && old != new) {
            true => Err(UnitError::DomainMismatch { domain }),
            false => Ok(()),
        }
    }

    /// Checks that a process may use `domain` with a first-stage table.
    pub(crate) fn check_process(
        &self,
        domain: DomainId,
        table: &PageTable,
    ) -> Result<(), UnitError> {
        self.check_table(domain, Stage::First, table, 0)
    }

    fn check_table(
        &self,
        domain: DomainId,
        stage: Stage,
        table: &PageTable,
        own: u32,
    ) -> Result<(), UnitError> {
        match self.domains.get(&domain) {
            Some(found) if found.users > own && (found.stage != stage || found.table != *table) => {
                Err(UnitError::DomainMismatch { domain })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn insert(&mut self, requester: RequesterId, device: Device) {
        if let Some((stage, table)) = table_of(&device.translation) {
            self.use_domain(device.domain, stage, table, device.is_nested());
        }
        if device.ats.is_some() {
            self.with_ats = self.with_ats.saturating_add(1);
        }
        self.devices.insert(requester, device);
    }

    /// Forgets a device. Returns its process directory.
    pub(crate) fn remove(&mut self, requester: RequesterId) -> Option<Directory> {
        let device = self.devices.remove(&requester)?;
        if table_of(&device.translation).is_some() {
            self.release_domain(device.domain, device.is_nested());
        }
        for domain in device.processes.values() {
            self.release_domain(*domain, false);
        }
        if device.ats.is_some() {
            self.with_ats = self.with_ats.saturating_sub(1);
        }
        device.directory
    }

    /// Omits the TLB of a device from later invalidations. The device's context must be clear, and
    /// invalidated before one of them completes.
    pub(crate) fn forget_tlb(&mut self, requester: RequesterId) {
        let device = self.devices.get_mut(&requester);
        if device.and_then(|device| device.ats.take()).is_some() {
            self.with_ats = self.with_ats.saturating_sub(1);
        }
    }

    pub(crate) fn insert_process(
        &mut self,
        requester: RequesterId,
        process: u32,
        domain: DomainId,
        table: PageTable,
    ) {
        if let Some(device) = self.devices.get_mut(&requester) {
            device.processes.insert(process, domain);
            self.use_domain(domain, Stage::First, table, false);
        }
    }

    pub(crate) fn remove_process(&mut self, requester: RequesterId, process: u32) {
        let device = self.devices.get_mut(&requester);
        if let Some(domain) = device.and_then(|device| device.processes.remove(&process)) {
            self.release_domain(domain, false);
        }
    }

    fn use_domain(&mut self, id: DomainId, stage: Stage, table: PageTable, nested: bool) {
        let domain = self.domains.entry(id).or_insert(Domain {
            stage,
            table,
            users: 0,
            nested: 0,
        });
        domain.users = domain.users.saturating_add(1);
        domain.nested = domain.nested.saturating_add(u32::from(nested));
    }

    fn release_domain(&mut self, id: DomainId, nested: bool) {
        if let Some(domain) = self.domains.get_mut(&id) {
            domain.users = domain.users.saturating_sub(1);
            domain.nested = domain.nested.saturating_sub(u32::from(nested));
            if domain.users == 0 {
                self.domains.remove(&id);
            }
        }
    }
}

impl Device {
    /// Returns how often the device and its processes use `domain`.
    fn uses(&self, domain: DomainId) -> u32 {
        let own = table_of(&self.translation).is_some() && self.domain == domain;
        let processes = self.processes.values().filter(|used| **used == domain);
        u32::from(own).saturating_add(u32::try_from(processes.count()).unwrap_or(u32::MAX))
    }
}
