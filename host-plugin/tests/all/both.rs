//! Communicators with both plugins, called as NCCL's host code was seen to call them.

use crate::harness::{alone, config, device};
use ferrogin_device::{Action, Flags, Window as DeviceWindow};
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until};
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal, Transfer};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Plugin};
use std::path::Path;
use std::sync::Arc;

/// Loads the library in both roles, runs `rank` on two threads, and closes the library.
fn job(path: &Path, rank: fn(&Arc<Plugin>, &Arc<RmaPlugin>, &Arc<Bootstrap>)) {
    let rma = RmaPlugin::load(path).expect("the RMA plugin");
    let gin = Plugin::load(path).expect("the GIN plugin");
    std::thread::scope(|scope| {
        for bootstrap in Bootstrap::threads(2, HANG_LIMIT) {
            let (rma, gin) = (&rma, &gin);
            scope.spawn(move || rank(gin, rma, &Arc::new(bootstrap)));
        }
    });
}

fn memory() -> Arc<DeviceMemory> {
    Arc::new(DeviceMemory::alloc(4096).expect("memory"))
}

/// Puts a value and a signal to the other rank by the host, and waits for the other rank's.
fn exchange(comm: &RmaComm) {
    let values = memory();
    let (memory, inline) = (comm.register(&memory(), 0), comm.register(&values, 0));
    let (memory, inline) = (memory.expect("a registration"), inline.expect("a registration"));
    let contexts = [0; 3].map(|_| comm.create_context(1).expect("a context"));
    memory.memory().store(0, 0x2000 + comm.rank() as u64);
    let signal = Signal { word: memory.at(128), value: 1, strong: true };
    let (here, there) = (memory.at(0), memory.at(64));
    let put = Transfer { context: 0, peer: 1 - comm.rank(), here, there, size: 8, aggregate: false };
    let request = contexts[2].put(put, Some(signal)).expect("a put");
    let mut is_done = false;
    poll_until("put and signal", || {
        contexts.iter().for_each(|context| context.progress().expect("progress"));
        is_done = is_done || contexts[2].test(&request).expect("a test");
        is_done && memory.memory().load(128) == 1
    });
    assert_eq!(memory.memory().load(64), 0x2000 + 1 - comm.rank() as u64);
    comm.barrier().expect("all ranks");
    drop(contexts);
    drop(values);
    inline.deregister_freed();
}

/// Type 5: host RMA connects first, and each window is registered with both plugins.
fn kernels(gin: &Arc<Plugin>, rma: &Arc<RmaPlugin>, bootstrap: &Arc<Bootstrap>) {
    let rma = RmaComm::init(rma, bootstrap.clone(), 0).expect("a communicator");
    let gin = Comm::init(gin, bootstrap.clone(), 0).expect("a communicator");
    let memory = memory();
    let window = gin.register(&memory, 0).expect("a window");
    let registered = rma.register(&memory, 0).expect("a registration");
    exchange(&rma);
    // Nothing synchronises the ranks before a second device communicator.
    let contexts = [0; 2].map(|_| gin.create_context(&config(1, 0)).expect("a context"));
    for (number, context) in contexts.iter().enumerate() {
        let (device, at) = (device(context, 0), 64 * (number + 1));
        let target = DeviceWindow(window.gin_handle()).at(at as u64);
        let value = 0x1000 + gin.rank() as u64;
        device.put_value(1 - gin.rank() as u32, target, value, 8, Action::signal_inc(0), Flags::NONE).expect("a value");
        device.wait_signal(0, 1).expect("a signal");
        assert_eq!(memory.load(at), 0x1000 + 1 - gin.rank() as u64);
    }
    // Right after the last kernel, and without the other rank.
    drop(contexts);
    drop(registered);
    drop(window);
    gin.close().expect("a closed communicator");
}

/// Type 2: NCCL skips the GIN plugin after its `init`, and the proxy has an RMA communicator of its own.
fn proxy(gin: &Arc<Plugin>, rma: &Arc<RmaPlugin>, bootstrap: &Arc<Bootstrap>) {
    let host = RmaComm::init(rma, bootstrap.clone(), 0).expect("a communicator");
    assert_eq!(Comm::probe(gin).expect("init and finalize").len(), 1);
    let proxy = RmaComm::init_proxy(rma, bootstrap.clone(), 0).expect("a communicator");
    exchange(&proxy);
    exchange(&host);
}

#[test]
fn both_plugins_serve_communicators_in_nccls_order() {
    let test = "both_plugins_serve_communicators_in_nccls_order";
    alone(test, &[("SOFTEFA_FAULTS", "seed=1,reorder=64")], |plugin| {
        let path = plugin.path().to_owned();
        drop(plugin);
        for _ in 0..2 {
            job(&path, kernels);
            job(&path, proxy);
        }
    });
}
