//! Compares this crate's Rust types with `tests/vectors/efa_layout.json`, generated from the foreign headers by a C++
//! compiler: size, alignment, and every field's offset, size and C type; then the constants.
//!
//! A field that only one side has fails the test: one in the file that no line here names, a line here that the file
//! lacks, and (at compile time) a Rust field that no line here names. `FERROGIN_VECTORS` overrides the directory.

use ferrogin_ffi::{device, nccl};
use ferrogin_test_support::vectors;
use serde_json::Value;
use std::any::type_name;

/// A field, as Rust sees it.
struct Field {
    c_name: &'static str,
    offset: usize,
    size: usize,
    rust_type: &'static str,
}

/// A struct, as Rust sees it.
struct Struct {
    c_name: &'static str,
    size: usize,
    align: usize,
    fields: Vec<Field>,
}

/// Returns a field's size and type, given an accessor that is never called.
fn field_of<S, F>(_: fn(&S) -> &F) -> (usize, &'static str) {
    (size_of::<F>(), type_name::<F>())
}

/// `layout!(RustType = "c_type" { rust_field = "cField", ... })`; an incomplete field list doesn't compile.
macro_rules! layout {
    ($module:ident :: $ty:ident = $c:literal { $($field:ident = $c_field:literal),* $(,)? }) => {{
        let _complete = |value: &$module::$ty| {
            let $module::$ty { $($field: _),* } = value;
        };
        Struct {
            c_name: $c,
            size: size_of::<$module::$ty>(),
            align: align_of::<$module::$ty>(),
            fields: vec![$({
                let (size, rust_type) = field_of(|s: &$module::$ty| &s.$field);
                Field { c_name: $c_field, offset: core::mem::offset_of!($module::$ty, $field), size, rust_type }
            }),*],
        }
    }};
}

fn device_structs() -> Vec<Struct> {
    vec![
        layout!(device::EndpointHandle = "nccl_ofi_gin_gdaki_dev_endpoint_handle" {
            qp = "qp", cq = "cq", target_address_handles = "target_address_handles",
            target_remote_qpns = "target_remote_qpns", target_qkey = "target_qkey", sq_lock = "sq_lock",
            local_cntr_value = "local_cntr_value", submitted_count = "submitted_count", sq_size = "sq_size",
            putvalue_pad = "putvalue_pad", putvalue_slice_base = "putvalue_slice_base",
        }),
        layout!(device::CounterHandle = "nccl_ofi_gin_gdaki_dev_counter_handle" {
            base = "base", cntr_value = "cntr_value", cntr_offset = "cntr_offset",
        }),
        layout!(device::DevHandle = "nccl_ofi_gin_gdaki_dev_handle" {
            data = "data", pvdata = "pvdata", counter_handles = "counter_handles", signal_handles = "signal_handles",
            n_counters = "nCounters", n_signals = "nSignals", nranks = "nranks", rank = "rank", rail_id = "rail_id",
            scratch_lkey = "scratch_lkey", scratch_pad = "scratch_pad", scratch_local_addr = "scratch_local_addr",
            scratch_remote_addrs = "scratch_remote_addrs", scratch_remote_rkeys = "scratch_remote_rkeys",
            putvalue_lkey = "putvalue_lkey", putvalue_slot_size = "putvalue_slot_size",
        }),
        layout!(device::MrPeer = "nccl_ofi_gin_gdaki_mr_peer" {
            remote_addr = "remote_addr", rkey = "rkey", pad = "pad",
        }),
        layout!(device::MrHandle = "nccl_ofi_gin_gdaki_mr_handle" {
            lkey = "lkey", nranks = "nranks", local_addr = "local_addr", peers = "peers",
        }),
    ]
}

