//! libibverbs symbols that EFA doesn't support. Each fails with `EOPNOTSUPP`, as rdma-core does for EFA, whatever its
//! arguments.
//!
//! So do the old forms from release 1.0, and the private symbols through which rdma-core's own drivers reach the
//! kernel.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::guard::Errno;

extern "C" fn refuse_with_number() -> c_int {
    Errno::UNSUPPORTED.set();
    Errno::UNSUPPORTED.0
}

extern "C" fn refuse_with_descriptor() -> c_int {
    Errno::UNSUPPORTED.set();
    -1
}

extern "C" fn refuse_with_null() -> *mut c_void {
    Errno::UNSUPPORTED.set();
    ptr::null_mut()
}

/// Stands in for functions that return nothing.
extern "C" fn do_nothing() {}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp "
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b "
    };
}

/// Defines symbols that all jump to one function.
macro_rules! symbols {
    ($target:ident: $($name:literal)*) => {
        std::arch::global_asm!(
            $(concat!(".globl ", $name, "\n.type ", $name, ", %function\n", $name, ":\n", jump!(), "{target}\n"),)*
            target = sym $target
        );
    };
}

/// Does the same for the symbol versions that programs built for release 1.0 use.
macro_rules! old_symbols {
    ($target:ident: $($name:literal)*) => {
        std::arch::global_asm!(
            $(concat!(
                ".globl old_", $name, "\n.type old_", $name, ", %function\nold_", $name, ":\n", jump!(), "{target}\n",
                ".symver old_", $name, ", ", $name, "@IBVERBS_1.0\n"
            ),)*
            target = sym $target
        );
    };
}

/// Does the same for the symbols through which rdma-core's own drivers reach the kernel. They all have the number of
/// the release that last changed one of them: 34 (Debian 12 and 13, Ubuntu 24.04), 57, 59 (the EFA installer), 64 or
/// 65. Symbols of later releases have the earlier numbers too, because releases with a number add to it.
macro_rules! private_symbols {
    ($target:path: $($name:literal)*) => {
        std::arch::global_asm!(
            ".irp version, 34, 57, 59, 64, 65",
            concat!(".irp name" $(, ", ", $name)*),
            "private_\\version\\()_\\name:",
            concat!(jump!(), "{target}"),
            ".globl private_\\version\\()_\\name",
            ".type private_\\version\\()_\\name, %function",
            ".symver private_\\version\\()_\\name, \\name@IBVERBS_PRIVATE_\\version",
            ".endr",
            ".endr",
            target = sym $target
        );
    };
}

symbols! { refuse_with_number:
    "ibv_attach_mcast" "ibv_dealloc_dmah" "ibv_destroy_srq" "ibv_detach_mcast" "ibv_init_ah_from_wc" "ibv_modify_srq"
    "ibv_query_ece" "ibv_query_srq" "ibv_rereg_mr" "ibv_resize_cq" "ibv_resolve_eth_l2_from_gid" "ibv_set_ece"
}

symbols! { refuse_with_descriptor:
    "ibv_dm_export_dmabuf_fd" "ibv_export_buf_dmabuf_fd"
}

symbols! { refuse_with_null:
    "ibv_alloc_buf" "ibv_alloc_dmah" "ibv_create_ah_from_wc" "ibv_create_srq" "ibv_import_device" "ibv_import_dm" "ibv_import_mr"
    "ibv_import_pd" "ibv_reg_buf_mr" "ibv_reg_mr_ex"
}

symbols! { do_nothing:
    "ibv_copy_ah_attr_from_kern" "ibv_copy_path_rec_from_kern" "ibv_copy_path_rec_to_kern" "ibv_copy_qp_attr_from_kern"
    "ibv_free_buf" "ibv_register_driver" "ibv_unimport_dm" "ibv_unimport_mr" "ibv_unimport_pd"
}

