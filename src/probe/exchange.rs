//! Calls the GIN or the RMA plugin as NCCL does, in a job with one rank that exchanges data with itself.

use super::outcome::{Outcome, emit};
use ferrogin_device::{Action, Context, Flags, Status, Window as DeviceWindow};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_libfabric::Libfabric;
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal, Transfer};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, GinContext, Plugin, log};
use scenario_runner::world::plugin_from_env;
use serde_json::json;
use std::sync::Arc;

/// Bytes of the put.
const BYTES: usize = 4096;
/// Places in the window: the source, and the targets of the put, the value and the get.
const SOURCE: usize = 0;
const PUT: usize = BYTES;
const VALUE: usize = 2 * BYTES;
const GET: usize = 3 * BYTES;
const SENTINEL: u64 = 0x0f1e_2d3c_4b5a_6978;
/// Time limit of a wait for the card.
const WAIT_NS: u64 = 10_000_000_000;

/// Emits the plugin, its devices and its log; then, unless `init_only`, opens a window and a context with a counter,
/// and exchanges data.
pub fn run(init_only: bool) -> Outcome {
    let result = steps(init_only);
    emit_log();
    result
}

/// Emits the RMA plugin `name` and its log, and puts data with a signal.
pub fn rma(name: &str) -> Outcome {
    let result = rma_steps(name);
    emit_log();
    result
}

fn rma_steps(name: &str) -> Outcome {
    begin("loading the RMA plugin");
    // As NCCL does, as a library and then as a part of its name.
    let plugin = match RmaPlugin::load(name) {
        Err(_) if !name.contains('/') => RmaPlugin::load(format!("libnccl-rma-{name}.so")),
        found => found,
    };
    let plugin = plugin.map_err(text)?;
    emit("plugin", json!({ "name": "ferrogin", "abi": format!("RMA V{}", plugin.version()), "path": name }));
    if let Some(path) = super::library::mapped(name) {
        emit("file", json!(path));
    }
    begin("connecting a job of one rank");
    let comm = RmaComm::init(&plugin, Arc::new(Bootstrap::single()), 0).map_err(text)?;
    begin("registering memory");
    let memory = Arc::new(DeviceMemory::alloc(4 * BYTES).map_err(text)?);
    let source: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8 ^ 0x5a).collect();
    memory.fill(0);
    memory.write(SOURCE, &source);
    let registered = comm.register(&memory, 0).map_err(text)?;
    begin("creating a context");
    let context = comm.create_context(1).map_err(text)?;
    emit("opened", json!(true));
    begin("putting data with a signal");
    let (here, there) = (registered.at(SOURCE), registered.at(PUT));
    let transfer = Transfer { context: 0, peer: 0, here, there, size: BYTES, aggregate: false };
    let signal = Signal { word: registered.at(VALUE), value: 1, strong: true };
    let request = context.put(transfer, Some(signal)).map_err(text)?;
    let (mut done, mut word) = (false, [0; 8]);
    // The process ends at its time limit.
    while !done || u64::from_le_bytes(word) != 1 {
        done = done || context.test(&request).map_err(text)?;
        context.progress().map_err(text)?;
        memory.read(VALUE, &mut word);
        std::thread::yield_now();
    }
    compare(&memory, PUT, &source, "a put")?;
    emit("exchanged", json!("rma"));
    Ok(())
}

fn emit_log() {
    for line in log::all() {
        emit(if line.is_warn() { "warn" } else { "info" }, json!(line.text));
    }
}

fn begin(step: &str) {
    emit("step", json!(step));
}

