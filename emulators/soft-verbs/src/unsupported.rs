//! libibverbs symbols that EFA doesn't support. Each fails with `EOPNOTSUPP`, as rdma-core does for EFA, whatever its arguments.
//!
//! So do the old forms from release 1.0, and the private symbols through which rdma-core's own drivers reach the kernel.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::guard::Errno;

extern "C" fn refuse_with_number() -> c_int {
    Errno::UNSUPPORTED.set();
    Errno::UNSUPPORTED.0
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

symbols! { refuse_with_number:
    "execute_ioctl" "ibv_attach_mcast" "ibv_cmd_advise_mr" "ibv_cmd_alloc_dm" "ibv_cmd_alloc_mw" "ibv_cmd_alloc_pd"
    "ibv_cmd_attach_mcast" "ibv_cmd_close_xrcd" "ibv_cmd_create_ah" "ibv_cmd_create_counters" "ibv_cmd_create_cq"
    "ibv_cmd_create_cq_ex" "ibv_cmd_create_flow" "ibv_cmd_create_flow_action_esp" "ibv_cmd_create_qp" "ibv_cmd_create_qp_ex"
    "ibv_cmd_create_qp_ex2" "ibv_cmd_create_rwq_ind_table" "ibv_cmd_create_srq" "ibv_cmd_create_srq_ex" "ibv_cmd_create_wq"
    "ibv_cmd_dealloc_mw" "ibv_cmd_dealloc_pd" "ibv_cmd_dereg_mr" "ibv_cmd_destroy_ah" "ibv_cmd_destroy_counters"
    "ibv_cmd_destroy_cq" "ibv_cmd_destroy_flow" "ibv_cmd_destroy_flow_action" "ibv_cmd_destroy_qp"
    "ibv_cmd_destroy_rwq_ind_table" "ibv_cmd_destroy_srq" "ibv_cmd_destroy_wq" "ibv_cmd_detach_mcast" "ibv_cmd_free_dm"
    "ibv_cmd_get_context" "ibv_cmd_modify_cq" "ibv_cmd_modify_flow_action_esp" "ibv_cmd_modify_qp" "ibv_cmd_modify_qp_ex"
    "ibv_cmd_modify_srq" "ibv_cmd_modify_wq" "ibv_cmd_open_qp" "ibv_cmd_open_xrcd" "ibv_cmd_poll_cq" "ibv_cmd_post_recv"
    "ibv_cmd_post_send" "ibv_cmd_post_srq_recv" "ibv_cmd_query_context" "ibv_cmd_query_device_any" "ibv_cmd_query_mr"
    "ibv_cmd_query_port" "ibv_cmd_query_qp" "ibv_cmd_query_srq" "ibv_cmd_read_counters" "ibv_cmd_reg_dm_mr"
    "ibv_cmd_reg_dmabuf_mr" "ibv_cmd_reg_mr" "ibv_cmd_req_notify_cq" "ibv_cmd_rereg_mr" "ibv_cmd_resize_cq" "ibv_destroy_srq"
    "ibv_detach_mcast" "ibv_init_ah_from_wc" "ibv_modify_srq" "ibv_query_ece" "ibv_query_srq" "ibv_rereg_mr" "ibv_resize_cq"
    "ibv_resolve_eth_l2_from_gid" "ibv_set_ece"
}

symbols! { refuse_with_null:
    "ibv_create_ah_from_wc" "ibv_create_srq" "ibv_import_device" "ibv_import_dm" "ibv_import_mr" "ibv_import_pd"
    "_verbs_init_and_alloc_context" "verbs_open_device"
}

symbols! { do_nothing:
    "ibv_copy_ah_attr_from_kern" "ibv_copy_path_rec_from_kern" "ibv_copy_path_rec_to_kern" "ibv_copy_qp_attr_from_kern"
    "ibv_register_driver" "ibv_unimport_dm" "ibv_unimport_mr" "ibv_unimport_pd" "verbs_init_cq" "verbs_register_driver_34"
    "verbs_set_ops" "verbs_uninit_context" "__verbs_log" "__ioctl_final_num_attrs"
}

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

/// A variable that rdma-core's drivers set.
#[unsafe(no_mangle)]
static verbs_allow_disassociate_destroy: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
