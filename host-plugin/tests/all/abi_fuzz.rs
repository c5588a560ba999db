//! Random calls to the C ABI: in any order and with any arguments, a call either succeeds, or returns an error code and
//! writes one WARN line. Pointers are valid, NULL or misaligned; handles, sizes and numbers are random.
//!
//! FERROGIN_FUZZ_SEED (a whole number) and FERROGIN_FUZZ_CALLS repeat or widen a run; a failure names the seed.
#![allow(unsafe_code)]

use crate::harness::{REPORT, alone, device_memory};
use ferrogin_ffi::nccl::{self, GinConfigV14, GinPropertiesV14, GinV14, HANDLE_MAXSIZE, NetPropertiesV12};
use ferrogin_test_support::{Random, repetitions};
use mini_nccl::{DeviceMemory, Plugin};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::{Arc, Barrier, Mutex};

thread_local! {
    /// WARN lines of this thread's current call.
    static WARNINGS: Cell<usize> = const { Cell::new(0) };
    static LAST_CALL: Cell<&'static str> = const { Cell::new("") };
}

/// A logger that counts WARN lines. NCCL's logger is variadic, but this one only reads the level.
unsafe extern "C" fn count_warnings(level: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char) {
    if level == nccl::LOG_WARN {
        WARNINGS.with(|count| count.set(count.get() + 1));
    }
}

pub fn logger() -> nccl::DebugLogger {
    // SAFETY: on the ABIs of NCCL's platforms, a variadic call passes its fixed arguments like any other call.
    Some(unsafe {
        std::mem::transmute::<
            unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char),
            unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...),
        >(count_warnings)
    })
}

/// The handles of all threads.
#[derive(Default)]
struct Pool {
    /// Open handles, in the order of [`Kind`]. Contexts and windows stay here after their communicator has closed them.
    handles: [Vec<usize>; 5],
    closed: Vec<usize>,
    /// Listen handles, for connect.
    listening: Vec<([u8; HANDLE_MAXSIZE], usize)>,
    /// By function: number of calls, and how many succeeded.
    tally: BTreeMap<&'static str, (usize, usize)>,
}

#[derive(Clone, Copy)]
enum Kind {
    Plugin,
    Listen,
    Coll,
    Window,
    Context,
}

struct Caller<'a> {
    table: &'a GinV14,
    random: Random,
    pool: &'a Mutex<Pool>,
    memory: &'a DeviceMemory,
    /// Remaining calls that may wait for another rank, which takes a second each.
    waits_left: usize,
    seed: u64,
    calls: usize,
}

macro_rules! call {
    ($caller:expr, $entry:ident ( $($arg:expr),* $(,)? )) => {{
        let entry = $caller.table.$entry.expect(stringify!($entry));
        LAST_CALL.with(|last| last.set(stringify!($entry)));
        WARNINGS.with(|count| count.set(0));
        // SAFETY: every pointer is NULL, misaligned or valid, and the test shows that the plugin checks all other
        // arguments.
        let code = unsafe { entry($($arg),*) };
        $caller.judge(code)
    }};
}

