//! One context's queues: its endpoints on a rail, and the infos to open them with.
#![allow(unsafe_code)]

use super::shape::Shape;
use crate::address::EndpointAddress;
use crate::comm::CollComm;
use crate::endpoint::{CounterOffsets, Endpoint, EndpointOptions, Role, floor_power_of_two};
use crate::error::Error;
use crate::fault::COUNTER_STRIDE;
use crate::log::first_time;
use crate::memory::ContextMemory;
use crate::rail::{QueueOptions, Rail};
use ferrogin_ffi::block::Layout;
use ferrogin_ffi::ext::Target;
use ferrogin_libfabric::{Info, bindings};
use std::sync::Arc;

/// Requests in flight when NCCL passes queueDepth 0.
const DEPTH_DEFAULT: usize = 1024;
const NARROW: &str = "no wide requests";
const SHORT_IDS: &str = "no 64-bit request ids";

/// One context of a `createContext`.
pub struct OneContext {
    pub endpoints: Vec<Endpoint>,
    /// At `[slot * nranks + peer]`.
    pub targets: Arc<[Target]>,
}

impl OneContext {
    /// Opens the endpoints on `rail`, without targets yet. Advances `next`, the offsets of the next counters in
    /// `memory`.
    ///
    /// # Errors
    /// An endpoint doesn't open.
    ///
    /// # Safety
    /// `memory` must outlive the result, and have room from `next` on that only these endpoints' counters use.
    pub unsafe fn open(
        coll: &CollComm,
        rail: &Rail,
        info: &RailInfo,
        shape: &Shape,
        memory: &ContextMemory,
        next: &mut CounterOffsets,
    ) -> Result<Self, Error> {
        let mut endpoints = Vec::with_capacity(shape.endpoints());
        for role in Role::all(shape.n_counters, shape.n_signals) {
            let (info, depth) = info.of(role);
            let (provider, signals) = (coll.plugin.config.provider, coll.plugin.config.signals);
            let options = EndpointOptions { provider, signals, role, info, depth: *depth, isolates: shape.isolates };
            let offsets = *next;
            next.completed += COUNTER_STRIDE * if matches!(role, Role::Signal(_)) { 2 } else { 1 };
            next.errors += COUNTER_STRIDE;
            // SAFETY: the caller keeps the memory. Both offsets advance with each endpoint, so no two counters share
            // memory.
            let endpoint = unsafe { Endpoint::open(rail, &*coll.device, options, &*memory.card, offsets) };
            let endpoint = endpoint?;
            if shape.layout == Layout::V1 && !endpoint.request_ids_64() && first_time(SHORT_IDS, &rail.name()) {
                crate::info!(
                    "card {} has no 64-bit request ids (libfabric 2.6 never reports them); the device code of NCCL \
                     and of ferrogin works without them: it uses 16 bits and leaves the others 0",
                    rail.name()
                );
            }
            endpoints.push(endpoint);
        }
        Ok(Self { endpoints, targets: Arc::default() })
    }

    /// Returns the addresses of the endpoints that peers write to.
    ///
    /// # Errors
    /// Those of [`Endpoint::address`].
    pub fn addresses(&self) -> Result<Vec<EndpointAddress>, Error> {
        let targets = self.endpoints.iter().filter(|e| matches!(e.role, Role::Data | Role::Signal(_)));
        targets.map(Endpoint::address).collect()
    }
}

/// Infos to open a rail's endpoints with, and their queue depths.
pub struct RailInfo {
    /// For endpoints with 64-byte requests.
    pub narrow: (Info, usize),
    /// For the value endpoint, if it has 128-byte requests.
    pub wide: Option<(Info, usize)>,
}

