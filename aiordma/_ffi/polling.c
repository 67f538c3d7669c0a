/*
 * Extended completion queues: the calls of ibv_create_cq_ex(3) are inline functions that read one
 * field of one completion each, so that Python asks for many completions by one call.
 */

static struct ibv_cq *aio_create_cq_ex(struct ibv_context *context, int cqe, uint64_t own,
                                       struct ibv_comp_channel *channel, int vector,
                                       uint64_t fields)
{
    struct ibv_cq_init_attr_ex attr;
    struct ibv_cq_ex *queue;

    memset(&attr, 0, sizeof(attr));
    attr.cqe = (uint32_t)cqe;
    attr.cq_context = (void *)(uintptr_t)own;
    attr.channel = channel;
    attr.comp_vector = (uint32_t)vector;
    attr.wc_flags = fields;
    errno = 0;
    queue = ibv_create_cq_ex(context, &attr);
    return queue ? ibv_cq_ex_to_cq(queue) : NULL;
}

/* The completion that the queue stands at; of a failure only what the standard defines. */
static void aio_read_wc(struct ibv_cq_ex *queue, uint64_t fields, struct ibv_wc *wc,
                        struct aio_wc_extra *extra)
{
    memset(wc, 0, sizeof(*wc));
    memset(extra, 0, sizeof(*extra));
    wc->wr_id = queue->wr_id;
    wc->status = queue->status;
    wc->qp_num = ibv_wc_read_qp_num(queue);
    if (wc->status != IBV_WC_SUCCESS) {
        wc->vendor_err = ibv_wc_read_vendor_err(queue);
        return;
    }
    wc->opcode = ibv_wc_read_opcode(queue);
    wc->wc_flags = ibv_wc_read_wc_flags(queue);
    wc->byte_len = ibv_wc_read_byte_len(queue);
    wc->imm_data = ibv_wc_read_imm_data(queue); /* or the key that was invalidated */
    wc->src_qp = ibv_wc_read_src_qp(queue);
    wc->slid = (uint16_t)ibv_wc_read_slid(queue);
    wc->sl = ibv_wc_read_sl(queue);
    wc->dlid_path_bits = ibv_wc_read_dlid_path_bits(queue);
    if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
        extra->timestamp = ibv_wc_read_completion_ts(queue);
    if (fields & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
        extra->wallclock_ns = ibv_wc_read_completion_wallclock_ns(queue);
    if (fields & IBV_WC_EX_WITH_CVLAN)
        extra->cvlan = ibv_wc_read_cvlan(queue);
    if (fields & IBV_WC_EX_WITH_FLOW_TAG)
        extra->flow_tag = ibv_wc_read_flow_tag(queue);
}

/*
 * Up to `most` completions of a queue of aio_create_cq_ex; how many, or -errno.
 *
 * One completion a start: the driver of Soft-RoCE in rdma-core 44 may return old ones otherwise
 * (docs/surprises.md).
 */
static int aio_poll_cq_ex(struct ibv_cq *cq, int most, uint64_t fields, struct ibv_wc *wcs,
                          struct aio_wc_extra *extras)
{
    struct ibv_cq_ex *queue = (struct ibv_cq_ex *)cq;
    struct ibv_poll_cq_attr attr;
    int count = 0;

    memset(&attr, 0, sizeof(attr));
    for (; count < most; count++) {
        int code = ibv_start_poll(queue, &attr);

        if (code == ENOENT)
            break;
        if (code) /* after completions: the next call meets it again */
            return count ? count : -code;
        aio_read_wc(queue, fields, &wcs[count], &extras[count]);
        ibv_end_poll(queue);
    }
    return count;
}

/* The adapter's clock, in its own ticks: 0 and the time in `ticks`, or errno. */
static int aio_query_clock(struct ibv_context *context, uint64_t *ticks)
{
    struct ibv_values_ex values;
    int code;

    memset(&values, 0, sizeof(values));
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    code = ibv_query_rt_values_ex(context, &values);
    if (code)
        return code < 0 ? -code : code;
    if (!(values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK))
        return EOPNOTSUPP;
    *ticks = (uint64_t)values.raw_clock.tv_sec * 1000000000u + (uint64_t)values.raw_clock.tv_nsec;
    return 0;
}