impl Caller<'_> {
    /// Checks the code, and that an error wrote one WARN line and a success none.
    fn judge(&mut self, code: c_int) -> bool {
        self.calls += 1;
        let (lines, name) = (WARNINGS.with(Cell::get), LAST_CALL.with(Cell::get));
        let place = format!("call {} ({name}) of seed {}", self.calls, self.seed);
        assert!((nccl::SUCCESS..=nccl::REMOTE_ERROR).contains(&code), "{place} gave {code}");
        assert_ne!(code, nccl::INTERNAL_ERROR, "{place} panicked");
        assert_eq!(lines, usize::from(code != nccl::SUCCESS), "lines of {place}, which gave {code}");
        let mut pool = self.pool.lock().expect("a pool");
        let tally = pool.tally.entry(name).or_default();
        *tally = (tally.0 + 1, tally.1 + usize::from(code == nccl::SUCCESS));
        code == nccl::SUCCESS
    }

    fn handle(&mut self, kind: Kind) -> *mut c_void {
        let pool = self.pool.lock().expect("a pool");
        let all = &pool.handles[kind as usize];
        let newest = all.len().saturating_sub(4);
        let any: Vec<usize> = pool.handles.iter().flatten().copied().collect();
        let bits = match self.random.below(16) {
            0 => 0,
            1 => self.random.next_u64() as usize,
            2 => self.random.of(&[1, 8, usize::MAX, 1 << 62, (1 << 62) | 5, self.memory.as_ptr() as usize]),
            3 if !any.is_empty() => self.random.of(&any),
            4 if !any.is_empty() => self.random.of(&any) ^ (1 << self.random.below(64)),
            5 if !pool.closed.is_empty() => self.random.of(&pool.closed),
            6 if !all.is_empty() => self.random.of(all),
            _ if !all.is_empty() => self.random.of(&all[newest..]),
            _ => 0,
        };
        bits as *mut c_void
    }

    fn keep(&mut self, kind: Kind, handle: *mut c_void) {
        assert!(!handle.is_null(), "a success without a handle");
        self.pool.lock().expect("a pool").handles[kind as usize].push(handle as usize);
    }

    /// Records that a call closed `handle`.
    fn closed(&mut self, kind: Kind, handle: *mut c_void, done: bool) {
        if done {
            let mut pool = self.pool.lock().expect("a pool");
            pool.handles[kind as usize].retain(|other| *other != handle as usize);
            pool.closed.push(handle as usize);
        }
    }

    /// Returns `usual`, and sometimes one of `others`.
    fn mostly<T: Copy>(&mut self, usual: T, others: &[T]) -> T {
        if self.random.one_in(10) { self.random.of(others) } else { usual }
    }

    /// Returns `place`, and sometimes a NULL or misaligned pointer.
    fn out<T>(&mut self, place: *mut T) -> *mut T {
        match self.random.below(24) {
            0 => null_mut(),
            1 if align_of::<T>() > 1 => place.cast::<u8>().wrapping_add(1).cast(),
            _ => place,
        }
    }

    fn step(&mut self) {
        match self.random.below(24) {
            0 => self.init(),
            1 => {
                let mut n = 0;
                let n = self.out(&mut n);
                call!(self, devices(n));
            }
            2 => {
                let mut gin = GinPropertiesV14 { supports_strong_signals: 7, supports_va_signals: 7 };
                let gin = self.out(&mut gin);
                call!(self, get_gin_properties(gin));
            }
            3 => {
                let mut properties = std::mem::MaybeUninit::<NetPropertiesV12>::zeroed();
                let device = self.random.of(&[0, 0, -1, 1, c_int::MAX, c_int::MIN]);
                let properties = self.out(properties.as_mut_ptr());
                call!(self, get_properties(device, properties));
            }
            4 | 5 => self.listen(),
            6 | 7 => self.connect(),
            8..=11 => self.register(),
            12 | 13 => {
                let (coll, window) = (self.handle(Kind::Coll), self.handle(Kind::Window));
                let done = call!(self, dereg_mr_sym(coll, window));
                self.closed(Kind::Window, window, done);
            }
            14..=16 => self.create_context(),
            17 => {
                let context = self.handle(Kind::Context);
                let done = call!(self, destroy_context(context));
                self.closed(Kind::Context, context, done);
            }
            18 | 19 => {
                let mut failed = 7u8;
                let (context, out) = (self.handle(Kind::Context), self.out(&mut failed));
                if call!(self, query_last_error(context, out)) {
                    assert_eq!(failed, 0, "no request has failed");
                }
            }
            20 => {
                let context = self.handle(Kind::Context);
                call!(self, gin_progress(context));
            }
            21 => {
                let listen = self.handle(Kind::Listen);
                let done = call!(self, close_listen(listen));
                self.closed(Kind::Listen, listen, done);
            }
            22 if self.random.one_in(3) => {
                let coll = self.handle(Kind::Coll);
                let done = call!(self, close_coll(coll));
                self.closed(Kind::Coll, coll, done);
            }
            22 | 23 if self.random.one_in(3) => {
                let plugin = self.handle(Kind::Plugin);
                let done = call!(self, finalize(plugin));
                self.closed(Kind::Plugin, plugin, done);
            }
            _ if self.random.one_in(3) => self.init(),
            _ => self.create_context(),
        }
    }

    fn init(&mut self) {
        let mut ctx = null_mut();
        let (out, hash) = (self.out(&mut ctx), self.random.next_u64());
        if call!(self, init(out, hash, logger())) {
            self.keep(Kind::Plugin, ctx);
        }
    }

    fn listen(&mut self) {
        let (mut bytes, mut listen) = ([0u8; HANDLE_MAXSIZE], null_mut());
        let (ctx, device) = (self.handle(Kind::Plugin), self.random.of(&[0, 0, 0, -1, 7]));
        let at = if self.random.one_in(16) { null_mut() } else { bytes.as_mut_ptr().cast::<c_void>() };
        let out = self.out(&mut listen);
        if call!(self, listen(ctx, device, at, out)) {
            self.keep(Kind::Listen, listen);
            self.pool.lock().expect("a pool").listening.push((bytes, listen as usize));
        }
    }

    fn connect(&mut self) {
        let known = self.pool.lock().expect("a pool").listening.clone();
        let mut own = ([0x5au8; HANDLE_MAXSIZE], self.handle(Kind::Listen) as usize);
        if let (Some(newest), false) = (known.last(), self.random.one_in(6)) {
            own = *newest;
        }
        let mut all = vec![own.0; 2];
        if let (Some(other), true) = (known.first(), self.random.one_in(2)) {
            all[1] = other.0;
        }
        let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        if self.random.one_in(10) {
            pointers[0] = null_mut();
        }
        let mut nranks = self.mostly(1, &[0, -1, c_int::MAX, c_int::MIN, 2]);
        let rank = self.mostly(0, &[-1, 1, c_int::MAX]);
        if nranks == 2 && (0..2).contains(&rank) {
            if self.waits_left == 0 {
                nranks = 1;
            }
            self.waits_left = self.waits_left.saturating_sub(1);
        }
        let (ctx, mut coll) = (self.handle(Kind::Plugin), null_mut());
        let list = self.out(pointers.as_mut_ptr());
        let out = self.out(&mut coll);
        if call!(self, connect(ctx, list, nranks, rank, own.1 as *mut c_void, out)) {
            self.keep(Kind::Coll, coll);
        }
    }

    fn register(&mut self) {
        let base = self.memory.as_ptr();
        let data = self.mostly(base, &[base.wrapping_byte_add(100), null_mut(), 16 as *mut c_void, usize::MAX as _]);
        let size = self.mostly(4096, &[self.memory.len(), 1, 0, 1 << 40, 1 << 63, usize::MAX, 1 << 30]);
        let kind = self.mostly(nccl::PTR_CUDA, &[nccl::PTR_HOST, nccl::PTR_DMABUF, 0, -1, 99]);
        let flags = self.mostly(0, &[1, u64::MAX]);
        let (coll, mut mhandle, mut window) = (self.handle(Kind::Coll), null_mut(), null_mut());
        let (m, w) = (self.out(&mut mhandle), self.out(&mut window));
        let done = if self.random.one_in(2) {
            call!(self, reg_mr_sym(coll, data, size, kind, flags, m, w))
        } else {
            let fd = self.mostly(
                self.memory.dma_buf().map_or(-1, |(fd, _)| fd.as_raw_fd()),
                &[-1, 0, 9999, c_int::MAX, c_int::MIN],
            );
            let offset = self.mostly(0, &[4096, 1, 1 << 40, u64::MAX]);
            call!(self, reg_mr_sym_dma_buf(coll, data, size, kind, offset, fd, flags, m, w))
        };
        assert_eq!(done, !mhandle.is_null(), "seed {}", self.seed);
        if done {
            assert!(!window.is_null());
            self.keep(Kind::Window, mhandle);
        }
    }

    fn create_context(&mut self) {
        let mut config = GinConfigV14 {
            n_signals: self.mostly(1, &[0, 2, 5, -1, c_int::MIN, 1 << 16, c_int::MAX]),
            n_counters: self.mostly(0, &[1, 3, -1, 1 << 16, c_int::MAX]),
            n_contexts: self.mostly(1, &[0, 2, -1, 1 << 16, c_int::MAX]),
            queue_depth: self.mostly(16, &[0, 1, 7, -1, c_int::MAX]),
            traffic_class: self.mostly(-1, &[0, 255, c_int::MIN, c_int::MAX]),
            backend_version: self.mostly(2, &[0, 1, 3, -1, c_int::MAX]),
            rank_stride: self.mostly(1, &[0, 2, -1, c_int::MAX]),
        };
        let (coll, mut context, mut device) = (self.handle(Kind::Coll), null_mut(), null_mut());
        let config = self.out(&mut config);
        let (c, d) = (self.out(&mut context), self.out(&mut device));
        let done = call!(self, create_context(coll, config, c, d));
        assert_eq!(done, !context.is_null(), "seed {}", self.seed);
        if done {
            assert!(!device.is_null());
            self.keep(Kind::Context, context);
        }
    }

    /// Closes all handles, in a different order than NCCL.
    fn end(&mut self) {
        let handles = std::mem::take(&mut self.pool.lock().expect("a pool").handles);
        for (kind, all) in [Kind::Plugin, Kind::Listen, Kind::Coll].into_iter().map(|k| (k, &handles[k as usize])) {
            for handle in all {
                let handle = *handle as *mut c_void;
                match kind {
                    Kind::Plugin => call!(self, finalize(handle)),
                    Kind::Listen => call!(self, close_listen(handle)),
                    _ => call!(self, close_coll(handle)),
                };
            }
        }
        // closeColl has closed windows and contexts.
        for window in &handles[Kind::Window as usize] {
            assert!(!call!(self, dereg_mr_sym(null_mut(), *window as *mut c_void)));
        }
        for context in &handles[Kind::Context as usize] {
            assert!(!call!(self, destroy_context(*context as *mut c_void)), "closeColl closes contexts");
        }
        let mut n = 0;
        assert!(!call!(self, devices(&mut n)), "all plugin contexts are finalized");
    }
}

