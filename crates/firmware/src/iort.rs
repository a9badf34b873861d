//! IORT: the SMMUs of Arm and the way to them (Arm DEN 0049E).

use ringfence_types::{Permissions, RequesterId};

use crate::acpi::{self, AcpiHeader};
use crate::bytes::{Bytes, Records};
use crate::endpoint::Endpoint;
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::id_mapping::IdMapping;
use crate::iort_node::{IortNode, IortNodeKind, ItsGroup};
use crate::reserved::{ReservedRegion, Treatment};

/// Most nodes that a lookup visits. A root complex, an SMMU and an ITS group are three.
pub const MAX_HOPS: usize = 8;

/// The IO remapping table. All of its nodes have been checked.
#[derive(Debug, Clone, Copy)]
pub struct Iort<'a> {
    /// Fields of the ACPI header.
    pub header: AcpiHeader,
    nodes: Bytes<'a>,
    count: u32,
    /// Length of the table, which bounds references.
    length: usize,
}

impl<'a> Iort<'a> {
    /// Checks a table. Bytes after its end are ignored.
    ///
    /// # Errors
    /// The first error of the table.
    pub fn new(table: &'a [u8]) -> Result<Self, FirmwareError> {
        let (header, bytes) = acpi::check(table, b"IORT", 0)?;
        let first = usize::try_from(bytes.u32(40)?).unwrap_or(usize::MAX);
        let iort = Self {
            header,
            nodes: bytes.from(first)?,
            count: bytes.u32(36)?,
            length: bytes.len(),
        };
        iort.checked().try_for_each(|node| node.map(|_| ()))?;
        Ok(iort)
    }

    fn checked(&self) -> impl Iterator<Item = Result<IortNode<'a>, FirmwareError>> + use<'a> {
        let (end, revision) = (self.length, self.header.revision);
        Records::new(self.nodes, 16, |rest| rest.u16(1).map(usize::from))
            .limited_to(self.count)
            .map(move |record| IortNode::parse(&record?, end, revision))
    }

    /// Returns all nodes, in the order of the table.
    pub fn nodes(&self) -> impl Iterator<Item = IortNode<'a>> + use<'a> {
        self.checked().flatten()
    }

    /// Returns the units: nodes of an SMMU of any version.
    pub fn units(&self) -> impl Iterator<Item = IortNode<'a>> + use<'a> {
        self.nodes().filter(IortNode::is_unit)
    }

    /// Returns the SMMU that translates a PCI device, with the device's stream ID. `None` if the
    /// device bypasses all SMMUs, or no root complex has it.
    ///
    /// # Errors
    /// A reference on the way leads to no node, or the references have no end.
    pub fn unit_of(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> Result<Option<Endpoint<IortNode<'a>>>, FirmwareError> {
        self.follow_pci(segment, requester, IortNode::is_unit)
    }

    /// Returns the ITS group that receives the interrupts of a PCI device, with the device ID of
    /// its messages there.
    ///
    /// # Errors
    /// As [`unit_of`](Self::unit_of).
    pub fn its_of(
        &self,
        segment: u16,
        requester: RequesterId,
    ) -> Result<Option<Endpoint<ItsGroup<'a>>>, FirmwareError> {
        let is_its = |node: &IortNode<'a>| matches!(node.kind, IortNodeKind::ItsGroup(_));
        let found = self.follow_pci(segment, requester, is_its)?;
        Ok(found.and_then(|Endpoint { unit, id }| match unit.kind {
            IortNodeKind::ItsGroup(unit) => Some(Endpoint { unit, id }),
            _ => None,
        }))
    }

    /// Returns the SMMU that translates the ID `input` of `node`, a named component or root
    /// complex. A named component with a single mapping ignores `input`.
    ///
    /// # Errors
    /// As [`unit_of`](Self::unit_of).
    pub fn unit_of_node(
        &self,
        node: &IortNode<'a>,
        input: u32,
    ) -> Result<Option<Endpoint<IortNode<'a>>>, FirmwareError> {
        self.follow(*node, input, IortNode::is_unit)
    }

    fn follow_pci(
        &self,
        segment: u16,
        requester: RequesterId,
        wanted: impl Fn(&IortNode<'a>) -> bool + Copy,
    ) -> Result<Option<Endpoint<IortNode<'a>>>, FirmwareError> {
        let id = u32::from(requester.get());
        let ours = |node: &IortNode<'a>| {
            matches!(&node.kind, IortNodeKind::RootComplex(root)
                if root.segment == u32::from(segment))
        };
        let mut roots = self.nodes().filter(ours);
        match roots.find(|root| root.output(id).is_some()) {
            Some(root) => self.follow(root, id, wanted),
            None => Ok(None),
        }
    }

    /// Follows the output references of `id` from `node` up to a node that is `wanted`.
    fn follow(
        &self,
        node: IortNode<'a>,
        id: u32,
        wanted: impl Fn(&IortNode<'a>) -> bool,
    ) -> Result<Option<Endpoint<IortNode<'a>>>, FirmwareError> {
        let (mut node, mut id) = (node, id);
        for _ in 1..MAX_HOPS {
            let Some((output, mapping)) = node.output(id) else {
                return Ok(None);
            };
            let next = self.node_at(&mapping);
            node = next.ok_or(FirmwareErrorKind::Reference.at(node.offset()))?;
            id = output;
            if wanted(&node) {
                return Ok(Some(Endpoint { unit: node, id }));
            }
        }
        Err(FirmwareErrorKind::TooManyHops.at(node.offset()))
    }

    fn node_at(&self, mapping: &IdMapping) -> Option<IortNode<'a>> {
        let offset = usize::try_from(mapping.reference).ok()?;
        self.nodes().find(|node| node.offset() == offset)
    }

    /// Returns the regions that firmware reserves for a stream of an SMMU (RMR nodes), from the
    /// answer of [`unit_of`](Self::unit_of).
    pub fn reserved_regions(
        &self,
        stream: &Endpoint<IortNode<'a>>,
    ) -> impl Iterator<Item = ReservedRegion> + use<'a> {
        let (unit, id) = (stream.unit.offset(), stream.id);
        let names = move |mapping: IdMapping| {
            usize::try_from(mapping.reference) == Ok(unit) && mapping.leads_to(id)
        };
        self.nodes()
            .filter_map(move |node| match node.kind {
                IortNodeKind::Rmr(rmr) if node.mappings().any(names) => Some(rmr),
                _ => None,
            })
            .flat_map(|rmr| {
                let permissions = Permissions::READ_WRITE;
                let treatment = match rmr.remap_permitted() {
                    true => Treatment::IdentityUntilMoved(permissions),
                    false => Treatment::Identity(permissions),
                };
                rmr.ranges()
                    .map(move |range| ReservedRegion { range, treatment })
            })
    }
}
