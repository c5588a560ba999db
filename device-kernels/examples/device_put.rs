//! Posts a put with a signal through the device API, on host memory: `cargo run -p ferrogin-device-kernels --example
//! device_put`.
//!
//! In a job, NCCL's `createContext` returns a context's handle, and a GPU or CPU thread opens it with
//! `Context::from_handle`. Here the context is made by hand, as in this crate's tests: its rings are plain memory, and
//! this program plays the card.
#![allow(unsafe_code)]

use efa_dp_direct::wqe::{Destination, Geometry, parse};
use ferrogin_device::{Action, Flags, Status};
use ferrogin_ffi::ext::POLICY_COMBINING;
use plain_context::{EndpointSpec, Spec, WindowSpec, make_context, window};
use std::sync::atomic::Ordering;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two ranks. Each has an endpoint for data, one for values, and one for each signal; here there's one signal.
    let endpoint = EndpointSpec { entries: 16, wide: false, max_batch: 8, value_base: 0, start: 0 };
    let peer = |slot: u16| Destination { ah: 7, qpn: 100 + slot, qkey: 0x1234 };
    let made = make_context(&Spec {
        policy: POLICY_COMBINING,
        nranks: 2,
        rail: 0,
        endpoints: vec![endpoint; 3],
        n_counters: 0,
        n_signals: 1,
        // The endpoints that operations go to: each rank's data endpoint, then each rank's signal endpoint.
        targets: vec![peer(0), peer(0), peer(1), peer(1)],
        value_lkey: 0,
        scratch: WindowSpec { lkey: 1, addr: 0x1000, peers: vec![(0x2000, 2); 2] },
    });
    let context = made.context;
    // A window: memory that all ranks have registered. An offset in it means the same place on every rank.
    let window = window(&WindowSpec { lkey: 3, addr: 0x10_0000, peers: vec![(0x20_0000, 4); 2] }, 0);

    // Puts 4096 bytes from offset 0 on this rank to offset 8192 on rank 1, and then raises rank 1's signal 0 by one.
    let signal = Action::signal_inc(0);
    context.put(1, window.at(8192), window.at(0), 4096, signal, Flags::NONE).map_err(text)?;

    // An operation that raises a signal is posted on the signal's endpoint, here the third. Its doorbell holds the
    // producer count.
    let ring = &made.rings[2];
    let rung = ring.doorbell.load(Ordering::Acquire);
    println!("the doorbell holds {rung}; slot 0 of the ring holds this work request:");
    println!("{:#?}", parse(&ring.slot(0), &Geometry::NARROW)?);
    assert_eq!(rung, 1);

    // A flush waits until the card has completed every post. Until then the source must not change.
    let request = context.flush_async().map_err(text)?;
    println!("complete before the card has done anything: {}", context.test_flush(&request).map_err(text)?);
    ring.completed.store(rung.into(), Ordering::Release);
    context.wait_flush(&request).map_err(text)?;
    println!("complete after the card has raised its counter: {}", context.test_flush(&request).map_err(text)?);
    Ok(())
}

fn text(status: Status) -> String {
    format!("the device API returned {status:?}")
}
