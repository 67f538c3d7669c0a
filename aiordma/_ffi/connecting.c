/*
 * The steps to a connection, each in one call with integers: a struct that Python fills field
 * by field costs as much as its use.
 *
 * rdma_init_qp_attr returns the values that the connection manager proposes for a state.  The
 * policy (cm/qp_transition.py) decides which values are applied: its values are limits, or -1 for
 * the proposed value.
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

static struct rdma_conn_param aio_offer(const char *data, int length, int responder_resources,
                                        int initiator_depth, int flow_control, int retry_count,
                                        int rnr_retry_count, uint32_t qp_num)
{
    struct rdma_conn_param param = {
        .private_data = data,
        .private_data_len = (uint8_t)length,
        .responder_resources = (uint8_t)responder_resources,
        .initiator_depth = (uint8_t)initiator_depth,
        .flow_control = (uint8_t)flow_control,
        .retry_count = (uint8_t)retry_count,
        .rnr_retry_count = (uint8_t)rnr_retry_count,
        .qp_num = qp_num,
    };

    return param;
}

/* rdma_connect and rdma_accept: -1 with errno. */
static int aio_connect(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
                       int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
                       uint32_t qp_num)
{
    struct rdma_conn_param param = aio_offer(data, length, responder_resources, initiator_depth,
                                             flow_control, retry_count, rnr_retry_count, qp_num);

    return rdma_connect(id, &param);
}

static int aio_accept(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
                      int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
                      uint32_t qp_num)
{
    struct rdma_conn_param param = aio_offer(data, length, responder_resources, initiator_depth,
                                             flow_control, retry_count, rnr_retry_count, qp_num);

    return rdma_accept(id, &param);
}

/* ibv_create_cq: NULL with errno, which is 0 where a driver gives no reason. */
static struct ibv_cq *aio_create_cq(struct ibv_context *context, int cqe, uint64_t own,
                                    struct ibv_comp_channel *channel, int vector)
{
    errno = 0;
    return ibv_create_cq(context, cqe, (void *)(uintptr_t)own, channel, vector);
}

/*
 * ibv_create_qp: NULL with errno, which is 0 where a driver gives no reason.
 *
 * `numbers`: max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data, in the order of
 * struct ibv_qp_cap, first as asked for and then as given; behind them the queue pair's number.
 */
static struct ibv_qp *aio_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq,
                                    struct ibv_cq *recv_cq, struct ibv_srq *srq, int type,
                                    int all_signaled, uint64_t token, uint32_t *numbers)
{
    struct ibv_qp_init_attr attr = {
        .qp_context = (void *)(uintptr_t)token,
        .send_cq = send_cq,
        .recv_cq = recv_cq,
        .srq = srq,
        .qp_type = (enum ibv_qp_type)type,
        .sq_sig_all = all_signaled,
    };
    struct ibv_qp *qp;

    memcpy(&attr.cap, numbers, sizeof(attr.cap));
    if (srq)
        attr.cap.max_recv_wr = attr.cap.max_recv_sge = 0;
    errno = 0;
    qp = ibv_create_qp(pd, &attr);
    if (qp) {
        memcpy(numbers, &attr.cap, sizeof(attr.cap));
        numbers[5] = qp->qp_num;
    }
    return qp;
}
