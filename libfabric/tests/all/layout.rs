//! Compares the EFA provider's structs with a C++ compiler's layouts (group "libfabric EFA extension"). A struct, field
//! or constant that only one side has fails the test. `FERROGIN_VECTORS` overrides the directory.

use std::collections::BTreeMap;
use std::mem::{align_of, offset_of, size_of};

use ferrogin_libfabric::bindings::{self, *};
use ferrogin_test_support::vectors;
use serde_json::Value;

/// Size, alignment, and every field's offset.
type Layout = (usize, usize, BTreeMap<String, usize>);

macro_rules! layout {
    ($type:ident { $($($field:ident).+),* $(,)? }) => {{
        let mut fields = BTreeMap::new();
        $(
            // bindgen writes `type_` for a field whose C name is a Rust keyword.
            let name = stringify!($($field).+).replace(' ', "");
            let name = name.strip_suffix('_').unwrap_or(&name).to_owned();
            fields.insert(name, offset_of!($type, $($field).+));
        )*
        (stringify!($type).to_owned(), (size_of::<$type>(), align_of::<$type>(), fields))
    }};
}

fn ours() -> BTreeMap<String, Layout> {
    BTreeMap::from([
        layout!(fi_efa_mr_attr { ic_id_validity, recv_ic_id, rdma_read_ic_id, rdma_recv_ic_id }),
        layout!(fi_efa_wq_attr { buffer, entry_size, num_entries, doorbell, max_batch, caps }),
        layout!(fi_efa_cq_attr { buffer, entry_size, num_entries }),
        layout!(fi_efa_cq_init_attr {
            flags,
            ext_mem_dmabuf,
            ext_mem_dmabuf.buffer,
            ext_mem_dmabuf.length,
            ext_mem_dmabuf.offset,
            ext_mem_dmabuf.fd,
        }),
        layout!(fi_efa_memory_location {
            ptr,
            dmabuf,
            dmabuf.offset,
            dmabuf.fd,
            dmabuf.reserved,
            type_,
            reserved,
        }),
        layout!(fi_efa_comp_cntr_init_attr { comp_mask, flags, reserved, comp_cntr_ext_mem, err_cntr_ext_mem }),
        layout!(fi_efa_ops_domain { query_mr }),
        layout!(fi_efa_ops_gda { query_addr, query_qp_wqs, query_cq, cq_open_ext, get_mr_lkey, cntr_open_ext }),
        layout!(fi_efa_feature_ops { query }),
    ])
}

fn our_constants() -> BTreeMap<String, u64> {
    macro_rules! constants {
        ($($name:ident),* $(,)?) => { BTreeMap::from([$((stringify!($name).to_owned(), bindings::$name as u64)),*]) };
    }
    constants![
        FI_EFA_MR_ATTR_RECV_IC_ID,
        FI_EFA_MR_ATTR_RDMA_READ_IC_ID,
        FI_EFA_MR_ATTR_RDMA_RECV_IC_ID,
        FI_EFA_CQ_INIT_FLAGS_EXT_MEM_DMABUF,
        FI_EFA_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM,
        FI_EFA_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM,
        FI_EFA_WR_HIGH_PPS,
    ]
}

fn group() -> Value {
    let all = vectors::file("efa_layout.json");
    let groups = all["groups"].as_array().unwrap();
    groups.iter().find(|group| group["name"] == "libfabric EFA extension").unwrap().clone()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

#[test]
fn structs_match_header_layouts() {
    let theirs: BTreeMap<String, Layout> = group()["structs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| {
            let fields = entry["fields"].as_array().unwrap().iter();
            let fields =
                fields.map(|field| (field["name"].as_str().unwrap().to_owned(), number(&field["offset"]))).collect();
            let name = entry["name"].as_str().unwrap().to_owned();
            (name, (number(&entry["size"]), number(&entry["align"]), fields))
        })
        .collect();
    assert_eq!(ours(), theirs);
}

#[test]
fn constants_match_header() {
    let group = group();
    let theirs = group["constants"].as_object().unwrap();
    let theirs: BTreeMap<String, u64> =
        theirs.iter().map(|(name, value)| (name.clone(), value.as_u64().unwrap())).collect();
    assert_eq!(our_constants(), theirs);

    let enums = [
        ("FI_EFA_WQ_CAPS_64_BIT_REQ_ID", fi_efa_wq_caps::FI_EFA_WQ_CAPS_64_BIT_REQ_ID),
        ("FI_EFA_MEMORY_LOCATION_VA", fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_VA),
        ("FI_EFA_MEMORY_LOCATION_DMABUF", fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_DMABUF),
    ];
    let mut theirs = BTreeMap::new();
    for entry in group["enums"].as_array().unwrap() {
        for (name, value) in entry["values"].as_object().unwrap() {
            theirs.insert(name.clone(), value.as_u64().unwrap());
        }
    }
    assert_eq!(BTreeMap::from(enums.map(|(name, value)| (name.to_owned(), u64::from(value)))), theirs);
}
