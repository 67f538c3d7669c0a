/*
 * The steps to a connection, each in one call with plain numbers: a struct that Python fills field
 * by field costs as much as what is then done with it.
 *
 * rdma_init_qp_attr says what the connection manager proposes for a state; what is applied is
 * decided by the policy (cm/qp_transition.py), whose values are limits, or -1 for what is proposed.
 */

/*
 * An id's context: its token, and above it the milliseconds for the route of an id that goes on
 * from its address to its route by itself; 0 for others.
 */
#define AIO_TOKEN_BITS 40

static uint64_t aio_cm_token(const struct rdma_cm_id *id)
{
    return (uint64_t)(uintptr_t)id->context & ((UINT64_C(1) << AIO_TOKEN_BITS) - 1);
}

/*
 * Go on where nobody has to be asked: 0, and nobody is told of this event.  1: this is no such
 * event; or -errno of rdma_resolve_route, which becomes the event's status.
 */
static int aio_cm_go_on(const struct rdma_cm_event *ev)
{
    struct rdma_cm_id *id = ev->id;
    int limit;

    if (ev->event != RDMA_CM_EVENT_ADDR_RESOLVED || !id || ev->status)
        return 1;
    limit = (int)((uint64_t)(uintptr_t)id->context >> AIO_TOKEN_BITS);
    if (!limit)
        return 1;
    id->context = (void *)(uintptr_t)aio_cm_token(id);
    return rdma_resolve_route(id, limit) ? -(errno ? errno : EIO) : 0;
}

/*
 * Take one connection-management event: copy all of it, acknowledge, return 0.
 *
 * One at a time by design.  Fetching a batch first would leave unacknowledged events of an id
 * that a handler destroys, and rdma_destroy_id waits for those without end.
 * The id's context holds an integer token; the pointer of a new id is handed over for
 * CONNECT_REQUEST only, the one event whose receiver becomes its owner.
 * -EAGAIN ends a drain.  librdmacm may swallow events, so that a readable descriptor can
 * end here at once.
 */
static int aio_cm_next(struct rdma_event_channel *channel, struct aio_cm_event *out)
{
    struct rdma_cm_event *ev;
    const void *data;
    int refused;

    do {
        if (rdma_get_cm_event(channel, &ev))
            return errno ? -errno : -EIO;
        refused = aio_cm_go_on(ev);
        if (!refused)
            rdma_ack_cm_event(ev);
    } while (!refused);
    memset(out, 0, offsetof(struct aio_cm_event, private_data));
    out->type = (int)ev->event;
    out->status = refused < 0 ? refused : ev->status;
    if (ev->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        out->id = ev->id; /* its context is a copy of the listener's: not its own token */
        out->listen_token = ev->listen_id ? aio_cm_token(ev->listen_id) : 0;
    } else {
        out->token = ev->id ? aio_cm_token(ev->id) : 0;
    }
    if (ev->id && ev->id->qp_type == IBV_QPT_UD) { /* port spaces UDP and IPOIB */
        out->is_datagram = 1;
        out->qp_num = ev->param.ud.qp_num;
        out->qkey = ev->param.ud.qkey;
        out->ah_attr = ev->param.ud.ah_attr;
        out->private_data_len = ev->param.ud.private_data_len;
        data = ev->param.ud.private_data;
    } else {
        out->qp_num = ev->param.conn.qp_num;
        out->responder_resources = ev->param.conn.responder_resources;
        out->initiator_depth = ev->param.conn.initiator_depth;
        out->flow_control = ev->param.conn.flow_control;
        out->retry_count = ev->param.conn.retry_count;
        out->rnr_retry_count = ev->param.conn.rnr_retry_count;
        out->srq = ev->param.conn.srq;
        out->private_data_len = ev->param.conn.private_data_len;
        data = ev->param.conn.private_data;
    }
    if (data && out->private_data_len)
        memcpy(out->private_data, data, out->private_data_len);
    else
        out->private_data_len = 0;
    rdma_ack_cm_event(ev);
    return 0;
}

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

/*
 * rdma_resolve_addr for the id with that token: -1 with errno.  With milliseconds for the route the
 * id goes on to that by itself; see aio_cm_next.
 */
static int aio_resolve(struct rdma_cm_id *id, struct sockaddr_storage *src,
                       struct sockaddr_storage *dst, int limit, uint64_t token, int route)
{
    id->context = (void *)(uintptr_t)(token | (uint64_t)route << AIO_TOKEN_BITS);
    return rdma_resolve_addr(id, (struct sockaddr *)src, (struct sockaddr *)dst, limit);
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
static struct ibv_cq *aio_create_cq(struct ibv_context *context, int cqe, struct aio_cq *own,
                                    struct ibv_comp_channel *channel, int vector)
{
    errno = 0;
    return ibv_create_cq(context, cqe, own, channel, vector);
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
