//! Copies the mappings that QEMU reports into the software IOMMU.

use std::fs::File;
use std::io;

use ringfence_types::{Iova, IovaRange};
use ringfence_vfio_user::{Message, VfioUserRequest, errno};
use ringfence_virtio_iommu::spec;
use rustix::fs::fstat;

use ringfence_live::dma::{Dma, MemoryInUse};
use ringfence_live::iommu::VirtioIommu;
use ringfence_live::{GuestRam, RangeSource};

const DOMAIN: u32 = 1;
/// Number of past mappings kept for test accesses.
const MAX_UNMAPPED: usize = 256;

/// `argsz` of the reply to `DMA_UNMAP`.
const DMA_UNMAP_BYTES: u32 = 24;

/// A mapping that QEMU reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QemuMapping {
    pub(super) range: IovaRange,
    pub(super) writable: bool,
}

pub(super) struct ShadowIommu {
    iommu: VirtioIommu,
    /// Device and inode of the guest's memory file.
    file: Option<(u64, u64)>,
    pub(super) live: Vec<QemuMapping>,
    pub(super) unmapped: Vec<IovaRange>,
}

impl ShadowIommu {
    /// Attaches the endpoint to a domain without mappings.
    pub(super) fn new(iommu: VirtioIommu, endpoint: u16) -> io::Result<Self> {
        let shadow = Self {
            iommu,
            file: None,
            live: Vec::new(),
            unmapped: Vec::new(),
        };
        shadow.iommu.accept_all_features();
        let attach = [DOMAIN, endpoint.into(), 0, 0];
        shadow.request(spec::VIRTIO_IOMMU_T_ATTACH, &attach, &[])?;
        Ok(shadow)
    }

    fn request(&self, kind: u8, words: &[u32], longs: &[u64]) -> io::Result<()> {
        let mut request = vec![kind, 0, 0, 0];
        let (domain, rest) = words.split_at(words.len().min(1));
        let long = !longs.is_empty();
        request.extend(domain.iter().flat_map(|word| word.to_le_bytes()));
        // The flags of MAP and the reserved word of UNMAP are at the end.
        if !long {
            request.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
        }
        request.extend(longs.iter().flat_map(|long| long.to_le_bytes()));
        if long {
            request.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
        }
        self.iommu.handle(&request)
    }

    /// Applies a `DMA_MAP` or `DMA_UNMAP`. Returns the reply's body, or the error number.
    pub(super) fn change(&mut self, message: Message) -> Result<Vec<u8>, u32> {
        match VfioUserRequest::parse(message).map_err(|error| error.errno())? {
            VfioUserRequest::DmaMap {
                range,
                readable,
                writable,
                offset,
                file,
            } => {
                // Memory that this process cannot access stays unmapped.
                let Some(file) = file else {
                    return Ok(Vec::new());
                };
                if !self.is_memory(File::from(file))? {
                    return Ok(Vec::new());
                }
                let flags = [
                    (readable, spec::VIRTIO_IOMMU_MAP_F_READ),
                    (writable, spec::VIRTIO_IOMMU_MAP_F_WRITE),
                ];
                let flags = flags.iter().filter(|(set, _)| *set).map(|(_, f)| f).sum();
                let (start, last) = (range.start().get(), range.last().get());
                let longs = [start, last, offset];
                self.request(spec::VIRTIO_IOMMU_T_MAP, &[DOMAIN, flags], &longs)
                    .map_err(refused)?;
                self.live.push(QemuMapping { range, writable });
                Ok(Vec::new())
            }
            VfioUserRequest::DmaUnmap { range, flags } => {
                let whole = IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX));
                let unmapped = range.or(whole).ok_or(errno::EINVAL)?;
                let longs = [unmapped.start().get(), unmapped.last().get()];
                self.request(spec::VIRTIO_IOMMU_T_UNMAP, &[DOMAIN, 0], &longs)
                    .map_err(refused)?;
                for mapping in self
                    .live
                    .extract_if(.., |mapping| unmapped.overlaps(&mapping.range))
                {
                    self.unmapped.push(mapping.range);
                }
                let surplus = self.unmapped.len().saturating_sub(MAX_UNMAPPED);
                self.unmapped.drain(..surplus);
                let (start, bytes) = range.map_or((0, 0), |r| (r.start().get(), r.bytes()));
                let words = [DMA_UNMAP_BYTES, flags]
                    .into_iter()
                    .flat_map(u32::to_le_bytes);
                let longs = [start, bytes].into_iter().flat_map(u64::to_le_bytes);
                Ok(words.chain(longs).collect())
            }
            _ => Err(errno::EINVAL),
        }
    }

    /// Returns true if the file is the guest's memory, which is the first file received. Offsets in
    /// it are guest-physical addresses: the tests' guests have less memory than the start of QEMU's
    /// PCI hole.
    fn is_memory(&mut self, file: File) -> Result<bool, u32> {
        let stat = fstat(&file).map_err(|_| errno::EINVAL)?;
        let id = (stat.st_dev, stat.st_ino);
        if let Some(known) = self.file {
            return Ok(known == id);
        }
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let range = IovaRange::new(Iova::ZERO, bytes).ok_or(errno::EINVAL)?;
        let mut ram = GuestRam::default();
        let source = RangeSource {
            file: Some(file.into()),
            offset: 0,
            accessible: true,
        };
        ram.map(range, source).map_err(|error| error.errno())?;
        let set = self.iommu.memory().set_memory(ram.memory());
        set.map_err(|MemoryInUse| errno::EBUSY)?;
        self.file = Some(id);
        Ok(true)
    }
}

/// Prints why the software IOMMU refused what QEMU reported, because QEMU shows the number alone.
fn refused(error: io::Error) -> u32 {
    eprintln!("the software IOMMU refused a change that QEMU reported: {error}");
    errno::EINVAL
}
