//! The commands that an invalidation needs (VT-d specification, section 6.5.3.3 "Guidance to
//! Software for Invalidations").

use ringfence_types::{CachedLevels, DomainId, Invalidation, Pasid, PfnRange, RequesterId};

use crate::attachment::{Attachment, Translation};
use crate::command::{Command, Commands};

/// Entries of the context cache without a domain-id: those that were not present, in caching mode,
/// and all in scalable mode.
const NO_DOMAIN: DomainId = DomainId::new(0);

/// The state that the commands depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan<'a> {
    pub(crate) attachments: &'a [Attachment],
    pub(crate) is_scalable: bool,
    /// MAMV, if the unit invalidates pages.
    pub(crate) largest_mask: Option<u32>,
}

/// The tags of a domain's translations in the caches.
enum Tags {
    /// The domain-id: second stage, and all of legacy mode.
    Domain,
    /// The domain-id and a PASID: first stage and pass-through of scalable mode.
    Pasid(Pasid),
    /// The domain-id and two PASIDs.
    TwoPasids(Pasid, Pasid),
    /// The domain-id and more PASIDs.
    Many,
}

impl Plan<'_> {
    /// Returns the commands for `request`; `None` for one that the unit has no cache for.
    pub(crate) fn commands(&self, request: &Invalidation) -> Option<Commands> {
        Some(match *request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => self.pages(domain, &range, levels),
            Invalidation::Domain(domain) => self.domain(domain),
            Invalidation::Global => Commands::of(&[Command::IotlbGlobal]),
            Invalidation::Context(device) => self.device(device),
            Invalidation::Ring { .. } => return None,
        })
    }

    fn domain(&self, domain: DomainId) -> Commands {
        match self.tags(domain) {
            Tags::Domain => Commands::of(&[Command::IotlbDomain(domain)]),
            Tags::Pasid(pasid) => Commands::of(&[Command::FirstStageAll { domain, pasid }]),
            Tags::TwoPasids(one, other) => Commands::of(&[
                Command::FirstStageAll { domain, pasid: one },
                Command::FirstStageAll {
                    domain,
                    pasid: other,
                },
            ]),
            Tags::Many => Commands::of(&[Command::IotlbGlobal]),
        }
    }

    /// Returns at most two commands. Invalidates the whole domain if a block is larger than the
    /// unit's largest or if the domain has several tags.
    fn pages(&self, domain: DomainId, range: &PfnRange, levels: CachedLevels) -> Commands {
        let (first, second) = range.cover();
        let largest = self.largest_mask.unwrap_or(0);
        let fits = first.order() <= largest && second.is_none_or(|block| block.order() <= largest);
        if self.largest_mask.is_none() || !fits {
            return self.domain(domain);
        }
        let command = |block| match self.tags(domain) {
            Tags::Domain => Some(Command::IotlbPages {
                domain,
                block,
                levels,
            }),
            Tags::Pasid(pasid) => Some(Command::FirstStagePages {
                domain,
                pasid,
                block,
                levels,
            }),
            Tags::TwoPasids(..) | Tags::Many => None,
        };
        match (command(first), second.and_then(command)) {
            (Some(first), Some(second)) => Commands::of(&[first, second]),
            (Some(first), None) => Commands::of(&[first]),
            (None, _) => self.domain(domain),
        }
    }

    fn tags(&self, domain: DomainId) -> Tags {
        if !self.is_scalable {
            return Tags::Domain;
        }
        let mut tags = Tags::Domain;
        for other in self.attachments {
            if other.domain != domain {
                continue;
            }
            if let Translation::SecondStage { .. } = other.translation {
                return Tags::Domain;
            }
            let pasid = other.pasid;
            tags = match tags {
                Tags::Domain => Tags::Pasid(pasid),
                Tags::Pasid(one) if one != pasid => Tags::TwoPasids(one, pasid),
                Tags::TwoPasids(one, two) if one != pasid && two != pasid => Tags::Many,
                same => same,
            };
        }
        tags
    }

    /// Returns the commands that remove the entries of a device and all translations through them.
    pub(crate) fn device(&self, device: RequesterId) -> Commands {
        let mut own = self.attachments.iter();
        let mut next = || own.find(|other| other.device == device);
        let (Some(entry), None) = (next(), next()) else {
            return Commands::everything(self.is_scalable);
        };
        if !self.is_scalable {
            let domain = entry.domain;
            let context = Command::ContextDevice { domain, device };
            return Commands::of(&[context, Command::Fence, self.translations(entry)]);
        }
        let context = Command::ContextDevice {
            domain: NO_DOMAIN,
            device,
        };
        Commands::of(&[
            context,
            Command::Fence,
            pasid_entry(entry),
            Command::Fence,
            self.translations(entry),
        ])
    }

    /// Returns the commands that a new entry of `attachment` owes in caching mode, where the unit
    /// may have cached that it was not present.
    ///
    /// In scalable mode the PASID entry and translations may have been cached without a domain-id
    /// or with that of the new entry.
    pub(crate) fn not_present(&self, attachment: &Attachment) -> Commands {
        let context = Command::ContextDevice {
            domain: NO_DOMAIN,
            device: attachment.device,
        };
        if !self.is_scalable {
            return Commands::of(&[context, Command::Fence, self.translations(attachment)]);
        }
        Commands::of(&[
            context,
            Command::Fence,
            Command::PasidDomain(NO_DOMAIN),
            pasid_entry(attachment),
            Command::Fence,
            Command::IotlbDomain(NO_DOMAIN),
            self.translations(attachment),
        ])
    }

    /// Returns the commands that remove a PASID entry and the translations through it.
    pub(crate) fn pasid(&self, attachment: &Attachment) -> Commands {
        let entry = pasid_entry(attachment);
        Commands::of(&[entry, Command::Fence, self.translations(attachment)])
    }

    /// The translations through an entry. In scalable mode, those of the first stage and of
    /// pass-through have a PASID, and a domain-selective command leaves them (section 6.5.3.3).
    const fn translations(&self, attachment: &Attachment) -> Command {
        let domain = attachment.domain;
        match attachment.translation {
            Translation::FirstStage { .. } | Translation::PassThrough if self.is_scalable => {
                Command::FirstStageAll {
                    domain,
                    pasid: attachment.pasid,
                }
            }
            _ => Command::IotlbDomain(domain),
        }
    }
}

const fn pasid_entry(attachment: &Attachment) -> Command {
    Command::Pasid {
        domain: attachment.domain,
        pasid: attachment.pasid,
    }
}
