//! Endpoints.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fid, fid_ep};
use crate::entry;
use crate::table::Object;
use crate::{AddressVector, CompletionQueue, Counter, Domain, Error, EventQueue, Info};

/// An endpoint and the objects bound to it.
pub struct Endpoint {
    // Declared first, so that it's dropped, and closed, first.
    object: Object<fid_ep>,
    /// The bound objects.
    bound: Vec<Arc<dyn Any + Send + Sync>>,
    domain: Arc<Domain>,
}

impl Endpoint {
    /// Opens the endpoint that the info describes, with `fi_endpoint`. It's usable once it's bound and enabled.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>, info: &Info) -> Result<Self, Error> {
        let open = entry!(domain.object(), ops: fi_ops_domain, endpoint, "fi_endpoint")?;
        let object = Object::open(domain.library(), "fi_endpoint", |raw| {
            // SAFETY: the domain is open and the info is live.
            unsafe { open(domain.as_ptr(), info.as_ptr(), raw, ptr::null_mut()) }
        })?;
        Ok(Self { object, bound: Vec::new(), domain: Arc::clone(domain) })
    }

    fn bind(&mut self, other: *mut fid, flags: u64, keep: Arc<dyn Any + Send + Sync>) -> Result<(), Error> {
        // Kept even if the provider refuses, because it may have taken a reference before that.
        self.bound.push(keep);
        let bind = entry!(&self.object, fi_ops, bind, "fi_bind")?;
        // SAFETY: the endpoint is open. `bound` keeps `other` open, and is dropped after the endpoint is closed.
        self.object.library().check("fi_ep_bind", unsafe { bind(self.object.fid(), other, flags) })?;
        Ok(())
    }

    /// Binds the address vector that numbers the peers.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn bind_av(&mut self, av: &Arc<AddressVector>) -> Result<(), Error> {
        self.bind(av.as_ptr().cast(), 0, Arc::clone(av) as _)
    }

    /// Binds a completion queue for `FI_TRANSMIT`, `FI_RECV` or both, perhaps with `FI_SELECTIVE_COMPLETION`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn bind_cq(&mut self, cq: &Arc<CompletionQueue>, flags: u64) -> Result<(), Error> {
        self.bind(cq.as_ptr().cast(), flags, Arc::clone(cq) as _)
    }

    /// Binds a counter for the kinds of operations in `flags`: `FI_WRITE`, `FI_READ`, `FI_SEND`, `FI_RECV`,
    /// `FI_REMOTE_WRITE`, `FI_REMOTE_READ`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn bind_counter(&mut self, counter: &Arc<Counter>, flags: u64) -> Result<(), Error> {
        self.bind(counter.as_ptr().cast(), flags, Arc::clone(counter) as _)
    }

    /// Binds the event queue for the endpoint's own failures.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn bind_eq(&mut self, eq: &Arc<EventQueue>) -> Result<(), Error> {
        self.bind(eq.as_ptr().cast(), 0, Arc::clone(eq) as _)
    }

    /// Sets an endpoint-level option to a boolean with `fi_setopt`, before [`enable`](Self::enable).
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error; the code is `ENOPROTOOPT` for an option that the provider lacks.
    pub fn set_option(&mut self, option: u32, value: bool) -> Result<(), Error> {
        self.set(option as std::ffi::c_int, value)
    }

    /// Like [`set_option`](Self::set_option), with a number.
    ///
    /// # Errors
    /// Those of [`set_option`](Self::set_option).
    pub fn set_number(&mut self, option: std::ffi::c_int, value: usize) -> Result<(), Error> {
        self.set(option, value)
    }

    fn set<T: Copy>(&mut self, option: std::ffi::c_int, value: T) -> Result<(), Error> {
        let set = entry!(&self.object, ops: fi_ops_ep, setopt, "fi_setopt")?;
        let level = bindings::FI_OPT_ENDPOINT as std::ffi::c_int;
        let value = ptr::from_ref(&value);
        // SAFETY: the endpoint is open; `value` is a C bool or size_t, laid out as in Rust, and outlives the call.
        let code = unsafe { set(self.object.fid(), level, option, value.cast(), size_of::<T>()) };
        self.object.library().check("fi_setopt", code)?;
        Ok(())
    }

    /// Enables the endpoint with `fi_enable`. From then on, it sends and receives, and has a name.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn enable(&mut self) -> Result<(), Error> {
        let control = entry!(&self.object, fi_ops, control, "fi_enable")?;
        // SAFETY: the endpoint is open; FI_ENABLE takes no argument.
        let code = unsafe { control(self.object.fid(), bindings::FI_ENABLE, ptr::null_mut()) };
        self.object.library().check("fi_enable", code)?;
        Ok(())
    }

    /// Returns the address at which peers reach this endpoint, in the info's address format: at most `FI_NAME_MAX`
    /// bytes.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn name(&self) -> Result<Vec<u8>, Error> {
        let getname = entry!(&self.object, cm: fi_ops_cm, getname, "fi_getname")?;
        let mut name = vec![0u8; bindings::FI_NAME_MAX as usize];
        let mut len = name.len();
        // SAFETY: the endpoint is open; `len` is the size of the buffer, and the provider sets it to the length of the
        // name.
        let code = unsafe { getname(self.object.fid(), name.as_mut_ptr().cast(), &mut len) };
        self.object.library().check("fi_getname", code)?;
        name.truncate(len);
        Ok(name)
    }

    /// Returns the domain that the endpoint was opened on.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Returns the open object, for [`entry!`].
    pub fn object(&self) -> &Object<fid_ep> {
        &self.object
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_ep {
        self.object.as_ptr()
    }
}
