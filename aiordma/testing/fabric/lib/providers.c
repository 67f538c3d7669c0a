/*
 * The calls of two drivers, mlx5 and EFA, which programs link with beside the verbs: perftest and
 * pyverbs do.  The fabric's adapters are neither: each call says that it is not supported.
 */
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#pragma GCC visibility push(default)

/* They return an errno; a negative one; NULL, with errno; or nothing. */
#define CODE(name)                                                                                 \
    int name(void);                                                                                \
    int name(void)                                                                                 \
    {                                                                                              \
        return EOPNOTSUPP;                                                                         \
    }                                                                                              \
    extern int name(void)
#define NEGATIVE(name)                                                                             \
    long name(void);                                                                               \
    long name(void)                                                                                \
    {                                                                                              \
        return -EOPNOTSUPP;                                                                        \
    }                                                                                              \
    extern long name(void)
#define POINTER(name)                                                                              \
    void *name(void);                                                                              \
    void *name(void)                                                                               \
    {                                                                                              \
        errno = EOPNOTSUPP;                                                                        \
        return NULL;                                                                               \
    }                                                                                              \
    extern void *name(void)
#define NOTHING(name)                                                                              \
    void name(void);                                                                               \
    void name(void)                                                                                \
    {                                                                                              \
    }                                                                                              \
    extern void name(void)

/* Of an adapter: whether the driver is its own. */
bool mlx5dv_is_supported(void);
bool mlx5dv_is_supported(void)
{
    return false;
}

