//! Devices: attach and detach, with the invalidations that each change owes (VT-d specification,
//! section 6.5.3.3 "Guidance to Software for Invalidations").

use ringfence_pgtable::{Context, Levels, TableError, TranslationType};
use ringfence_types::{DomainId, FrameSource, Pasid, PhysMemory, Registers, RequesterId};

use crate::attachment::{Attachment, Translation};
use crate::error::{Feature, UnitError};
use crate::pasid_entry::entry;
use crate::scalable::PASID_BITS;
use crate::unit::{Tables, Unit};

/// The PASID that this driver gives to requests without one.
const RID_PASID: Pasid = Pasid::NO_PASID;

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Translates the requests of `device` that have no PASID, as members of `domain`.
    ///
    /// # Errors
    /// The unit or the tables cannot express the request, or the device is attached already.
    pub fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        translation: Translation,
    ) -> Result<(), UnitError> {
        self.attach_pasid(device, RID_PASID, domain, translation)
    }

    /// Passes the requests of `device` through untranslated. `domain` has no other use.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn pass_through(&mut self, device: RequesterId, domain: DomainId) -> Result<(), UnitError> {
        self.attach(device, domain, Translation::PassThrough)
    }

    /// Translates the requests of `device` with `pasid`, in scalable mode.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn attach_pasid(
        &mut self,
        device: RequesterId,
        pasid: Pasid,
        domain: DomainId,
        translation: Translation,
    ) -> Result<(), UnitError> {
        let attachment = Attachment {
            device,
            pasid,
            domain,
            translation,
            is_cleared: false,
        };
        self.check(&attachment)?;
        // Memory for the list before anything changes.
        let reserved = self.attachments.try_reserve(1);
        reserved.map_err(|_| TableError::OutOfFrames)?;
        self.write_entry(&attachment)?;
        let announced = self.announce(&attachment);
        self.attachments.push(attachment);
        if let Err(error) = announced {
            // The caches hold no entry of the device but ones that were not present.
            let _ = self.detach_pasid(device, pasid);
            return Err(error);
        }
        Ok(())
    }

    /// Blocks `device` with all its PASIDs, and waits until no cache holds a translation for it.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], or the invalidation failed: the device is blocked in the tables
    /// but caches may hold its translations. Detach it again.
    pub fn detach(&mut self, device: RequesterId) -> Result<(), UnitError> {
        if self.attachments_of(device).next().is_none() {
            return Err(UnitError::NotAttached(device));
        }
        let commands = self.plan().device(device);
        let unlinked = self.tables.unlink(&self.memory, device)?;
        let own = self.attachments.iter_mut();
        own.filter(|other| other.device == device)
            .for_each(|other| other.is_cleared = true);
        self.execute(commands)?;
        self.attachments.retain(|other| other.device != device);
        if let (Some(unlinked), Tables::Scalable(tables)) = (unlinked, &self.tables) {
            tables.free(unlinked, &self.memory, &self.frames)?;
        }
        Ok(())
    }

    /// Blocks the requests of `device` with `pasid`. The last one detaches the device.
    ///
    /// # Errors
    /// As for [`detach`](Self::detach).
    pub fn detach_pasid(&mut self, device: RequesterId, pasid: Pasid) -> Result<(), UnitError> {
        let found = self
            .attachments_of(device)
            .find(|other| other.pasid == pasid);
        let attachment = *found.ok_or(UnitError::NotAttached(device))?;
        if self.attachments_of(device).nth(1).is_none() {
            return self.detach(device);
        }
        if let Tables::Scalable(tables) = &self.tables {
            tables.clear(&self.memory, device, pasid)?;
        }
        self.execute(self.plan().pasid(&attachment))?;
        self.attachments
            .retain(|other| other.device != device || other.pasid != pasid);
        Ok(())
    }

    fn attachments_of(&self, device: RequesterId) -> impl Iterator<Item = &Attachment> {
        let all = self.attachments.iter();
        all.filter(move |other| other.device == device)
    }

    /// Checks an attachment against the unit's capabilities and its other attachments.
    fn check(&self, new: &Attachment) -> Result<(), UnitError> {
        self.check_translation(new.translation)?;
        self.check_pasid(new.pasid)?;
        if !self.capabilities.accepts(new.domain) {
            return Err(UnitError::Domain(new.domain));
        }
        for other in &self.attachments {
            if other.device == new.device && (other.pasid == new.pasid || other.is_cleared) {
                return Err(UnitError::Attached(new.device));
            }
            if other.domain == new.domain && other.translation != new.translation {
                return Err(UnitError::OtherTable(new.domain));
            }
        }
        Ok(())
    }

    fn check_translation(&self, translation: Translation) -> Result<(), UnitError> {
        let unsupported = |feature| Err(UnitError::Unsupported(feature));
        let capabilities = &self.capabilities;
        let scalable = self.is_scalable();
        match translation {
            Translation::FirstStage { levels, .. } => {
                if !scalable || !capabilities.scalable_first_stage {
                    return unsupported(Feature::FirstStage);
                }
                if !capabilities.walks_first_stage(levels) {
                    return Err(UnitError::Depth(levels));
                }
            }
            Translation::SecondStage { levels, .. } => {
                if scalable && !capabilities.scalable_second_stage {
                    return unsupported(Feature::SecondStage);
                }
                if !capabilities.walks_second_stage(levels) {
                    return Err(UnitError::Depth(levels));
                }
            }
            Translation::PassThrough if !capabilities.pass_through => {
                return unsupported(Feature::PassThrough);
            }
            Translation::PassThrough => {}
        }
        match translation.root() {
            Some(root) if !root.is_aligned(4096) => Err(UnitError::Misaligned(root)),
            _ => Ok(()),
        }
    }

    fn check_pasid(&self, pasid: Pasid) -> Result<(), UnitError> {
        if pasid == RID_PASID {
            return Ok(());
        }
        let Some(bits) = self.capabilities.pasid_bits.filter(|_| self.is_scalable()) else {
            return Err(UnitError::Unsupported(Feature::Pasid));
        };
        if pasid.get() >> bits.min(PASID_BITS) != 0 {
            return Err(UnitError::PasidBeyondWidth(pasid));
        }
        Ok(())
    }

    fn write_entry(&mut self, new: &Attachment) -> Result<(), UnitError> {
        let deepest = self.capabilities.most_levels().unwrap_or(Levels::Four);
        match &mut self.tables {
            Tables::Legacy(tables) => {
                let translation = match new.translation {
                    Translation::SecondStage { root, levels } => {
                        TranslationType::Table { root, levels }
                    }
                    _ => TranslationType::PassThrough { levels: deepest },
                };
                let context = Context {
                    domain: new.domain,
                    translation,
                };
                tables.attach(&self.memory, &self.frames, new.device, &context)?;
            }
            Tables::Scalable(tables) => {
                let coherency = self.capabilities.scalable_coherency;
                let snoop_control = self.capabilities.snoop_control;
                let words = entry(
                    new.domain,
                    new.translation,
                    deepest,
                    coherency,
                    snoop_control,
                );
                tables.set(&self.memory, &self.frames, new.device, new.pasid, words)?;
            }
        }
        Ok(())
    }

    /// Makes a new entry visible: in caching mode, removes the cached entries that were not
    /// present; otherwise flushes the write buffer.
    fn announce(&mut self, new: &Attachment) -> Result<(), UnitError> {
        if !self.capabilities.caching_mode {
            return self.flush_write_buffer();
        }
        let commands = self.plan().not_present(new);
        self.execute(commands)
    }
}