/// Structs that NCCL's example plugin headers also have.
fn common_plugin_structs() -> Vec<Struct> {
    vec![
        layout!(nccl::NetVDevicePropsV12 = "ncclNetVDeviceProps_v12_t" { ndevs = "ndevs", devs = "devs" }),
        layout!(nccl::NetPropertiesV12 = "ncclNetProperties_v12_t" {
            name = "name", pci_path = "pciPath", guid = "guid", ptr_support = "ptrSupport",
            reg_is_global = "regIsGlobal", force_flush = "forceFlush", speed = "speed", port = "port",
            latency = "latency", max_comms = "maxComms", max_recvs = "maxRecvs", net_device_type = "netDeviceType",
            net_device_version = "netDeviceVersion", v_props = "vProps", max_p2p_bytes = "maxP2pBytes",
            max_coll_bytes = "maxCollBytes", max_multi_request_size = "maxMultiRequestSize", rail_id = "railId",
            plane_id = "planeId",
        }),
        layout!(nccl::NetDeviceHandleV11 = "ncclNetDeviceHandle_v11_t" {
            net_device_type = "netDeviceType", net_device_version = "netDeviceVersion", handle = "handle",
            size = "size", needs_proxy_progress = "needsProxyProgress",
        }),
        layout!(nccl::GinConfigV13 = "ncclGinConfig_v13_t" {
            n_signals = "nSignals", n_counters = "nCounters", n_contexts = "nContexts", queue_depth = "queueDepth",
            traffic_class = "trafficClass",
        }),
        layout!(nccl::GinV13 = "ncclGin_v13_t" {
            name = "name", init = "init", devices = "devices", get_properties = "getProperties", listen = "listen",
            connect = "connect", create_context = "createContext", reg_mr_sym = "regMrSym",
            reg_mr_sym_dma_buf = "regMrSymDmaBuf", dereg_mr_sym = "deregMrSym", destroy_context = "destroyContext",
            close_coll = "closeColl", close_listen = "closeListen", iput = "iput", iput_signal = "iputSignal",
            iget = "iget", iflush = "iflush", test = "test", gin_progress = "ginProgress",
            query_last_error = "queryLastError", finalize = "finalize",
        }),
    ]
}

fn v14_structs() -> Vec<Struct> {
    vec![
        layout!(nccl::GinPropertiesV14 = "ncclGinProperties_v14_t" {
            supports_strong_signals = "supportsStrongSignals", supports_va_signals = "supportsVASignals",
        }),
        layout!(nccl::GinConfigV14 = "ncclGinConfig_v14_t" {
            n_signals = "nSignals", n_counters = "nCounters", n_contexts = "nContexts", queue_depth = "queueDepth",
            traffic_class = "trafficClass", backend_version = "backendVersion", rank_stride = "rankStride",
        }),
        layout!(nccl::GinV14 = "ncclGin_v14_t" {
            name = "name", init = "init", devices = "devices", get_gin_properties = "getGinProperties",
            get_properties = "getProperties", listen = "listen", connect = "connect",
            create_context = "createContext", reg_mr_sym = "regMrSym", reg_mr_sym_dma_buf = "regMrSymDmaBuf",
            dereg_mr_sym = "deregMrSym", destroy_context = "destroyContext", close_coll = "closeColl",
            close_listen = "closeListen", gin_progress = "ginProgress", query_last_error = "queryLastError",
            finalize = "finalize",
        }),
    ]
}

/// Returns the Rust name of a foreign type, as this crate spells it.
fn rust_name_of(c_type: &str) -> Option<&'static str> {
    Some(match c_type {
        "nccl_ofi_gin_gdaki_dev_endpoint_handle" => type_name::<device::EndpointHandle>(),
        "nccl_ofi_gin_gdaki_dev_counter_handle" => type_name::<device::CounterHandle>(),
        "nccl_ofi_gin_gdaki_mr_peer" => type_name::<device::MrPeer>(),
        "ncclNetVDeviceProps_v12_t" => type_name::<nccl::NetVDevicePropsV12>(),
        "ncclNetProperties_v12_t" => type_name::<nccl::NetPropertiesV12>(),
        "ncclNetDeviceHandle_v11_t" => type_name::<nccl::NetDeviceHandleV11>(),
        "ncclGinProperties_v14_t" => type_name::<nccl::GinPropertiesV14>(),
        "ncclGinConfig_v13_t" => type_name::<nccl::GinConfigV13>(),
        "ncclGinConfig_v14_t" => type_name::<nccl::GinConfigV14>(),
        "ncclDebugLogger_t" => type_name::<nccl::DebugLogger>(),
        "ncclNetDeviceType" | "ncclResult_t" | "int" | "int32_t" => "i32",
        "int16_t" => "i16",
        "uint16_t" => "u16",
        "uint32_t" => "u32",
        "uint64_t" => "u64",
        "size_t" => "usize",
        "float" => "f32",
        "bool" => "u8",
        "char" => type_name::<core::ffi::c_char>(),
        "void" => type_name::<core::ffi::c_void>(),
        _ => return None,
    })
}