private_symbols! { refuse_with_number:
    "execute_ioctl" "ibv_cmd_advise_mr" "ibv_cmd_alloc_dm" "ibv_cmd_alloc_dmah" "ibv_cmd_alloc_mw" "ibv_cmd_alloc_pd"
    "ibv_cmd_attach_mcast" "ibv_cmd_close_xrcd" "ibv_cmd_create_ah" "ibv_cmd_create_comp_cntr" "ibv_cmd_create_counters"
    "ibv_cmd_create_cq" "ibv_cmd_create_cq_ex" "ibv_cmd_create_cq_ex2" "ibv_cmd_create_flow" "ibv_cmd_create_flow_action_esp"
    "ibv_cmd_create_qp" "ibv_cmd_create_qp_ex" "ibv_cmd_create_qp_ex2" "ibv_cmd_create_rwq_ind_table" "ibv_cmd_create_srq"
    "ibv_cmd_create_srq_ex" "ibv_cmd_create_wq" "ibv_cmd_dealloc_mw" "ibv_cmd_dealloc_pd" "ibv_cmd_dereg_mr"
    "ibv_cmd_destroy_ah" "ibv_cmd_destroy_comp_cntr" "ibv_cmd_destroy_counters" "ibv_cmd_destroy_cq" "ibv_cmd_destroy_flow"
    "ibv_cmd_destroy_flow_action" "ibv_cmd_destroy_qp" "ibv_cmd_destroy_rwq_ind_table" "ibv_cmd_destroy_srq"
    "ibv_cmd_destroy_wq" "ibv_cmd_detach_mcast" "ibv_cmd_export_dmabuf_fd" "ibv_cmd_free_dm" "ibv_cmd_free_dmah"
    "ibv_cmd_get_context" "ibv_cmd_inc_comp_cntr" "ibv_cmd_inc_err_comp_cntr" "ibv_cmd_modify_cq"
    "ibv_cmd_modify_flow_action_esp" "ibv_cmd_modify_qp" "ibv_cmd_modify_qp_ex" "ibv_cmd_modify_srq" "ibv_cmd_modify_wq"
    "ibv_cmd_open_qp" "ibv_cmd_open_xrcd" "ibv_cmd_poll_cq" "ibv_cmd_post_recv" "ibv_cmd_post_send" "ibv_cmd_post_srq_recv"
    "ibv_cmd_qp_attach_comp_cntr" "ibv_cmd_query_comp_cntr_caps" "ibv_cmd_query_context" "ibv_cmd_query_device_any"
    "ibv_cmd_query_mr" "ibv_cmd_query_port" "ibv_cmd_query_port_speed" "ibv_cmd_query_qp" "ibv_cmd_query_srq"
    "ibv_cmd_read_comp_cntr" "ibv_cmd_read_counters" "ibv_cmd_read_err_comp_cntr" "ibv_cmd_reg_dm_mr" "ibv_cmd_reg_dmabuf_mr"
    "ibv_cmd_reg_mr" "ibv_cmd_reg_mr_ex" "ibv_cmd_req_notify_cq" "ibv_cmd_rereg_mr" "ibv_cmd_resize_cq" "ibv_cmd_set_comp_cntr"
    "ibv_cmd_set_err_comp_cntr" "ibv_dmabuf_heap_cc_shared_init" "ibv_dmabuf_heap_free"
}

private_symbols! { refuse_with_null:
    "_verbs_init_and_alloc_context" "ibv_dmabuf_heap_alloc" "ibv_wr_opcode_str" "verbs_open_device"
}

private_symbols! { do_nothing:
    "__ioctl_final_num_attrs" "__verbs_log" "ibv_dmabuf_heap_destroy" "verbs_init_cq" "verbs_set_ops" "verbs_uninit_context"
}

private_symbols! { crate::context::ibv_query_gid_type: "ibv_query_gid_type" }
private_symbols! { crate::text::ibv_read_ibdev_sysfs_file: "ibv_read_ibdev_sysfs_file" }

old_symbols! { refuse_with_number:
    "ibv_attach_mcast" "ibv_close_device" "ibv_dealloc_pd" "ibv_dereg_mr" "ibv_destroy_ah" "ibv_destroy_cq" "ibv_destroy_qp"
    "ibv_destroy_srq" "ibv_detach_mcast" "ibv_get_async_event" "ibv_get_cq_event" "ibv_modify_qp" "ibv_modify_srq"
    "ibv_query_device" "ibv_query_gid" "ibv_query_pkey" "ibv_query_port" "ibv_query_qp" "ibv_query_srq" "ibv_resize_cq"
}

old_symbols! { refuse_with_null:
    "ibv_alloc_pd" "ibv_create_ah" "ibv_create_cq" "ibv_create_qp" "ibv_create_srq" "ibv_get_device_guid"
    "ibv_get_device_list" "ibv_get_device_name" "ibv_open_device" "ibv_reg_mr"
}

old_symbols! { do_nothing:
    "ibv_ack_async_event" "ibv_ack_cq_events" "ibv_free_device_list"
}

// How a release's drivers register themselves, and a variable that they set.
std::arch::global_asm!(
    ".irp version, 34, 57, 59, 64, 65",
    "private_\\version\\()_register:",
    concat!(jump!(), "{target}"),
    ".globl private_\\version\\()_register",
    ".type private_\\version\\()_register, %function",
    ".symver private_\\version\\()_register, verbs_register_driver_\\version\\()@IBVERBS_PRIVATE_\\version",
    ".pushsection .data",
    "private_\\version\\()_allow:",
    ".byte 0",
    ".globl private_\\version\\()_allow",
    ".type private_\\version\\()_allow, %object",
    ".size private_\\version\\()_allow, 1",
    ".symver private_\\version\\()_allow, verbs_allow_disassociate_destroy@IBVERBS_PRIVATE_\\version",
    ".popsection",
    ".endr",
    target = sym do_nothing
);
