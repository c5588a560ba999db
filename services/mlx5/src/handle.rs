//! The handle of a device's resource.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A reference to a resource of a device, which keeps the resource alive.
#[derive(Clone)]
pub struct Handle(Arc<dyn Any + Send + Sync>);

impl Handle {
    /// Creates a handle to a value that the device owns. Dropping the last clone drops the value, which destroys the
    /// resource.
    pub fn new<R: Send + Sync + 'static>(resource: R) -> Self {
        Self(Arc::new(resource))
    }

    /// Returns the value, if it has this type: a device refuses the handles of other devices.
    pub fn get<R: Send + Sync + 'static>(&self) -> Option<&R> {
        self.0.downcast_ref()
    }

    /// Returns whether both name the same resource.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}