impl RailInfo {
    pub fn find(coll: &CollComm, rail: &Rail, shape: &Shape) -> Result<Self, Error> {
        let failed = |what: &str| Error::fabric(format!("asking card {} for {what}", rail.name()));
        let wanted = if shape.depth == 0 { DEPTH_DEFAULT } else { shape.depth.next_power_of_two() };
        let query = &coll.plugin.query;
        let find = |wide: bool, depth: usize, tclass: u32| {
            rail.endpoint_info(query, QueueOptions { depth, wide, tclass, receives: 0 })
        };
        let limit = |info: &Info| floor_power_of_two(info.tx_size().clamp(1, 1 << 30) as u32) as usize;
        let depth = wanted.min(limit(&rail.info));
        if shape.depth != 0 && depth != shape.depth {
            crate::info!(
                "card {} cannot make queues of exactly queueDepth {}: they have room for {depth} requests",
                rail.name(),
                shape.depth
            );
        }
        let mut classes = tclass_choices(shape.tclass()).into_iter();
        let (narrow, tclass) = loop {
            let tclass = classes.next().unwrap_or(0);
            // Some libfabric versions refuse an unknown class, others ignore it and succeed.
            match find(false, depth, tclass) {
                Ok(info) if tclass == 0 || info.tclass() == tclass => break (info, tclass),
                Ok(_) => crate::trace!("libfabric ignores traffic class {tclass:#x}"),
                Err(error) if tclass == 0 => return Err(failed("queue pairs")(error)),
                Err(error) => crate::trace!("libfabric offers no queue pairs with traffic class {tclass:#x}: {error}"),
            }
        };
        if tclass != shape.tclass() {
            let instead = if tclass == 0 { "the default class" } else { "the low-latency class" };
            crate::info!(
                "card {} does not support the requested traffic class {}: its queues use {instead}",
                rail.name(),
                shape.traffic_class
            );
        }
        let wide = match shape.layout {
            Layout::V0 => None,
            // A queue of 128-byte requests has fewer slots. The card reports how many if the hints don't ask for a
            // number.
            Layout::V1 => match find(true, 0, tclass) {
                Ok(info) => {
                    let depth = depth.min(limit(&info));
                    Some((find(true, depth, tclass).map_err(failed("wide queue pairs"))?, depth))
                }
                Err(error) => {
                    crate::trace!("libfabric offers no 128-byte requests: {error}");
                    if first_time(NARROW, &rail.name()) {
                        crate::warn!(
                            "card {} has no 128-byte requests: putValue of kernels built with NCCL 2.32 headers will \
                             fail; put, signal and get work, and so does ferrogin's own device code. Install a \
                             libfabric newer than 2.6.0 to use 128-byte requests",
                            rail.name()
                        );
                    }
                    None
                }
            },
        };
        Ok(Self { narrow: (narrow, depth), wide })
    }

    fn of(&self, role: Role) -> &(Info, usize) {
        match (role, &self.wide) {
            (Role::Value, Some(wide)) => wide,
            _ => &self.narrow,
        }
    }
}

/// Returns the traffic classes to try for a requested class, best first. EFA only knows the low-latency class, which
/// stands in for expedited forwarding (DSCP 46) and every higher DSCP.
fn tclass_choices(tclass: u32) -> Vec<u32> {
    let mut choices = vec![tclass];
    if tclass != 0 {
        let urgent = tclass & !bindings::FI_TC_DSCP >= 46;
        choices.extend(urgent.then_some(bindings::FI_TC_LOW_LATENCY));
        choices.push(0);
    }
    choices
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_ffi::nccl::GinConfigV14;

    #[test]
    fn traffic_classes_fall_back_to_known_ones() {
        let config = |traffic_class| GinConfigV14 { traffic_class, ..Default::default() };
        let class = |value| Shape::new(&config(value)).unwrap().tclass();
        assert_eq!(tclass_choices(class(-1)), [0]);
        assert_eq!(tclass_choices(class(104)), [bindings::FI_TC_DSCP | 26, 0]);
        assert_eq!(tclass_choices(class(46 << 2)), [bindings::FI_TC_DSCP | 46, bindings::FI_TC_LOW_LATENCY, 0]);
    }
}