fn fuzz(plugin: &Arc<Plugin>, seed: u64, calls: usize, threads: usize) {
    let table = plugin.raw_table().expect("a v14 table");
    let (pool, memory) = (Mutex::default(), device_memory(1 << 16));
    let caller = |seed: u64| Caller {
        table: &table,
        random: Random::new(seed),
        pool: &pool,
        memory: &memory,
        waits_left: 1,
        seed,
        calls: 0,
    };
    // The plugin has no logger before the first init.
    let (mut first, mut ctx) = (caller(seed), null_mut());
    assert!(call!(first, init(&mut ctx, 0, logger())) && call!(first, finalize(ctx)));
    std::thread::scope(|scope| {
        for t in 0..threads as u64 {
            let mut caller = caller(seed + (t << 32));
            scope.spawn(move || (0..calls).for_each(|_| caller.step()));
        }
    });
    caller(seed).end();
    let tally = std::mem::take(&mut pool.lock().expect("a pool").tally);
    println!("{}seed {seed}, threads: {threads}: {tally:?}", REPORT);
    // Each function must fail and succeed at least once, which a short run may not reach.
    let enough = tally.values().map(|(all, _)| all).sum::<usize>() >= 3000;
    let covered = tally.len() == 16 && tally.values().all(|(all, good)| (1..*all).contains(good));
    assert!(covered || !enough, "seed {seed}: {tally:?}");
}

