//! Drivers that leave a device, and those that bind it again.

use ringfence_lab::LabError;
use ringfence_trace::DeviceIndex;

use super::Bench;

impl Bench {
    /// Ends the grants of a device's buffers and removes its context, as at the unbind of a driver
    /// that leaks its mappings.
    pub(crate) fn unbind(&mut self, device: u16) -> Result<(), LabError> {
        let held = self.held.iter_mut();
        for held in held.filter(|held| held.key.device.0 == device && !held.back) {
            held.back = true;
            self.oracle.end(held.grant, self.now);
        }
        self.machine.detach(self.requester(device)?)
    }

    /// Unbinds a device as [`unbind`](Self::unbind) does, detaches it from its domain, and binds a
    /// driver to it again. The new domain is empty.
    pub(crate) fn rebind(&mut self, device: u16) -> Result<(), LabError> {
        self.unbind(device)?;
        let (index, requester) = (DeviceIndex(device), self.requester(device)?);
        self.layer.detach(index)?;
        let (domain, target) = self.layer.attach(index, requester)?;
        self.machine.attach(requester, domain, target)?;
        if let Some(pool) = self.layer.copies(index) {
            self.oracle.set_pool(requester, pool.memory);
        }
        if let Some(own) = self.targets.get_mut(usize::from(device)) {
            *own = (domain, target);
        }
        Ok(())
    }

    /// Unbinds a device as [`unbind`](Self::unbind) does and binds a driver to it again. The device
    /// keeps its domain, with all that the first driver has left in it.
    pub(crate) fn rebind_to_same_domain(&mut self, device: u16) -> Result<(), LabError> {
        self.unbind(device)?;
        let own = self.targets.get(usize::from(device)).copied();
        let (domain, target) = own.ok_or(LabError::Internal("an unknown device"))?;
        self.machine.attach(self.requester(device)?, domain, target)
    }
}
