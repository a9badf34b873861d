//! Drivers that leave a device, and those that bind it again.

use ringfence_lab::LabError;
use ringfence_lab::layer::ContextTarget;
use ringfence_trace::DeviceIndex;
use ringfence_types::DomainId;

use super::Bench;

impl Bench {
    /// Ends the grants of a device's buffers and removes its context, as at the unbind of a driver
    /// that leaks its mappings.
    pub(crate) fn unbind(&mut self, device: u16) -> Result<(), LabError> {
        self.end_grants(device);
        self.machine.detach(self.requester(device)?)
    }

    fn end_grants(&mut self, device: u16) {
        let held = self.held.iter_mut();
        for held in held.filter(|held| held.key.device.0 == device && !held.back) {
            held.back = true;
            self.oracle.end(held.grant, self.now);
        }
    }

    /// Detaches a device from its domain and attaches it to a new one.
    fn attach_again(&mut self, device: u16) -> Result<(DomainId, ContextTarget), LabError> {
        let (index, requester) = (DeviceIndex(device), self.requester(device)?);
        self.layer.detach(index)?;
        let to = self.layer.attach(index, requester)?;
        if let Some(pool) = self.layer.copies(index) {
            self.oracle.set_pool(requester, pool.memory);
        }
        Ok(to)
    }

    /// Unbinds a device as [`unbind`](Self::unbind) does, detaches it from its domain, and binds a
    /// driver to it again. The new domain is empty.
    pub(crate) fn rebind(&mut self, device: u16) -> Result<(), LabError> {
        self.unbind(device)?;
        let to = self.attach_again(device)?;
        self.machine.attach(self.requester(device)?, to.0, to.1)?;
        if let Some(own) = self.targets.get_mut(usize::from(device)) {
            *own = to;
        }
        Ok(())
    }

    /// Rebinds a device as [`rebind`](Self::rebind) does, but its context entry stays, because a
    /// host owns it.
    pub(crate) fn rebind_with_context(&mut self, device: u16) -> Result<(), LabError> {
        self.end_grants(device);
        let to = self.attach_again(device)?;
        match self.targets.get(usize::from(device)) == Some(&to) {
            true => Ok(()),
            false => Err(LabError::Internal("a device with another table")),
        }
    }

    /// Binds a second driver to a device. The layer and the hardware keep all that the first one
    /// has left.
    pub(crate) fn rebind_unnoticed(&mut self, device: u16) -> Result<(), LabError> {
        self.end_grants(device);
        Ok(())
    }
}