/// Spells a C type from the file in Rust. Both sides drop `const`, which the file has only where the header does.
fn rust_type_of(c_type: &str, count: Option<u64>) -> String {
    if let Some((result, args)) = c_type.split_once("(*)(") {
        let args = args.strip_suffix(')').unwrap_or_else(|| panic!("unknown C type {c_type:?}"));
        let args: Vec<String> = args.split(", ").map(|arg| rust_type_of(arg, None)).collect();
        let result = rust_type_of(result, None);
        return format!("core::option::Option<unsafe extern \"C\" fn({}) -> {result}>", args.join(", "));
    }
    if let Some(element) = c_type.strip_suffix("[]") {
        let count = count.unwrap_or_else(|| panic!("array {c_type:?} without a count"));
        return format!("[{}; {count}]", rust_type_of(element, None));
    }
    let base = c_type.trim().trim_start_matches("const ");
    let stars = base.matches('*').count();
    let name = base.trim_end_matches(['*', ' ']);
    let name = rust_name_of(name).unwrap_or_else(|| panic!("unknown C type {c_type:?}: say here what it is in Rust"));
    format!("{}{name}", "*mut ".repeat(stars))
}

fn normalised(rust_type: &str) -> String {
    rust_type.replace("*const ", "*mut ")
}

fn layouts() -> Value {
    let file = vectors::file("efa_layout.json");
    assert_eq!(file["schema"], "efa_layout/1", "another schema than this test reads");
    file
}

fn group<'a>(file: &'a Value, name: &str) -> &'a Value {
    let groups = file["groups"].as_array().expect("groups is a list");
    groups.iter().find(|g| g["name"] == name).unwrap_or_else(|| panic!("the vectors have no group {name:?}"))
}

fn number(value: &Value, what: &str) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{what}: {value} is not a number")) as usize
}

/// Returns the differences between a struct and the file's, one per line.
fn differences(group: &Value, ours: &Struct) -> Vec<String> {
    let group_name = group["name"].as_str().unwrap_or_default();
    let at = |what: &str| format!("{group_name}: {}{what}", ours.c_name);
    let structs = group["structs"].as_array().expect("structs is a list");
    let Some(foreign) = structs.iter().find(|s| s["name"] == ours.c_name) else {
        return vec![at(": not in the vectors")];
    };
    let mut found = Vec::new();
    let mut compare = |what: String, ours: usize, foreign: usize| {
        if ours != foreign {
            found.push(format!("{what}: {ours} here, {foreign} in the foreign header"));
        }
    };
    compare(at(" size"), ours.size, number(&foreign["size"], "size"));
    compare(at(" align"), ours.align, number(&foreign["align"], "align"));
    let fields = foreign["fields"].as_array().expect("fields is a list");
    for field in fields {
        let name = field["name"].as_str().expect("a field has a name");
        let Some(mine) = ours.fields.iter().find(|f| f.c_name == name) else {
            continue;
        };
        compare(at(&format!(".{name} offset")), mine.offset, number(&field["offset"], "offset"));
        compare(at(&format!(".{name} size")), mine.size, number(&field["size"], "size"));
    }
    for field in fields {
        let name = field["name"].as_str().expect("a field has a name");
        match ours.fields.iter().find(|f| f.c_name == name) {
            None => found.push(at(&format!(".{name}: a field that the Rust type lacks"))),
            // v13's host-side data path is declared without arguments, since it's always null.
            Some(mine) if mine.rust_type == type_name::<nccl::UnusedFn>() => {}
            Some(mine) => {
                let c_type = field["type"].as_str().expect("a field has a type");
                let expected = normalised(&rust_type_of(c_type, field["count"].as_u64()));
                if normalised(mine.rust_type) != expected {
                    let here = mine.rust_type;
                    found.push(at(&format!(".{name}: {here} here, {c_type} ({expected}) in the foreign header")));
                }
            }
        }
    }
    for mine in &ours.fields {
        if !fields.iter().any(|f| f["name"] == mine.c_name) {
            found.push(at(&format!(".{}: a field that the foreign struct lacks", mine.c_name)));
        }
    }
    found
}

