//! Handles that no call may accept: closed ones, those of other kinds, forged ones and foreign pointers. Two threads
//! pass them at once, while their own objects are in the closed ones' places.
#![allow(unsafe_code)]

use crate::abi_fuzz::logger;
use crate::harness::{alone, config};
use ferrogin_ffi::nccl::{self, GinV14, HANDLE_MAXSIZE};
use ferrogin_ffi::rma::{RmaConfigV14, RmaPropertiesV16, RmaV16, SIGNAL_OP_ADD};
use ferrogin_test_support::repetitions;
use ferrogin_test_support::wait::{poll_until, receive};
use mini_nccl::DeviceMemory;
use mini_nccl::rma::RmaPlugin;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Barrier, Mutex, mpsc};

type Handle = *mut c_void;

/// Calls an entry of a table.
macro_rules! call {
    ($table:expr, $entry:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: pointers are to local variables and registered memory that outlive the call; the plugin checks
        // handles before it uses them.
        unsafe { ($table.$entry.expect("an entry"))($($arg),*) }
    };
}

/// Like `call`, for a call that must succeed.
macro_rules! good {
    ($table:expr, $entry:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(call!($table, $entry($($arg),*)), nccl::SUCCESS, stringify!($entry))
    };
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Plugin,
    Listen,
    Coll,
    Window,
    Context,
    RmaPlugin,
    RmaListen,
    RmaComm,
    RmaMemory,
    RmaContext,
    Request,
}

/// A handle that calls get, and its kind if it's open.
#[derive(Debug, Clone, Copy)]
struct Given {
    handle: usize,
    kind: Option<Kind>,
}

/// One of each kind of object, in communicators of one rank.
struct Open<'a> {
    gin: &'a GinV14,
    rma: &'a RmaV16,
    memory: &'a DeviceMemory,
    plugin: Handle,
    listen: Handle,
    coll: Handle,
    window: Handle,
    context: Handle,
    rma_plugin: Handle,
    rma_listen: Handle,
    rma_comm: Handle,
    rma_memory: Handle,
    rma_context: Handle,
    request: Handle,
    /// Was registered in the place that the RMA context has now, unless the other thread took it.
    closed: Handle,
}

impl<'a> Open<'a> {
    fn new(gin: &'a GinV14, rma: &'a RmaV16, memory: &'a DeviceMemory) -> Self {
        let [mut plugin, mut listen, mut coll, mut window, mut context, mut unused] = [null_mut(); 6];
        let (mut name, mut device) = ([0u8; HANDLE_MAXSIZE], null_mut());
        let (data, kind) = (memory.as_ptr(), memory.kind());
        good!(gin, init(&mut plugin, 0, logger()));
        good!(gin, listen(plugin, 0, name.as_mut_ptr().cast(), &mut listen));
        good!(gin, connect(plugin, [name.as_mut_ptr().cast()].as_mut_ptr(), 1, 0, listen, &mut coll));
        good!(gin, reg_mr_sym(coll, data, 4096, kind, 0, &mut window, &mut unused));
        good!(gin, create_context(coll, &mut config(1, 0), &mut context, &mut device));

        let [mut rma_plugin, mut rma_listen, mut rma_comm, mut rma_memory, mut rma_context] = [null_mut(); 5];
        let (mut request, mut closed) = (null_mut(), null_mut());
        good!(rma, init(&mut rma_plugin, 0, logger()));
        good!(rma, listen(rma_plugin, 0, name.as_mut_ptr().cast(), &mut rma_listen));
        good!(rma, connect(null_mut(), [name.as_mut_ptr().cast()].as_mut_ptr(), 1, 0, rma_listen, &mut rma_comm));
        good!(rma, reg_mr_sym(rma_comm, data, 4096, kind, 0, &mut rma_memory));
        good!(rma, reg_mr_sym(rma_comm, data, 4096, kind, 0, &mut closed));
        good!(rma, dereg_mr_sym(rma_comm, closed));
        let mut rma_config = RmaConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        good!(rma, create_context(rma_comm, &mut rma_config, &mut rma_context));
        good!(rma, iput(rma_context, 0, 0, rma_memory, 8, 64, rma_memory, 0, 0, &mut request));
        Self {
            gin,
            rma,
            memory,
            plugin,
            listen,
            coll,
            window,
            context,
            rma_plugin,
            rma_listen,
            rma_comm,
            rma_memory,
            rma_context,
            request,
            closed,
        }
    }

