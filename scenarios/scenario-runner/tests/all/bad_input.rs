//! Invalid settings and arguments: each causes an error and a WARN line with cause and fix, and nothing hangs or
//! crashes.

use crate::common::{child, dist, must_pass, not_over_efa, over_efa, report, role, scenarios};
use ferrogin_ffi::nccl::{self, GinConfigV14, GinV14};
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::launch::{Job, Outcome};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Plugin};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

/// Asserts that each rank exits with an error, and that some WARN line has all `words`, if there are any.
fn must_fail(job: Job, words: &[&str]) -> Outcome {
    let outcome = job.run().expect("the job starts");
    let text = report(&outcome);
    for (rank, status) in outcome.statuses.iter().enumerate() {
        let code = status.and_then(|status| status.code());
        assert_eq!(code, Some(1), "rank {rank} should end with an error: {text}");
    }
    let warn = outcome
        .lines
        .iter()
        .any(|line| line.text.contains("NCCL WARN") && words.iter().all(|word| line.text.contains(word)));
    assert!(words.is_empty() || warn, "no WARN with {words:?}: {text}");
    assert!(!text.contains("panicked"), "{text}");
    outcome
}

#[test]
fn invalid_settings_are_refused() {
    let Some(dist) = dist("invalid_settings_are_refused") else { return };
    for (name, value, fix) in [
        ("FERROGIN_PROVIDER", "efb", "softefa"),
        ("FERROGIN_DEVICE", "gpu", "cuda"),
        ("FERROGIN_POST", "now", "combining"),
        ("FERROGIN_SIGNALS", "strong", "emulated"),
        ("FERROGIN_TIMEOUT", "soon", "seconds"),
        ("FERROGIN_METRICS", "/nonexistent/{pid}.prom", "cannot be written"),
        ("FERROGIN_METRICS", "m-{rnk}.prom", "{rnk} is not a placeholder: use {rank} or {pid}"),
        ("FERROGIN_WAIT_TIMEOUT", "never", "or 0 for no limit"),
        ("FERROGIN_METRICS_INTERVAL", "0", "from 1 to 60"),
    ] {
        must_fail(scenarios(&dist, 2).env(name, value).args(["--only", "value-poll"]), &[name, value, fix]);
    }
    // The card cannot write to NCCL's log: the plugin names the setting there, and the card its valid values on
    // standard error.
    for (name, value, fix) in [
        ("SOFTEFA_WIRE", "pigeon", "must be shm or tcp"),
        ("SOFTEFA_FAULTS", "gremlins=1", "reorder"),
        ("SOFTEFA_NICS", "none", "1 to 64"),
    ] {
        let job = scenarios(&dist, 2).env(name, value).args(["--only", "value-poll"]);
        // libfabric's own provider doesn't tell the plugin why it has no card.
        let words: &[&str] = if over_efa() { &["fi_info -p efa"] } else { &[name, value, "check or unset"] };
        let outcome = must_fail(job, words);
        let reported = outcome.lines.iter().any(|line| line.text.starts_with("softefa") && line.text.contains(fix));
        assert!(reported, "the card does not report {fix}: {}", report(&outcome));
    }
}

#[test]
fn missing_card_is_reported() {
    let name = "missing_card_is_reported";
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "these jobs have a card") {
        return;
    }
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut cards| cards.next().is_some()) {
        ferrogin_test_support::skip(name, "this machine has RDMA cards");
        return;
    }
    must_fail(scenarios(&dist, 2).env("FERROGIN_PROVIDER", "efa"), &["efa", "FERROGIN_PROVIDER=softefa"]);
}

#[test]
fn missing_libfabric_is_reported() {
    let Some(dist) = dist("missing_libfabric_is_reported") else { return };
    let missing = "/nonexistent/libfabric.so.1";
    must_fail(scenarios(&dist, 2).env("FERROGIN_LIBFABRIC", missing), &[missing, "libfabric1"]);
    // A library other than libfabric.
    must_fail(scenarios(&dist, 2).env("FERROGIN_LIBFABRIC", "libm.so.6"), &["libm.so.6", "FERROGIN_LIBFABRIC"]);
}

#[test]
fn unknown_backend_versions_are_refused() {
    let Some(dist) = dist("unknown_backend_versions_are_refused") else { return };
    for version in ["99", "3", "-1"] {
        let job = scenarios(&dist, 2).arg(format!("--backend-version={version}"));
        must_fail(job, &["backendVersion", version]);
    }
}

#[test]
#[ignore = "make check"]
fn rank_killed_in_connect_is_named() {
    let name = "rank_killed_in_connect_is_named";
    match role().as_deref() {
        Some(_) if std::env::var("FERROGIN_RANK").as_deref() == Ok("1") => exit_in_connect(),
        Some(_) => {
            let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").unwrap()).unwrap();
            let bootstrap = Bootstrap::from_env(HANG_LIMIT).unwrap();
            let error = Comm::init(&plugin, Arc::new(bootstrap), 0).map(drop).unwrap_err();
            assert!(error.to_string().contains("connect failed"), "{error}");
            assert!(mini_nccl::log::take().iter().any(|line| line.is_warn() && line.text.contains("rank 1")));
            println!("rank 0 named rank 1");
        }
        None => {
            let Some(dist) = dist(name) else { return };
            let outcome = child(&dist, name, "rank", 2).env("FERROGIN_TIMEOUT", "20").run().unwrap();
            assert!(outcome.text().contains("rank 0 named rank 1"), "{}", report(&outcome));
        }
    }
}