fn steps(init_only: bool) -> Outcome {
    begin("loading the plugin");
    let plugin = Plugin::find(&plugin_from_env()).map_err(text)?;
    emit("plugin", json!({ "name": plugin.name(), "abi": format!("{:?}", plugin.abi()), "path": plugin.path() }));
    if let Some(path) = super::library::mapped(&plugin.path().to_string_lossy()) {
        emit("file", json!(path));
    }
    begin("calling init, devices and getProperties");
    for name in Comm::probe(&plugin).map_err(text)? {
        emit("card", json!(name));
    }
    // The libfabric that the plugin has loaded, with its registered providers.
    if let Ok(library) = Libfabric::already_loaded() {
        for (name, version) in library.providers() {
            emit("provider", json!(format!("{name} {version}")));
        }
    }
    if init_only {
        return Ok(());
    }
    begin("connecting a job of one rank");
    let comm = Comm::init(&plugin, Arc::new(Bootstrap::single()), 0).map_err(text)?;
    begin("registering a window");
    let memory = Arc::new(DeviceMemory::alloc(4 * BYTES).map_err(text)?);
    let window = comm.register(&memory, 0).map_err(text)?;
    begin("creating a context with a signal and a counter");
    let config = GinConfigV14 {
        n_signals: 1,
        n_counters: 1,
        n_contexts: 1,
        queue_depth: 0,
        traffic_class: -1,
        backend_version: 2,
        rank_stride: 1,
    };
    let context = comm.create_context(&config).map_err(text)?;
    emit("opened", json!(true));
    // Kernels that run on a GPU need its address space: a CPU thread cannot post on their queues.
    if log::all().iter().any(|line| line.text.contains("kernels on cuda")) {
        emit("exchanged", json!("gpu"));
    } else {
        begin("exchanging data with itself");
        if let Err(error) = exchange(&context, DeviceWindow(window.gin_handle()), &memory) {
            let warn = log::last_warn().map_or(String::new(), |warn| format!(": {warn}"));
            emit("error", json!(format!("{error}{warn}")));
            emit_log();
            // A failed card may delay closing its objects.
            std::process::exit(1);
        }
        emit("exchanged", json!("cpu"));
    }
    begin("closing the plugin's objects");
    context.destroy().map_err(text)?;
    window.deregister().map_err(text)?;
    comm.close().map_err(text)
}

#[allow(clippy::needless_pass_by_value)]
fn text(error: mini_nccl::Error) -> String {
    error.to_string()
}

/// Does a put with a signal and a counter, a value with a signal, and a get, and compares all bytes.
#[allow(unsafe_code)]
fn exchange(gin: &GinContext, window: DeviceWindow, memory: &DeviceMemory) -> Result<(), String> {
    // SAFETY: createContext returned the handle, and the borrowed `gin` keeps it valid.
    let context = unsafe { Context::from_handle(gin.handle(), 0) };
    let context = context.map_err(|status| match status {
        Status::Unsupported => format!(
            "the device code of this tool (ferrogin {}) refuses the plugin's handle: the plugin is from another release",
            env!("CARGO_PKG_VERSION")
        ),
        status => format!("the device code refuses the plugin's handle: {status}"),
    })?;
    context.set_timeout_ns(WAIT_NS);
    let source: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8 ^ 0x5a).collect();
    memory.fill(0);
    memory.write(SOURCE, &source);
    let at = |offset: usize| window.at(offset as u64);
    let step = |what: &'static str| move |status: Status| format!("{what}: {status}");
    let action = Action::signal_inc(0).with_counter(0);
    context.put(0, at(PUT), at(SOURCE), BYTES as u64, action, Flags::NONE).map_err(step("posting a put"))?;
    context.wait_signal(0, 1).map_err(step("waiting for the signal of a put"))?;
    compare(memory, PUT, &source, "a put")?;
    context.wait_counter(0, 1).map_err(step("waiting for the counter of a put"))?;
    context
        .put_value(0, at(VALUE), SENTINEL, 8, Action::signal_inc(0), Flags::NONE)
        .map_err(step("posting a value"))?;
    context.wait_signal(0, 2).map_err(step("waiting for the signal of a value"))?;
    compare(memory, VALUE, &SENTINEL.to_le_bytes(), "a value")?;
    context.get(0, at(PUT), at(GET), BYTES as u64, Flags::NONE).map_err(step("posting a get"))?;
    context.flush().map_err(step("flushing a get"))?;
    compare(memory, GET, &source, "a get")?;
    match gin.query_last_error() {
        Ok(false) => Ok(()),
        Ok(true) => Err("queryLastError reports an error after the exchange".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn compare(memory: &DeviceMemory, offset: usize, expected: &[u8], operation: &str) -> Result<(), String> {
    let mut got = vec![0; expected.len()];
    memory.read(offset, &mut got);
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None => Ok(()),
        Some(at) => Err(format!(
            "{operation} delivered wrong bytes: byte {at} is {:#04x}, not {:#04x}, although its signal or flush did",
            got[at], expected[at]
        )),
    }
}
