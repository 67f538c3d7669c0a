/*
 * What libibverbs and librdmacm have and the fabric has not: each call says so.
 *
 * A program, or a library that it brings, is loaded only if all the symbols that it names are
 * there, whether it calls them or not.  The functions take no arguments here: in C's calling
 * convention those of the caller are left unread.  For the same reason this file includes no header
 * that declares them.
 */
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#include "versions.h"

#pragma GCC visibility push(default)

/* They return an errno; NULL, with errno; -1, with errno; or nothing. */
#define CODE(name)                                                                                 \
    int name(void);                                                                                \
    int name(void)                                                                                 \
    {                                                                                              \
        return EOPNOTSUPP;                                                                         \
    }                                                                                              \
    extern int name(void)
#define POINTER(name)                                                                              \
    void *name(void);                                                                              \
    void *name(void)                                                                               \
    {                                                                                              \
        errno = EOPNOTSUPP;                                                                        \
        return NULL;                                                                               \
    }                                                                                              \
    extern void *name(void)
#define MINUS_ONE(name)                                                                            \
    int name(void);                                                                                \
    int name(void)                                                                                 \
    {                                                                                              \
        errno = EOPNOTSUPP;                                                                        \
        return -1;                                                                                 \
    }                                                                                              \
    extern int name(void)
#define NOTHING(name)                                                                              \
    void name(void);                                                                               \
    void name(void)                                                                                \
    {                                                                                              \
    }                                                                                              \
    extern void name(void)

/* ---- calls of programs ----------------------------------------------------------------------- */

NOTHING(ibv_register_driver);
CODE(ibv_resolve_eth_l2_from_gid);
POINTER(ibv_import_device);
POINTER(ibv_import_mr);
POINTER(ibv_import_pd);
NOTHING(ibv_unimport_mr);
NOTHING(ibv_unimport_pd);
POINTER(ibv_import_dm);
NOTHING(ibv_unimport_dm);
POINTER(ibv_alloc_dmah);
CODE(ibv_dealloc_dmah);
POINTER(ibv_reg_mr_ex);
MINUS_ONE(ibv_dm_export_dmabuf_fd);
CODE(ibv_query_port_speed);
POINTER(ibv_alloc_buf);
NOTHING(ibv_free_buf);
POINTER(ibv_reg_buf_mr);
CODE(_ibv_query_comp_cntr_caps);
POINTER(ibv_create_comp_cntr);
CODE(ibv_destroy_comp_cntr);
MINUS_ONE(ibv_export_buf_dmabuf_fd);
CODE(ibv_inc_comp_cntr);
CODE(ibv_inc_err_comp_cntr);
CODE(ibv_qp_attach_comp_cntr);
CODE(ibv_read_comp_cntr);
CODE(ibv_read_err_comp_cntr);
CODE(ibv_set_comp_cntr);
CODE(ibv_set_err_comp_cntr);

/* Of librdmacm, and newer than what the fabric's is like. */
MINUS_ONE(rdma_query_addrinfo);
MINUS_ONE(rdma_resolve_addrinfo);
MINUS_ONE(rdma_write_cm_event);
MINUS_ONE(repoll_create);
MINUS_ONE(repoll_ctl);
MINUS_ONE(repoll_wait);

/* ---- calls between the parts of rdma-core ---------------------------------------------------- */