    fn all(&self) -> [(Kind, Handle); 11] {
        [
            (Kind::Plugin, self.plugin),
            (Kind::Listen, self.listen),
            (Kind::Coll, self.coll),
            (Kind::Window, self.window),
            (Kind::Context, self.context),
            (Kind::RmaPlugin, self.rma_plugin),
            (Kind::RmaListen, self.rma_listen),
            (Kind::RmaComm, self.rma_comm),
            (Kind::RmaMemory, self.rma_memory),
            (Kind::RmaContext, self.rma_context),
            (Kind::Request, self.request),
        ]
    }

    /// Finishes the request, which closes it, and checks that the refused calls harmed nothing.
    fn finish(&self) {
        poll_until("put", || {
            let mut done = 0;
            good!(self.rma, test(self.rma_comm, self.request, &mut done));
            done == 1
        });
        let mut failed = [7u8; 2];
        good!(self.gin, query_last_error(self.context, &mut failed[0]));
        good!(self.rma, query_last_error(self.rma_context, &mut failed[1]));
        assert_eq!(failed, [0, 0]);
    }

    /// Closes everything, and returns the closed handles.
    fn close(self) -> impl Iterator<Item = usize> {
        good!(self.rma, destroy_context(self.rma_context));
        good!(self.rma, dereg_mr_sym(self.rma_comm, self.rma_memory));
        good!(self.rma, close_coll(self.rma_comm));
        good!(self.rma, close_listen(self.rma_listen));
        good!(self.rma, finalize(self.rma_plugin));
        good!(self.gin, destroy_context(self.context));
        good!(self.gin, dereg_mr_sym(self.coll, self.window));
        good!(self.gin, close_coll(self.coll));
        good!(self.gin, close_listen(self.listen));
        good!(self.gin, finalize(self.plugin));
        self.all().map(|(_, handle)| handle as usize).into_iter().chain([self.closed as usize])
    }

    /// Passes a handle to every call that takes one, in every place, except where it's right.
    fn refuse(&self, given: Given) {
        let Self { gin, rma, rma_comm: comm, rma_memory: m, rma_context: ctx, .. } = *self;
        let bad = given.handle as Handle;
        let (data, kind) = (self.memory.as_ptr(), self.memory.kind());
        let (mut out, mut unused, mut device) = (null_mut(), null_mut(), null_mut());
        let (mut n, mut flag, mut name) = (0, 0u8, [0u8; HANDLE_MAXSIZE]);
        let mut names = [name.as_mut_ptr().cast::<c_void>()];
        let mut rma_config = RmaConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
        let mut properties = RmaPropertiesV16::default();
        macro_rules! refused {
            ($($kind:ident: $table:ident.$entry:ident($($arg:expr),* $(,)?);)*) => {$(
                if given.kind != Some(Kind::$kind) {
                    let code = call!($table, $entry($($arg),*));
                    let is_refused = [nccl::INVALID_ARGUMENT, nccl::INVALID_USAGE].contains(&code);
                    assert!(is_refused, "{} with {given:x?} returned {code}", stringify!($entry($($arg),*)));
                }
            )*};
        }
        refused! {
            Plugin: gin.listen(bad, 0, name.as_mut_ptr().cast(), &mut out);
            Plugin: gin.connect(bad, names.as_mut_ptr(), 1, 0, self.listen, &mut out);
            Listen: gin.connect(self.plugin, names.as_mut_ptr(), 1, 0, bad, &mut out);
            Coll: gin.create_context(bad, &mut config(1, 0), &mut out, &mut device);
            Coll: gin.reg_mr_sym(bad, data, 4096, kind, 0, &mut out, &mut unused);
            Coll: gin.reg_mr_sym_dma_buf(bad, data, 4096, kind, 0, 0, 0, &mut out, &mut unused);
            Coll: gin.dereg_mr_sym(bad, self.window);
            Window: gin.dereg_mr_sym(self.coll, bad);
            Context: gin.gin_progress(bad);
            Context: gin.query_last_error(bad, &mut flag);
            Context: gin.destroy_context(bad);
            Coll: gin.close_coll(bad);
            Listen: gin.close_listen(bad);
            Plugin: gin.finalize(bad);

            RmaPlugin: rma.listen(bad, 0, name.as_mut_ptr().cast(), &mut out);
            RmaListen: rma.connect(self.rma_plugin, names.as_mut_ptr(), 1, 0, bad, &mut out);
            RmaComm: rma.get_rma_properties(bad, &mut properties);
            RmaComm: rma.create_context(bad, &mut rma_config, &mut out);
            RmaComm: rma.reg_mr_sym(bad, data, 4096, kind, 0, &mut out);
            RmaComm: rma.reg_mr_sym_dma_buf(bad, data, 4096, kind, 0, 0, 0, &mut out);
            RmaComm: rma.dereg_mr_sym(bad, m);
            RmaMemory: rma.dereg_mr_sym(comm, bad);
            RmaContext: rma.iput(bad, 0, 0, m, 8, 0, m, 0, 0, &mut out);
            RmaMemory: rma.iput(ctx, 0, 0, bad, 8, 0, m, 0, 0, &mut out);
            RmaMemory: rma.iput(ctx, 0, 0, m, 8, 0, bad, 0, 0, &mut out);
            RmaContext: rma.iput_signal(bad, 0, 0, m, 8, 0, m, 0, 0, m, 1, SIGNAL_OP_ADD, 1, 0, &mut out);
            RmaMemory: rma.iput_signal(ctx, 0, 0, bad, 8, 0, m, 0, 0, m, 1, SIGNAL_OP_ADD, 1, 0, &mut out);
            RmaMemory: rma.iput_signal(ctx, 0, 0, m, 8, 0, bad, 0, 0, m, 1, SIGNAL_OP_ADD, 1, 0, &mut out);
            RmaMemory: rma.iput_signal(ctx, 0, 0, m, 8, 0, m, 0, 0, bad, 1, SIGNAL_OP_ADD, 1, 0, &mut out);
            RmaContext: rma.iget(bad, 0, 0, m, 8, 0, m, 0, 0, &mut out);
            RmaMemory: rma.iget(ctx, 0, 0, bad, 8, 0, m, 0, 0, &mut out);
            RmaMemory: rma.iget(ctx, 0, 0, m, 8, 0, bad, 0, 0, &mut out);
            RmaContext: rma.iflush(bad, 0, m, 0, &mut out);
            RmaMemory: rma.iflush(ctx, 0, if bad.is_null() { ctx } else { bad }, 0, &mut out);
            RmaComm: rma.test(bad, self.request, &mut n);
            Request: rma.test(comm, bad, &mut n);
            RmaContext: rma.rma_progress(bad);
            RmaContext: rma.query_last_error(bad, &mut flag);
            RmaContext: rma.destroy_context(bad);
            RmaComm: rma.close_coll(bad);
            RmaListen: rma.close_listen(bad);
            RmaPlugin: rma.finalize(bad);
        }
    }
}

