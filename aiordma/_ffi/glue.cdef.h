/* The functions of glue.c, posting.c, connecting.c and polling.c for Python. */

void *aio_map(size_t size);
void aio_unmap(void *memory, size_t size);
void aio_clear(void *memory, size_t size);

struct aio_async_event {
    int type;
    int port;
    uint64_t element;
    uint64_t token;
};

int aio_async_next(struct ibv_context *context, struct aio_async_event *out);

int aio_post_send(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                  uint32_t lkey, unsigned int flags, int has_imm, uint32_t imm);
int aio_post_read(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                  uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
int aio_post_write(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                   uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
int aio_post_recv_slots(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t stride,
                        uint32_t lkey, const uint16_t *slots, int count);

struct aio_prepared {
    struct ibv_qp *qp;
    struct ibv_send_wr *send;
    struct ibv_recv_wr *recv;
    uint64_t *entries;
    uint64_t *caller;
    uint64_t *history;
    uint32_t count;
    uint32_t history_mask;
    uint32_t executions;
};

int aio_execute(struct aio_prepared *p);

/* connecting.c */
#define AIO_NOT_PROPOSED ...
int aio_qp_advance(struct rdma_cm_id *id, struct ibv_qp *qp, int first, int last, int access,
                   int timeout, int retry_count, int rnr_retry_count, int min_rnr_timer,
                   int max_dest_rd_atomic, int max_rd_atomic);
int aio_connect(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
                int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
                uint32_t qp_num);
int aio_accept(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
               int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
               uint32_t qp_num);
struct ibv_cq *aio_create_cq(struct ibv_context *context, int cqe, uint64_t own,
                             struct ibv_comp_channel *channel, int vector);
struct ibv_qp *aio_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
                             struct ibv_srq *srq, int type, int all_signaled, uint64_t token,
                             uint32_t *numbers);

/* polling.c */
struct aio_wc_extra {
    uint64_t timestamp;
    uint64_t wallclock_ns;
    uint32_t flow_tag;
    uint32_t cvlan;
};

struct ibv_cq *aio_create_cq_ex(struct ibv_context *context, int cqe, uint64_t own,
                                struct ibv_comp_channel *channel, int vector, uint64_t fields);
int aio_poll_cq_ex(struct ibv_cq *cq, int most, uint64_t fields, struct ibv_wc *wcs,
                   struct aio_wc_extra *extras);
int aio_query_clock(struct ibv_context *context, uint64_t *ticks);