CODE(mlx5dv_query_device);
CODE(mlx5dv_init_obj);
POINTER(mlx5dv_create_cq);
CODE(mlx5dv_set_context_attr);
POINTER(mlx5dv_create_qp);
POINTER(mlx5dv_create_wq);
CODE(mlx5dv_get_clock_info);
POINTER(mlx5dv_create_flow_action_esp);
POINTER(mlx5dv_create_flow_matcher);
CODE(mlx5dv_destroy_flow_matcher);
POINTER(mlx5dv_create_flow);
POINTER(mlx5dv_create_flow_action_modify_header);
POINTER(mlx5dv_create_flow_action_packet_reformat);
POINTER(mlx5dv_devx_alloc_uar);
NOTHING(mlx5dv_devx_free_uar);
CODE(mlx5dv_devx_general_cmd);
POINTER(mlx5dv_devx_obj_create);
CODE(mlx5dv_devx_obj_destroy);
CODE(mlx5dv_devx_obj_modify);
CODE(mlx5dv_devx_obj_query);
CODE(mlx5dv_devx_query_eqn);
CODE(mlx5dv_devx_umem_dereg);
POINTER(mlx5dv_devx_umem_reg);
POINTER(mlx5dv_open_device);
CODE(mlx5dv_devx_cq_modify);
CODE(mlx5dv_devx_cq_query);
CODE(mlx5dv_devx_ind_tbl_modify);
CODE(mlx5dv_devx_ind_tbl_query);
CODE(mlx5dv_devx_qp_modify);
CODE(mlx5dv_devx_qp_query);
CODE(mlx5dv_devx_srq_modify);
CODE(mlx5dv_devx_srq_query);
CODE(mlx5dv_devx_wq_modify);
CODE(mlx5dv_devx_wq_query);
POINTER(mlx5dv_devx_create_cmd_comp);
NOTHING(mlx5dv_devx_destroy_cmd_comp);
CODE(mlx5dv_devx_get_async_cmd_comp);
CODE(mlx5dv_devx_obj_query_async);
POINTER(mlx5dv_alloc_dm);
POINTER(mlx5dv_create_mkey);
CODE(mlx5dv_destroy_mkey);
POINTER(mlx5dv_dr_action_create_dest_table);
POINTER(mlx5dv_dr_action_create_dest_ibv_qp);
POINTER(mlx5dv_dr_action_create_dest_vport);
POINTER(mlx5dv_dr_action_create_flow_counter);
POINTER(mlx5dv_dr_action_create_drop);
POINTER(mlx5dv_dr_action_create_modify_header);
POINTER(mlx5dv_dr_action_create_packet_reformat);
POINTER(mlx5dv_dr_action_create_tag);
CODE(mlx5dv_dr_action_destroy);
POINTER(mlx5dv_dr_domain_create);
CODE(mlx5dv_dr_domain_destroy);
CODE(mlx5dv_dr_domain_sync);
POINTER(mlx5dv_dr_matcher_create);
CODE(mlx5dv_dr_matcher_destroy);
POINTER(mlx5dv_dr_rule_create);
CODE(mlx5dv_dr_rule_destroy);
POINTER(mlx5dv_dr_table_create);
CODE(mlx5dv_dr_table_destroy);
POINTER(mlx5dv_qp_ex_from_ibv_qp_ex);
POINTER(mlx5dv_devx_create_event_channel);
NOTHING(mlx5dv_devx_destroy_event_channel);
NEGATIVE(mlx5dv_devx_get_event);
CODE(mlx5dv_devx_subscribe_devx_event);
CODE(mlx5dv_devx_subscribe_devx_event_fd);
POINTER(mlx5dv_alloc_var);
POINTER(mlx5dv_dr_action_create_flow_meter);
CODE(mlx5dv_dr_action_modify_flow_meter);
CODE(mlx5dv_dump_dr_domain);
CODE(mlx5dv_dump_dr_matcher);
CODE(mlx5dv_dump_dr_rule);
CODE(mlx5dv_dump_dr_table);
NOTHING(mlx5dv_free_var);
POINTER(mlx5dv_pp_alloc);
NOTHING(mlx5dv_pp_free);
POINTER(mlx5dv_dr_action_create_default_miss);
NOTHING(mlx5dv_dr_domain_set_reclaim_device_memory);
CODE(mlx5dv_modify_qp_lag_port);
CODE(mlx5dv_query_qp_lag_port);
POINTER(mlx5dv_dr_action_create_dest_devx_tir);
POINTER(mlx5dv_dr_action_create_dest_array);
POINTER(mlx5dv_dr_action_create_flow_sampler);
POINTER(mlx5dv_dr_action_create_aso);
POINTER(mlx5dv_dr_action_create_pop_vlan);
POINTER(mlx5dv_dr_action_create_push_vlan);
CODE(mlx5dv_dr_action_modify_aso);
CODE(mlx5dv_modify_qp_sched_elem);
CODE(mlx5dv_modify_qp_udp_sport);
POINTER(mlx5dv_sched_leaf_create);
CODE(mlx5dv_sched_leaf_destroy);
CODE(mlx5dv_sched_leaf_modify);
POINTER(mlx5dv_sched_node_create);
CODE(mlx5dv_sched_node_destroy);
CODE(mlx5dv_sched_node_modify);
CODE(mlx5dv_reserved_qpn_alloc);
CODE(mlx5dv_reserved_qpn_dealloc);
POINTER(mlx5dv_devx_umem_reg_ex);
POINTER(mlx5dv_dm_map_op_addr);
CODE(_mlx5dv_query_port);
NOTHING(mlx5dv_dr_domain_allow_duplicate_rules);
CODE(mlx5dv_map_ah_to_qp);
CODE(mlx5dv_qp_cancel_posted_send_wrs);
CODE(_mlx5dv_mkey_check);
CODE(mlx5dv_crypto_login);
CODE(mlx5dv_crypto_login_query_state);
CODE(mlx5dv_crypto_logout);
CODE(mlx5dv_dci_stream_id_reset);
POINTER(mlx5dv_dek_create);
CODE(mlx5dv_dek_destroy);
CODE(mlx5dv_dek_query);
POINTER(mlx5dv_dr_action_create_dest_ib_port);
CODE(mlx5dv_dr_matcher_set_layout);
POINTER(mlx5dv_get_vfio_device_list);
NEGATIVE(mlx5dv_vfio_get_events_fd);
CODE(mlx5dv_vfio_process_events);
CODE(mlx5dv_dr_aso_other_domain_link);
CODE(mlx5dv_dr_aso_other_domain_unlink);
POINTER(mlx5dv_devx_alloc_msi_vector);
POINTER(mlx5dv_devx_create_eq);
CODE(mlx5dv_devx_destroy_eq);
CODE(mlx5dv_devx_free_msi_vector);
POINTER(mlx5dv_create_steering_anchor);
POINTER(mlx5dv_crypto_login_create);
CODE(mlx5dv_crypto_login_destroy);
CODE(mlx5dv_crypto_login_query);
CODE(mlx5dv_destroy_steering_anchor);
POINTER(mlx5dv_dr_action_create_dest_root_table);
CODE(mlx5dv_get_data_direct_sysfs_path);
POINTER(mlx5dv_reg_dmabuf_mr);
POINTER(__mlx5dv_create_flow);
CODE(mlx5dv_devx_uar_export_dmabuf_fd);
NOTHING(_mlx5dv_get_export_sizes);
CODE(mlx5dv_devx_obj_export);
POINTER(mlx5dv_devx_obj_import);
NOTHING(mlx5dv_devx_obj_unimport);
CODE(mlx5dv_devx_umem_export);
POINTER(mlx5dv_devx_umem_import);
NOTHING(mlx5dv_devx_umem_unimport);
CODE(mlx5dv_var_export);
POINTER(mlx5dv_var_import);
NOTHING(mlx5dv_var_unimport);
POINTER(efadv_create_driver_qp);
POINTER(efadv_create_qp_ex);
CODE(efadv_query_ah);
CODE(efadv_query_device);
POINTER(efadv_cq_from_ibv_cq_ex);
POINTER(efadv_create_cq);
CODE(efadv_query_mr);
CODE(efadv_query_qp_wqs);
CODE(efadv_query_cq);
CODE(efadv_get_max_sq_depth);
CODE(efadv_get_max_rq_depth);
POINTER(efadv_qp_from_ibv_qp_ex);
POINTER(efadv_create_comp_cntr);