CODE(execute_ioctl);
FABRIC_PRIVATE(execute_ioctl);
CODE(ibv_cmd_advise_mr);
FABRIC_PRIVATE(ibv_cmd_advise_mr);
CODE(ibv_cmd_alloc_dm);
FABRIC_PRIVATE(ibv_cmd_alloc_dm);
CODE(ibv_cmd_alloc_dmah);
FABRIC_PRIVATE(ibv_cmd_alloc_dmah);
CODE(ibv_cmd_alloc_mw);
FABRIC_PRIVATE(ibv_cmd_alloc_mw);
CODE(ibv_cmd_alloc_pd);
FABRIC_PRIVATE(ibv_cmd_alloc_pd);
CODE(ibv_cmd_attach_mcast);
FABRIC_PRIVATE(ibv_cmd_attach_mcast);
CODE(ibv_cmd_close_xrcd);
FABRIC_PRIVATE(ibv_cmd_close_xrcd);
CODE(ibv_cmd_create_ah);
FABRIC_PRIVATE(ibv_cmd_create_ah);
CODE(ibv_cmd_create_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_create_comp_cntr);
CODE(ibv_cmd_create_counters);
FABRIC_PRIVATE(ibv_cmd_create_counters);
CODE(ibv_cmd_create_cq);
FABRIC_PRIVATE(ibv_cmd_create_cq);
CODE(ibv_cmd_create_cq_ex);
FABRIC_PRIVATE(ibv_cmd_create_cq_ex);
CODE(ibv_cmd_create_cq_ex2);
FABRIC_PRIVATE(ibv_cmd_create_cq_ex2);
CODE(ibv_cmd_create_flow);
FABRIC_PRIVATE(ibv_cmd_create_flow);
CODE(ibv_cmd_create_flow_action_esp);
FABRIC_PRIVATE(ibv_cmd_create_flow_action_esp);
CODE(ibv_cmd_create_qp);
FABRIC_PRIVATE(ibv_cmd_create_qp);
CODE(ibv_cmd_create_qp_ex);
FABRIC_PRIVATE(ibv_cmd_create_qp_ex);
CODE(ibv_cmd_create_qp_ex2);
FABRIC_PRIVATE(ibv_cmd_create_qp_ex2);
CODE(ibv_cmd_create_rwq_ind_table);
FABRIC_PRIVATE(ibv_cmd_create_rwq_ind_table);
CODE(ibv_cmd_create_srq);
FABRIC_PRIVATE(ibv_cmd_create_srq);
CODE(ibv_cmd_create_srq_ex);
FABRIC_PRIVATE(ibv_cmd_create_srq_ex);
CODE(ibv_cmd_create_wq);
FABRIC_PRIVATE(ibv_cmd_create_wq);
CODE(ibv_cmd_dealloc_mw);
FABRIC_PRIVATE(ibv_cmd_dealloc_mw);
CODE(ibv_cmd_dealloc_pd);
FABRIC_PRIVATE(ibv_cmd_dealloc_pd);
CODE(ibv_cmd_dereg_mr);
FABRIC_PRIVATE(ibv_cmd_dereg_mr);
CODE(ibv_cmd_destroy_ah);
FABRIC_PRIVATE(ibv_cmd_destroy_ah);
CODE(ibv_cmd_destroy_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_destroy_comp_cntr);
CODE(ibv_cmd_destroy_counters);
FABRIC_PRIVATE(ibv_cmd_destroy_counters);
CODE(ibv_cmd_destroy_cq);
FABRIC_PRIVATE(ibv_cmd_destroy_cq);
CODE(ibv_cmd_destroy_flow);
FABRIC_PRIVATE(ibv_cmd_destroy_flow);
CODE(ibv_cmd_destroy_flow_action);
FABRIC_PRIVATE(ibv_cmd_destroy_flow_action);
CODE(ibv_cmd_destroy_qp);
FABRIC_PRIVATE(ibv_cmd_destroy_qp);
CODE(ibv_cmd_destroy_rwq_ind_table);
FABRIC_PRIVATE(ibv_cmd_destroy_rwq_ind_table);
CODE(ibv_cmd_destroy_srq);
FABRIC_PRIVATE(ibv_cmd_destroy_srq);
CODE(ibv_cmd_destroy_wq);
FABRIC_PRIVATE(ibv_cmd_destroy_wq);
CODE(ibv_cmd_detach_mcast);
FABRIC_PRIVATE(ibv_cmd_detach_mcast);
CODE(ibv_cmd_export_dmabuf_fd);
FABRIC_PRIVATE(ibv_cmd_export_dmabuf_fd);
CODE(ibv_cmd_free_dm);
FABRIC_PRIVATE(ibv_cmd_free_dm);
CODE(ibv_cmd_free_dmah);
FABRIC_PRIVATE(ibv_cmd_free_dmah);
CODE(ibv_cmd_get_context);
FABRIC_PRIVATE(ibv_cmd_get_context);
CODE(ibv_cmd_inc_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_inc_comp_cntr);
CODE(ibv_cmd_inc_err_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_inc_err_comp_cntr);
CODE(ibv_cmd_modify_cq);
FABRIC_PRIVATE(ibv_cmd_modify_cq);
CODE(ibv_cmd_modify_flow_action_esp);
FABRIC_PRIVATE(ibv_cmd_modify_flow_action_esp);
CODE(ibv_cmd_modify_qp);
FABRIC_PRIVATE(ibv_cmd_modify_qp);
CODE(ibv_cmd_modify_qp_ex);
FABRIC_PRIVATE(ibv_cmd_modify_qp_ex);
CODE(ibv_cmd_modify_srq);
FABRIC_PRIVATE(ibv_cmd_modify_srq);
CODE(ibv_cmd_modify_wq);
FABRIC_PRIVATE(ibv_cmd_modify_wq);
CODE(ibv_cmd_open_qp);
FABRIC_PRIVATE(ibv_cmd_open_qp);
CODE(ibv_cmd_open_xrcd);
FABRIC_PRIVATE(ibv_cmd_open_xrcd);
CODE(ibv_cmd_poll_cq);
FABRIC_PRIVATE(ibv_cmd_poll_cq);
CODE(ibv_cmd_post_recv);
FABRIC_PRIVATE(ibv_cmd_post_recv);
CODE(ibv_cmd_post_send);
FABRIC_PRIVATE(ibv_cmd_post_send);
CODE(ibv_cmd_post_srq_recv);
FABRIC_PRIVATE(ibv_cmd_post_srq_recv);
CODE(ibv_cmd_qp_attach_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_qp_attach_comp_cntr);
CODE(ibv_cmd_query_comp_cntr_caps);
FABRIC_PRIVATE(ibv_cmd_query_comp_cntr_caps);
CODE(ibv_cmd_query_context);
FABRIC_PRIVATE(ibv_cmd_query_context);
CODE(ibv_cmd_query_device_any);
FABRIC_PRIVATE(ibv_cmd_query_device_any);
CODE(ibv_cmd_query_mr);
FABRIC_PRIVATE(ibv_cmd_query_mr);
CODE(ibv_cmd_query_port);
FABRIC_PRIVATE(ibv_cmd_query_port);
CODE(ibv_cmd_query_port_speed);
FABRIC_PRIVATE(ibv_cmd_query_port_speed);
CODE(ibv_cmd_query_qp);
FABRIC_PRIVATE(ibv_cmd_query_qp);
CODE(ibv_cmd_query_srq);
FABRIC_PRIVATE(ibv_cmd_query_srq);
CODE(ibv_cmd_read_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_read_comp_cntr);
CODE(ibv_cmd_read_counters);
FABRIC_PRIVATE(ibv_cmd_read_counters);
CODE(ibv_cmd_read_err_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_read_err_comp_cntr);
CODE(ibv_cmd_reg_dm_mr);
FABRIC_PRIVATE(ibv_cmd_reg_dm_mr);
CODE(ibv_cmd_reg_dmabuf_mr);
FABRIC_PRIVATE(ibv_cmd_reg_dmabuf_mr);
CODE(ibv_cmd_reg_mr);
FABRIC_PRIVATE(ibv_cmd_reg_mr);
CODE(ibv_cmd_reg_mr_ex);
FABRIC_PRIVATE(ibv_cmd_reg_mr_ex);
CODE(ibv_cmd_req_notify_cq);
FABRIC_PRIVATE(ibv_cmd_req_notify_cq);
CODE(ibv_cmd_rereg_mr);
FABRIC_PRIVATE(ibv_cmd_rereg_mr);
CODE(ibv_cmd_resize_cq);
FABRIC_PRIVATE(ibv_cmd_resize_cq);
CODE(ibv_cmd_set_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_set_comp_cntr);
CODE(ibv_cmd_set_err_comp_cntr);
FABRIC_PRIVATE(ibv_cmd_set_err_comp_cntr);
POINTER(_verbs_init_and_alloc_context);
FABRIC_PRIVATE(_verbs_init_and_alloc_context);
POINTER(ibv_dmabuf_heap_alloc);
FABRIC_PRIVATE(ibv_dmabuf_heap_alloc);
POINTER(ibv_dmabuf_heap_cc_shared_init);
FABRIC_PRIVATE(ibv_dmabuf_heap_cc_shared_init);
POINTER(verbs_open_device);
FABRIC_PRIVATE(verbs_open_device);
MINUS_ONE(ibv_read_ibdev_sysfs_file);
FABRIC_PRIVATE(ibv_read_ibdev_sysfs_file);
NOTHING(__verbs_log);
FABRIC_PRIVATE(__verbs_log);
NOTHING(ibv_dmabuf_heap_destroy);
FABRIC_PRIVATE(ibv_dmabuf_heap_destroy);
NOTHING(ibv_dmabuf_heap_free);
FABRIC_PRIVATE(ibv_dmabuf_heap_free);
NOTHING(verbs_init_cq);
FABRIC_PRIVATE(verbs_init_cq);
NOTHING(verbs_set_ops);
FABRIC_PRIVATE(verbs_set_ops);
NOTHING(verbs_uninit_context);
FABRIC_PRIVATE(verbs_uninit_context);

/* Drivers of other adapters call it when they are loaded; its name has the number, too. */
NOTHING(verbs_register_driver_34);
NOTHING(verbs_register_driver_57);
NOTHING(verbs_register_driver_59);
NOTHING(verbs_register_driver_64);
NOTHING(verbs_register_driver_65);

unsigned __ioctl_final_num_attrs(void);
unsigned __ioctl_final_num_attrs(void)
{
    return 0;
}
FABRIC_PRIVATE(__ioctl_final_num_attrs);

const char *ibv_wr_opcode_str(void);
const char *ibv_wr_opcode_str(void)
{
    return "unknown";
}
FABRIC_PRIVATE(ibv_wr_opcode_str);

extern bool verbs_allow_disassociate_destroy;
bool verbs_allow_disassociate_destroy;
FABRIC_PRIVATE(verbs_allow_disassociate_destroy);
