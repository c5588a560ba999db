//! How contexts end: through cuCtxDestroy, and primary contexts when their last owner releases them.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::code::{Code, Outcome};
use crate::context::{self, CONTEXTS, Context};
use crate::device;
use crate::event::EVENTS;
use crate::guard::{Out, lock};
use crate::handle::fresh;
use crate::settings::MAX_DEVICES;
use crate::space::{self, Kind};
use crate::{alloc, host, ipc, module};

/// A device's primary context, which exists while its retain count isn't 0.
struct Primary {
    count: u32,
    flags: u32,
    context: Option<Arc<Context>>,
    /// The handle, which the device's next primary context gets too.
    handle: usize,
}

static PRIMARY: [Mutex<Primary>; MAX_DEVICES] =
    [const { Mutex::new(Primary { count: 0, flags: 0, context: None, handle: 0 }) }; MAX_DEVICES];

/// Locks the primary context of the device with the program's number, and returns it with the device's ordinal.
fn primary(number: c_int) -> Outcome<(usize, MutexGuard<'static, Primary>)> {
    let ordinal = device::by_number(number)?.ordinal;
    Ok((ordinal, lock(&PRIMARY[ordinal])))
}

/// Destroys a context and everything that belongs to it.
fn destroy(context: &Context) {
    context.wait();
    CONTEXTS.remove(context.handle);
    context.streams.close();
    EVENTS.remove_if(|event| event.context == context.handle);
    module::forget(context.handle);
    for start in space::starts(|entry| entry.context == context.handle) {
        // Another thread's call may have released it first, so errors don't matter.
        let _ = match space::find(start).map(|entry| entry.kind) {
            Some(Kind::HostAlloc(_)) => host::release(start),
            Some(Kind::Registered(_)) => host::unregister(start),
            Some(Kind::Opened) => ipc::close_all(start),
            Some(_) => alloc::release(start, |_| true),
            None => Ok(()),
        };
    }
}

fn reset_primary(primary: &mut Primary) {
    if let Some(context) = primary.context.take() {
        destroy(&context);
    }
    primary.count = 0;
}

api! {
    cuCtxDestroy_v2(handle: usize) {
        device::started()?;
        let context = context::by_handle(handle)?;
        if context.primary {
            return Err(Code::INVALID_CONTEXT);
        }
        context::pop(handle);
        destroy(&context);
        Ok(())
    }

    cuDevicePrimaryCtxRetain(out: Out<usize>, number: c_int) {
        let (ordinal, mut primary) = primary(number)?;
        out.present()?;
        if primary.context.is_none() {
            if primary.handle == 0 {
                primary.handle = fresh();
            }
            primary.context = Some(Context::create(ordinal, primary.flags, primary.handle, true));
        }
        primary.count += 1;
        out.set(primary.handle)
    }

    cuDevicePrimaryCtxRelease_v2(number: c_int) {
        let (_, mut primary) = primary(number)?;
        primary.count = primary.count.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        if primary.count == 0 {
            reset_primary(&mut primary);
        }
        Ok(())
    }

    /// Also clears the sticky error.
    cuDevicePrimaryCtxReset_v2(number: c_int) {
        let (ordinal, mut primary) = primary(number)?;
        let count = primary.count;
        if primary.context.is_some() {
            reset_primary(&mut primary);
            // Its owners still hold it, so the handle now names a new context.
            primary.context = Some(Context::create(ordinal, primary.flags, primary.handle, true));
            primary.count = count;
        }
        Ok(())
    }

    cuDevicePrimaryCtxSetFlags_v2(number: c_int, flags: u32) {
        let (_, mut primary) = primary(number)?;
        context::valid_flags(flags)?;
        primary.flags = flags;
        if let Some(context) = &primary.context {
            context.flags.store(flags, Ordering::Relaxed);
        }
        Ok(())
    }

    cuDevicePrimaryCtxGetState(number: c_int, flags: Out<u32>, active: Out<c_int>) {
        let (_, primary) = primary(number)?;
        flags.present()?;
        active.present()?;
        flags.set(primary.flags)?;
        active.set(c_int::from(primary.context.is_some()))
    }
}
