//! What destroyContext and closeColl promise: what kernels have posted arrives, though they are called right after the posts.

#![allow(unsafe_code)]

use crate::harness::{alone, alone_each, config, device, ranks, window};
use ferrogin_device::{Action, Flags, Window as DeviceWindow};
use ferrogin_ffi::nccl::{self, GinConfigV14};
use mini_nccl::Comm;

/// Posts a value with a signal on each of three contexts, with and without a deferred doorbell.
fn post(comm: &Comm, by_communicator: bool, round: u64) {
    let (memory, window) = window(comm, 4096);
    let context = comm.create_context(&GinConfigV14 { n_contexts: 3, ..config(1, 0) }).expect("contexts");
    for id in 0..3 {
        let gin = device(&context, id);
        let at = 8 * u64::from(id);
        if comm.rank() == 0 {
            let to = DeviceWindow(window.gin_handle()).at(at);
            let flags = if id == 1 { Flags::NONE } else { Flags::AGGREGATE };
            gin.put_value(1, to, round, 8, Action::signal_inc(0), flags).expect("a post");
        }
    }
    if comm.rank() == 1 {
        for id in 0..3 {
            device(&context, id).wait_signal(0, 1).expect("the signal");
            assert_eq!(memory.load(8 * id as usize), round);
        }
    }
    match by_communicator {
        true => context.abandon(),
        false => context.destroy().expect("destroyed"),
    }
}

#[test]
fn posts_arrive_though_nccl_closes_at_once() {
    let test = "posts_arrive_though_nccl_closes_at_once";
    let faults = ("SOFTEFA_FAULTS", "close_drops,reorder=64,delay_us=50..100");
    let emulated = ("FERROGIN_SIGNALS", "emulated");
    let locked = ("FERROGIN_POST", "locked");
    alone_each(test, &[vec![faults], vec![faults, emulated], vec![faults, locked]], |plugin| {
        for by_communicator in [false, true] {
            for round in 1..=5 {
                ranks(&plugin, 2, move |_, comm| post(&comm, by_communicator, round));
            }
        }
    });
}

/// NCCL's threads may ask for errors while another one destroys the context.
#[test]
fn handle_is_known_until_the_posts_have_arrived() {
    let test = "handle_is_known_until_the_posts_have_arrived";
    alone(test, &[("SOFTEFA_FAULTS", "delay_us=200000..300000")], |plugin| {
        let query = plugin.raw_table().and_then(|table| table.query_last_error).expect("queryLastError");
        ranks(&plugin, 1, move |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(0, 0)).expect("a context");
            let to = DeviceWindow(window.gin_handle()).at(0);
            device(&context, 0).put_value(0, to, 7, 8, Action::NONE, Flags::AGGREGATE).expect("a post");
            let handle = context.gin_ctx() as usize;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut failed = 0;
                    // SAFETY: any number may be passed as a handle, and the plugin writes one byte into a local variable.
                    while unsafe { query(handle as *mut _, &mut failed) } == nccl::SUCCESS {
                        assert_eq!(failed, 0);
                        std::thread::yield_now();
                    }
                    assert_eq!(memory.load(0), 7, "the handle was closed before the post arrived");
                });
                context.destroy().expect("destroyed");
            });
        });
    });
}