#[test]
fn random_calls_succeed_or_fail_with_one_warning() {
    alone("random_calls_succeed_or_fail_with_one_warning", &[("FERROGIN_TIMEOUT", "1")], |plugin| {
        let (seed, calls) =
            (repetitions("FERROGIN_FUZZ_SEED", 1, 1), repetitions("FERROGIN_FUZZ_CALLS", 3000, 10_000) as usize);
        for seed in seed..seed + 3 {
            fuzz(&plugin, seed, calls, 1);
        }
    });
}

#[test]
fn random_calls_of_threads_succeed_or_fail_with_one_warning() {
    alone("random_calls_of_threads_succeed_or_fail_with_one_warning", &[("FERROGIN_TIMEOUT", "1")], |plugin| {
        let (seed, calls) =
            (repetitions("FERROGIN_FUZZ_SEED", 1, 1), repetitions("FERROGIN_FUZZ_CALLS", 3000, 10_000) as usize);
        for (seed, threads) in [(seed, 2), (seed + 1, 2), (seed + 2, 4)] {
            fuzz(&plugin, seed, calls / threads, threads);
        }
    });
}

#[test]
fn windows_of_another_rank_are_refused() {
    alone("windows_of_another_rank_are_refused", &[("FERROGIN_TIMEOUT", "120")], |plugin| {
        let table = plugin.raw_table().expect("a v14 table");
        let (pool, memory, barrier) = (Mutex::default(), device_memory(1 << 16), Barrier::new(2));
        let (listening, windows) = (Mutex::new([[0u8; HANDLE_MAXSIZE]; 2]), Mutex::new([0usize; 2]));
        std::thread::scope(|scope| {
            for rank in 0..2usize {
                let (table, pool, memory, barrier) = (&table, &pool, &memory, &barrier);
                let (listening, windows) = (&listening, &windows);
                scope.spawn(move || {
                    let (random, waits_left, seed, calls) = (Random::new(1), 0, 0, 0);
                    let mut caller = Caller { table, random, pool, memory, waits_left, seed, calls };
                    let (mut ctx, mut listen, mut coll) = (null_mut(), null_mut(), null_mut());
                    assert!(call!(caller, init(&mut ctx, 0, logger())));
                    let mut handle = [0u8; HANDLE_MAXSIZE];
                    assert!(call!(caller, listen(ctx, 0, handle.as_mut_ptr().cast(), &mut listen)));
                    listening.lock().expect("handles")[rank] = handle;
                    barrier.wait();
                    let mut all = *listening.lock().expect("handles");
                    let mut list: Vec<*mut c_void> = all.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
                    let (other, own) = (1 - rank as c_int, rank as c_int);
                    assert!(!call!(caller, connect(ctx, list.as_mut_ptr(), 2, 2, listen, &mut coll)));
                    assert!(call!(caller, connect(ctx, list.as_mut_ptr(), 2, own, listen, &mut coll)));
                    let (mut mhandle, mut window) = (null_mut(), null_mut());
                    let (m, w) = (&raw mut mhandle, &raw mut window);
                    assert!(call!(caller, reg_mr_sym(coll, memory.as_ptr(), 4096, memory.kind(), 0, m, w)));
                    windows.lock().expect("windows")[rank] = mhandle as usize;
                    barrier.wait();
                    let foreign = windows.lock().expect("windows")[other as usize] as *mut c_void;
                    assert!(!call!(caller, dereg_mr_sym(coll, foreign)), "a window of rank {other}");
                    barrier.wait();
                    assert!(call!(caller, dereg_mr_sym(coll, mhandle)));
                    assert!(call!(caller, close_coll(coll)));
                    assert!(call!(caller, close_listen(listen)));
                    assert!(call!(caller, finalize(ctx)));
                });
            }
        });
    });
}