/// Calls the plugin as `Comm::init` does, until the handles have been exchanged, then exits.
#[allow(unsafe_code)]
fn exit_in_connect() -> ! {
    let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").unwrap()).unwrap();
    let bootstrap = Bootstrap::from_env(HANG_LIMIT).unwrap();
    let table = plugin.raw_table().unwrap();
    let (mut ctx, mut listen, mut handle) = (null_mut(), null_mut(), [0u8; nccl::HANDLE_MAXSIZE]);
    // SAFETY: the plugin writes one value to a local variable.
    assert_eq!(unsafe { table.init.unwrap()(&mut ctx, 1, None) }, nccl::SUCCESS);
    bootstrap.allgather(&nccl::NET_DEVICE_GIN_EFA_GDA.to_le_bytes()).unwrap();
    // SAFETY: `init` returned `ctx`. The plugin writes a handle and a pointer to local variables.
    assert_eq!(unsafe { table.listen.unwrap()(ctx, 0, handle.as_mut_ptr().cast(), &mut listen) }, nccl::SUCCESS);
    bootstrap.allgather(&handle).unwrap();
    std::process::exit(0);
}

#[test]
fn invalid_arguments_are_refused() {
    let name = "invalid_arguments_are_refused";
    if role().is_some() {
        return pass_invalid_arguments();
    }
    let Some(dist) = dist(name) else { return };
    let outcome = child(&dist, name, "caller", 1).run().unwrap();
    must_pass(&outcome);
}

/// Asserts that a call is refused.
macro_rules! refused {
    ($table:ident . $entry:ident ( $($arg:expr),* )) => {{
        // SAFETY: every pointer is NULL or valid, and the test shows that the plugin checks all other arguments.
        let code = unsafe { $table.$entry.unwrap()($($arg),*) };
        assert_ne!(code, nccl::SUCCESS, "{}({}) was accepted", stringify!($entry), stringify!($($arg),*));
    }};
}

#[allow(unsafe_code)]
fn pass_invalid_arguments() {
    let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").unwrap()).unwrap();
    let t: GinV14 = plugin.raw_table().unwrap();
    let bogus = 0xdead_0000usize as *mut c_void;
    let (mut out, mut out2, mut number, mut flag) = (null_mut(), null_mut(), 0, 0u8);
    let mut dev = null_mut();
    let mut handle = [0u8; nccl::HANDLE_MAXSIZE];
    let mut config = GinConfigV14 { n_signals: 1, n_contexts: 1, ..GinConfigV14::default() };

    refused!(t.init(null_mut(), 1, None));
    refused!(t.devices(null_mut()));
    refused!(t.get_gin_properties(null_mut()));
    refused!(t.get_properties(0, null_mut()));
    refused!(t.listen(null_mut(), 0, handle.as_mut_ptr().cast(), &mut out));
    refused!(t.connect(null_mut(), null_mut(), 1, 0, null_mut(), &mut out));
    refused!(t.create_context(null_mut(), &mut config, &mut out, &mut dev));
    refused!(t.reg_mr_sym(null_mut(), null_mut(), 8, nccl::PTR_HOST, 0, &mut out, &mut out2));
    refused!(t.dereg_mr_sym(null_mut(), null_mut()));
    refused!(t.query_last_error(null_mut(), &mut flag));
    refused!(t.listen(bogus, 0, handle.as_mut_ptr().cast(), &mut out));
    refused!(t.create_context(bogus, &mut config, &mut out, &mut dev));

    let mut ctx = null_mut();
    // SAFETY: the plugin writes one value to a local variable.
    assert_eq!(unsafe { t.init.unwrap()(&mut ctx, 1, None) }, nccl::SUCCESS);
    // SAFETY: the plugin writes one value to a local variable.
    assert_eq!(unsafe { t.devices.unwrap()(&mut number) }, nccl::SUCCESS);
    let mut properties = std::mem::MaybeUninit::zeroed();
    refused!(t.get_properties(-1, properties.as_mut_ptr()));
    refused!(t.get_properties(number, properties.as_mut_ptr()));
    refused!(t.listen(ctx, -1, handle.as_mut_ptr().cast(), &mut out));
    refused!(t.listen(ctx, 0, null_mut(), &mut out));
    refused!(t.listen(ctx, 0, handle.as_mut_ptr().cast(), null_mut()));
    // SAFETY: `init` returned `ctx`, and this is its only close.
    assert_eq!(unsafe { t.finalize.unwrap()(ctx) }, nccl::SUCCESS);

    let comm = Comm::init(&plugin, Arc::new(Bootstrap::single()), 0).unwrap();
    for broken in [
        GinConfigV14 { n_signals: -1, ..config },
        GinConfigV14 { n_counters: -1, ..config },
        GinConfigV14 { n_contexts: -1, ..config },
        GinConfigV14 { queue_depth: -1, ..config },
        GinConfigV14 { backend_version: 99, ..config },
        GinConfigV14 { n_signals: i32::MAX, ..config },
    ] {
        let error = comm.create_context(&broken).map(drop).unwrap_err();
        assert!(error.to_string().contains("createContext failed"), "{error}");
    }
    let memory = Arc::new(DeviceMemory::alloc(4096).unwrap());
    let window = comm.register(&memory, 0).unwrap();
    let twice = comm.register(&memory, 0).unwrap();
    twice.deregister().unwrap();
    window.deregister().unwrap();
    // closeColl closes the abandoned context.
    comm.create_context(&config).unwrap().abandon();
    comm.close().unwrap();
    assert!(!mini_nccl::log::take().is_empty());
}
