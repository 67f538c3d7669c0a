/* Declarations of glue.c. */

struct aio_cm_event {
    int type;
    int status;
    uint64_t token;
    uint64_t listen_token;
    struct rdma_cm_id *id;
    uint32_t qp_num;
    uint32_t qkey;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint8_t is_datagram;
    uint8_t private_data_len;
    struct ibv_ah_attr ah_attr;
    uint8_t private_data[256];
};

int aio_cm_next(struct rdma_event_channel *channel, struct aio_cm_event *out);

struct aio_cq {
    uint64_t token;
    int managed;
    int solicited; /* wake the loop for solicited completions and failures only */
    int pending;   /* in aio_drain.pending */
    int hands;     /* who may touch the queue; see aio_cq_retire */
};

struct aio_segment {
    uint64_t token;
    int count;
};

struct aio_drain {
    struct ibv_comp_channel *channel;
    struct ibv_cq *pending[32];
    int n_pending;
    struct aio_segment *segments;
    int max_segments;
    int n_segments;
    int more;
    int error;
};

void aio_cq_retire(struct aio_cq *own);
int aio_drain(struct aio_drain *d, struct ibv_wc *out, int cap);
void aio_drain_forget(struct aio_drain *d, struct ibv_cq *cq);

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
int aio_post_stream(struct ibv_qp *qp, uint64_t wr_id, uint64_t write_id, uint64_t addr,
                    uint32_t length, uint32_t lkey, uint64_t remote_addr, uint32_t rkey,
                    uint32_t word, unsigned int flags, int iwarp);
int aio_post_probe(struct ibv_qp *qp, uint64_t wr_id);
int aio_post_empty_recvs(struct ibv_qp *qp, uint64_t wr_id, int count);
int aio_post_recv_slots(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t stride,
                        uint32_t lkey, const uint16_t *slots, int count);
int aio_post_srq_recv_slots(struct ibv_srq *srq, uint64_t wr_id, uint64_t addr, uint32_t stride,
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
