/*
 * Functions of the native layer that have to be a single C call; the data path is in _core.
 *
 * Rules of this file
 *   C11, no Python.h, no global state, no allocation.  Functions return a count or 0, and -errno
 *   on failure, except the posting functions, which return libibverbs' positive errno.
 *   Nothing that was read from an event stays referenced after the function has returned:
 *   a handler may destroy the object that the next event names.
 */

/*
 * Take one device event, acknowledged; 0 or -errno (-EAGAIN: none, -EIO: the device is gone).
 *
 * The token of the queue that it concerns is read before the acknowledgement, which its destroy
 * waits for: afterwards the address may already be another queue's.
 */
static int aio_async_next(struct ibv_context *context, struct aio_async_event *out)
{
    struct ibv_async_event ev;

    if (ibv_get_async_event(context, &ev))
        return errno ? -errno : -EIO;
    out->type = (int)ev.event_type;
    out->port = 0;
    out->element = 0;
    out->token = 0;
    switch (ev.event_type) {
    case IBV_EVENT_CQ_ERR:
        out->element = (uint64_t)(uintptr_t)ev.element.cq;
        out->token = ((const struct aio_cq *)ev.element.cq->cq_context)->token;
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        out->element = (uint64_t)(uintptr_t)ev.element.qp;
        out->token = (uint64_t)(uintptr_t)ev.element.qp->qp_context;
        break;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        out->element = (uint64_t)(uintptr_t)ev.element.srq;
        out->token = (uint64_t)(uintptr_t)ev.element.srq->srq_context;
        break;
    default:
        out->port = ev.element.port_num;
        break;
    }
    ibv_ack_async_event(&ev);
    return 0;
}

/* Memory for slots (verbs/slab.py): an anonymous mapping, or NULL. */
static void *aio_map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static void aio_unmap(void *memory, size_t size)
{
    munmap(memory, size);
}

static void aio_clear(void *memory, size_t size)
{
    memset(memory, 0, size);
}