#[test]
fn closed_foreign_and_forged_handles_are_refused_in_every_call_of_two_threads() {
    let test = "closed_foreign_and_forged_handles_are_refused_in_every_call_of_two_threads";
    alone(test, &[], |plugin| {
        let library = RmaPlugin::load_version(plugin.path(), 16).expect("the RMA plugin");
        let (closed, barrier) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Barrier::new(2)));
        let (done, ended) = mpsc::channel();
        let rounds = repetitions("FERROGIN_HANDLE_ROUNDS", 4, 100);
        for _ in 0..2 {
            let (closed, barrier, done) = (closed.clone(), barrier.clone(), done.clone());
            let (plugin, library) = (plugin.clone(), library.clone());
            std::thread::spawn(move || {
                let (gin, rma) = (plugin.raw_table().expect("v14"), library.raw_table().expect("v16"));
                let memory = DeviceMemory::alloc(4096).expect("memory");
                for _ in 0..rounds {
                    let open = Open::new(&gin, &rma, &memory);
                    closed.lock().expect("handles").push(open.closed as usize);
                    barrier.wait();
                    let mut given: Vec<_> = open.all().map(|(kind, handle)| (handle as usize, Some(kind))).to_vec();
                    // Forged: another kind, another generation, another place.
                    given.extend(open.all().into_iter().flat_map(|(_, handle)| {
                        [1 << 40, 1 << 24, 1 << 4, 7, 1 << 63].map(|bits| (handle as usize ^ bits, None))
                    }));
                    given.extend(closed.lock().expect("handles").iter().rev().take(24).map(|handle| (*handle, None)));
                    let foreign = [0, 1, 0xdead_beef, usize::MAX, 1 << 62, memory.as_ptr() as usize];
                    given.extend(foreign.map(|handle| (handle, None)));
                    given.iter().for_each(|(handle, kind)| open.refuse(Given { handle: *handle, kind: *kind }));
                    open.finish();
                    let handles: Vec<_> = open.close().collect();
                    closed.lock().expect("handles").extend(handles);
                    barrier.wait();
                }
                done.send(()).expect("the test");
            });
        }
        drop(done);
        (0..2).for_each(|_| receive("end of a thread's calls", &ended));
    });
}
