/*
 * The steps of a queue pair to a connection, in one call.
 *
 * rdma_init_qp_attr says what the connection manager proposes for a state; what is applied is
 * decided by the policy (cm/qp_transition.py), whose values are limits, or -1 for what is proposed.
 */

static int aio_lower(int proposed, int most)
{
    return most >= 0 && most < proposed ? most : proposed;
}

/*
 * Move `qp` through the states `first` to `last`.
 *
 * Returns the number of own reads and atomics that may be under way, plus one; 0 where no state
 * has set it; -errno if the device refused; -errno - AIO_NOT_PROPOSED if the connection manager
 * did.
 */
#define AIO_NOT_PROPOSED 4096

static int aio_qp_advance(struct rdma_cm_id *id, struct ibv_qp *qp, int first, int last, int access,
                          int timeout, int retry_count, int rnr_retry_count, int min_rnr_timer,
                          int max_dest_rd_atomic, int max_rd_atomic)
{
    int reads = 0;

    for (int state = first; state <= last; state++) {
        struct ibv_qp_attr attr;
        int mask = 0, code;

        memset(&attr, 0, sizeof(attr));
        attr.qp_state = (enum ibv_qp_state)state;
        if (rdma_init_qp_attr(id, &attr, &mask))
            return -(errno ? errno : EIO) - AIO_NOT_PROPOSED;
        if ((mask & IBV_QP_ACCESS_FLAGS) && access >= 0)
            attr.qp_access_flags = (unsigned int)access;
        if ((mask & IBV_QP_TIMEOUT) && timeout >= 0)
            attr.timeout = (uint8_t)timeout;
        if ((mask & IBV_QP_MIN_RNR_TIMER) && min_rnr_timer >= 0)
            attr.min_rnr_timer = (uint8_t)min_rnr_timer;
        attr.retry_cnt = (uint8_t)aio_lower(attr.retry_cnt, retry_count);
        attr.rnr_retry = (uint8_t)aio_lower(attr.rnr_retry, rnr_retry_count);
        attr.max_dest_rd_atomic = (uint8_t)aio_lower(attr.max_dest_rd_atomic, max_dest_rd_atomic);
        attr.max_rd_atomic = (uint8_t)aio_lower(attr.max_rd_atomic, max_rd_atomic);
        code = ibv_modify_qp(qp, &attr, mask);
        if (code) /* some providers return -1 with errno set, or -errno */
            return code == -1 ? -(errno ? errno : EIO) : code < 0 ? code : -code;
        if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
            reads = attr.max_rd_atomic + 1;
    }
    return reads;
}