fn assert_group(file: &Value, name: &str, structs: &[Struct]) {
    let group = group(file, name);
    let found: Vec<String> = structs.iter().flat_map(|s| differences(group, s)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn device_handles_match_vectors_of_both_releases() {
    let file = layouts();
    for release in ["GIN EFA device handle, NCCL 2.31.2", "GIN EFA device handle, NCCL 2.32.3"] {
        let ours = device_structs();
        let listed = group(&file, release)["structs"].as_array().expect("structs is a list").len();
        assert_eq!(listed, ours.len(), "{release}: the vectors list {listed} structs, this test {}", ours.len());
        assert_group(&file, release, &ours);
    }
}

#[test]
fn plugin_api_matches_vectors() {
    let file = layouts();
    let aws = "NCCL plugin API, aws-ofi-nccl headers";
    assert_group(&file, aws, &common_plugin_structs());
    assert_group(&file, aws, &v14_structs());
    assert_group(&file, "NCCL plugin API, NCCL example headers", &common_plugin_structs());
}

#[test]
fn every_gin_struct_of_v13_and_v14_is_covered() {
    let file = layouts();
    let ours: Vec<&str> = common_plugin_structs().iter().chain(&v14_structs()).map(|s| s.c_name).collect();
    for s in group(&file, "NCCL plugin API, aws-ofi-nccl headers")["structs"].as_array().expect("a list") {
        let name = s["name"].as_str().expect("a struct has a name");
        if name.starts_with("ncclGin") {
            assert!(ours.contains(&name), "{name} is in the vectors and not in this test");
        }
    }
}

#[test]
fn constants_match_vectors() {
    let file = layouts();
    let number_of = |group_name: &str, kind: &str, name: &str| -> i64 {
        let group = group(&file, group_name);
        let value = match kind {
            "" => &group["constants"][name],
            kind => {
                let enums = group["enums"].as_array().expect("enums is a list");
                let found = enums.iter().find(|e| e["name"] == kind);
                &found.unwrap_or_else(|| panic!("{group_name} has no enum {kind}"))["values"][name]
            }
        };
        value.as_i64().unwrap_or_else(|| panic!("{group_name} has no {kind} {name}"))
    };
    let aws = "NCCL plugin API, aws-ofi-nccl headers";
    let example = "NCCL plugin API, NCCL example headers";
    let device_32 = "GIN device enums, NCCL 2.32.3";
    let device_31 = "GIN device enums, NCCL 2.31.2";
    let expected: &[(&str, &str, &str, i64)] = &[
        (aws, "ncclResult_t", "ncclSuccess", nccl::SUCCESS.into()),
        (aws, "ncclResult_t", "ncclUnhandledCudaError", nccl::UNHANDLED_CUDA_ERROR.into()),
        (aws, "ncclResult_t", "ncclSystemError", nccl::SYSTEM_ERROR.into()),
        (aws, "ncclResult_t", "ncclInternalError", nccl::INTERNAL_ERROR.into()),
        (aws, "ncclResult_t", "ncclInvalidArgument", nccl::INVALID_ARGUMENT.into()),
        (aws, "ncclResult_t", "ncclInvalidUsage", nccl::INVALID_USAGE.into()),
        (aws, "ncclResult_t", "ncclRemoteError", nccl::REMOTE_ERROR.into()),
        (aws, "ncclDebugLogLevel", "NCCL_LOG_WARN", nccl::LOG_WARN.into()),
        (aws, "ncclDebugLogLevel", "NCCL_LOG_INFO", nccl::LOG_INFO.into()),
        (aws, "ncclDebugLogLevel", "NCCL_LOG_TRACE", nccl::LOG_TRACE.into()),
        (aws, "", "NCCL_PTR_HOST", nccl::PTR_HOST.into()),
        (aws, "", "NCCL_PTR_CUDA", nccl::PTR_CUDA.into()),
        (aws, "", "NCCL_PTR_DMABUF", nccl::PTR_DMABUF.into()),
        (aws, "", "NCCL_NET_HANDLE_MAXSIZE", nccl::HANDLE_MAXSIZE as i64),
        (example, "", "NCCL_GIN_HANDLE_MAXSIZE", nccl::HANDLE_MAXSIZE as i64),
        (aws, "", "NCCL_NET_MR_FLAG_FORCE_SO", nccl::MR_FLAG_FORCE_SO as i64),
        (aws, "", "NCCL_GIN_MAX_CONNECTIONS", nccl::GIN_MAX_CONNECTIONS as i64),
        (device_31, "", "NCCL_GIN_MAX_CONNECTIONS", nccl::GIN_MAX_CONNECTIONS as i64),
        (device_32, "", "NCCL_GIN_MAX_CONNECTIONS", nccl::GIN_MAX_CONNECTIONS as i64),
        (aws, "", "NCCL_NET_MAX_DEVS_PER_NIC_V12", nccl::NET_MAX_DEVS_PER_NIC_V12 as i64),
        (aws, "ncclNetDeviceType", "NCCL_NET_DEVICE_GIN_EFA_GDA", nccl::NET_DEVICE_GIN_EFA_GDA.into()),
        (device_31, "ncclNetDeviceType", "NCCL_NET_DEVICE_GIN_EFA_GDA", nccl::NET_DEVICE_GIN_EFA_GDA.into()),
        (device_32, "ncclNetDeviceType", "NCCL_NET_DEVICE_GIN_EFA_GDA", nccl::NET_DEVICE_GIN_EFA_GDA.into()),
        ("nccl.h, NCCL 2.31.2", "ncclGinType_t", "NCCL_GIN_TYPE_EFA_GDA", nccl::NET_DEVICE_GIN_EFA_GDA.into()),
        ("nccl.h, NCCL 2.32.3", "ncclGinType_t", "NCCL_GIN_TYPE_EFA_GDA", nccl::NET_DEVICE_GIN_EFA_GDA.into()),
    ];
    for &(group, kind, name, ours) in expected {
        assert_eq!(ours, number_of(group, kind, name), "{name} of {group:?}");
    }
}

#[test]
fn wrong_layout_is_found() {
    let file = layouts();
    let group = group(&file, "GIN EFA device handle, NCCL 2.32.3");
    let peer = || device_structs().into_iter().find(|s| s.c_name.ends_with("mr_peer")).expect("listed above");
    assert_eq!(differences(group, &peer()), Vec::<String>::new());

    let mut missing = peer();
    missing.fields.pop();
    assert_eq!(differences(group, &missing).len(), 1, "a field of the foreign struct without a Rust field");
    let mut moved = peer();
    moved.fields[1].offset = 12;
    assert_eq!(differences(group, &moved).len(), 1, "a field at another offset");
    let mut unknown = peer();
    unknown.fields[2].c_name = "padding";
    assert_eq!(differences(group, &unknown).len(), 2, "a field by another name");
    let mut retyped = peer();
    retyped.fields[1].rust_type = "i32";
    assert_eq!(differences(group, &retyped).len(), 1, "a field of another type");
    let mut larger = peer();
    larger.size = 24;
    assert_eq!(differences(group, &larger).len(), 1, "another size");
}
