/* What the C files share with one another and with Python. */

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

void *aio_map(size_t size);
void aio_unmap(void *memory, size_t size);
void aio_clear(void *memory, size_t size);

struct aio_cq {
    uint64_t token;
    int managed;
    int solicited; /* wake the loop for solicited completions and failures only */
    int armed;     /* how it was armed last: 1 for every completion, 2 for those */
    int pending;   /* in aio_drain.pending */
    int listeners; /* objects to be woken by every completion, solicited or not */
    int eager;     /* objects that want it armed when it is empty only, see aio_drain */
    int unarmed;   /* it is in aio_drain.pending, and was not armed yet */
    int hands;     /* AIO_FREE, AIO_DRAINED or AIO_RETIRED */
    uint32_t owed; /* events that were seen to, and are not acknowledged */
    uint32_t events; /* that the drain has taken off the channel, ever */
};

struct aio_segment {
    uint64_t token;
    int count;
};

struct aio_sink {
    int (*take)(struct aio_sink *sink, const struct ibv_wc *wc);
    uint64_t id;      /* its wr_id, without the sub-index */
    uint32_t news;    /* what Python is to hear of; bits of the taker's own */
    uint32_t spilled; /* completions that Python has been given and has not seen yet */
};

struct aio_drain {
    struct ibv_comp_channel *channel;
    struct ibv_cq *pending[32];
    int n_pending;
    struct aio_segment *segments;
    int max_segments;
    int n_segments;
    int again; /* set by the caller: go on where the last call has stopped */
    int more;
    int error;
    int spare; /* drains that may leave off after one event */
    struct aio_sink **sinks; /* by index of the slot table */
    uint32_t n_sinks;
    uint32_t *ready; /* indices of those with news; as many as completions are taken at once */
    int n_ready;
    int swept; /* completions that the last sweep has polled */
};

void aio_cq_retire(struct ibv_cq *cq, struct aio_cq *own);
int aio_drain(struct aio_drain *d, struct ibv_wc *out, int cap);
int aio_sweep(struct aio_drain *d, struct ibv_cq *cq, struct ibv_wc *out, int cap);
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
int aio_post_write(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                   uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
int aio_post_probe(struct ibv_qp *qp, uint64_t wr_id);
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

struct aio_arrival {
    uint32_t length;
    uint32_t imm;
    uint16_t slot;
    uint16_t has_imm;
};

struct aio_slots {
    uint64_t addr;
    uint32_t stride;
    uint32_t key;    /* of the first `base` slots, which stay */
    uint32_t base;
    uint32_t step;   /* the others come and go, so many at a time */
    uint32_t *keys;  /* of those */
    uint8_t more;    /* there are some of those */
    uint8_t leaving; /* some of them are to be handed in when they are free */
    uint8_t full;    /* there are as many as there may be */
};

struct aio_lane {
    struct aio_sink sink;
    struct ibv_qp *qp;
    uint32_t want;    /* AIO_WANT_ARRIVAL: a task waits; AIO_WANT_SENT: Python sees completions */
    uint8_t blocked;  /* sends wait for room, or are refused: Python sends */
    uint8_t raw;
    uint8_t closed;
    uint8_t flushing; /* the end: what comes back unsent or unfilled is only counted */
    uint32_t heard;

    struct aio_slots send;
    struct aio_slots recv;
    const uint8_t *crowded; /* others wait for slots of the pool; set if slots come and go */
    uint64_t eager_size;
    int64_t credits;
    uint16_t *free;
    uint32_t n_free;
    uint32_t data_slots; /* those from this number on carry messages without data */
    uint64_t sent; /* messages, with those without data */
    uint64_t completed;
    uint32_t send_flags;
    uint32_t inline_size; /* bytes, with the header, that go in the work request itself */

    int64_t posted;   /* the three numbers of endpoint/window.py */
    int64_t unused;
    int64_t granted;
    int64_t control;
    int64_t due;
    int64_t receives; /* work requests of the receive queue under way */
    struct aio_arrival *arrivals;
    uint32_t arrival_mask;
    uint32_t head;
    uint32_t tail;
    uint32_t imm;
    uint16_t back[8];
    uint32_t n_back;
    uint32_t chain;
    uint32_t held; /* messages that the program has */
    uint32_t half; /* as many as it may have without copies, at least */
    uint32_t rare; /* receiving has something else to see to: Python does it */

    uint8_t over;              /* no operation may be posted any more */
    uint8_t attended;          /* their completions wake the loop */
    uint8_t operations_wanted; /* a task waits for a number: others wait behind it */
    uint32_t n_operations;     /* READs, WRITEs and atomics that may be under way; 0: none yet */
    uint16_t *operations_free;
    uint32_t n_operations_free;
    uint32_t operating;        /* under way */
    uint16_t *operations_done; /* ring of those whose end is news */
    uint32_t done_mask;
    uint32_t done_head;
    uint32_t done_tail;

    uint64_t messages_sent;
    uint64_t bytes_sent;
    uint64_t messages_received;
    uint64_t bytes_received;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t atomics;
};

void aio_lane_init(struct aio_lane *lane, uint16_t *free, uint32_t sends, uint32_t data_slots,
                   struct aio_arrival *arrivals, uint32_t n_arrivals, uint32_t receives,
                   uint32_t control, int raw);
void aio_lane_size(struct aio_lane *lane, int64_t window);
void aio_lane_bind(struct aio_lane *lane, struct ibv_qp *qp, uint32_t flags, uint32_t inline_size,
                   uint64_t send_addr, uint32_t send_stride, uint32_t send_key,
                   uint32_t send_count, uint64_t recv_addr, uint32_t recv_stride,
                   uint32_t recv_key, uint32_t recv_count);
int aio_lane_send(struct aio_lane *lane, const void *data, uint64_t length);
int64_t aio_lane_next(struct aio_lane *lane);
int aio_lane_back(struct aio_lane *lane, uint32_t slot);
int aio_lane_back_now(struct aio_lane *lane, uint32_t slot);
int aio_lane_take(struct aio_sink *sink, const struct ibv_wc *wc);

struct aio_operation {
    uint32_t number;
    uint32_t opcode;      /* enum ibv_wr_opcode */
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
    uint64_t remote_addr;
    uint32_t rkey;
    uint64_t compare_add; /* of a WRITE with immediate: that */
    uint64_t swap;
};

int aio_lane_operate(struct aio_lane *lane, const struct aio_operation *operation);

struct aio_message {
    uint32_t word;
    uint8_t wrs;      /* work requests that it takes */
    uint8_t in_ring;  /* its bytes lie in the ring for sending */
    uint8_t signaled; /* it asked for its completion */
};

struct aio_stream {
    struct aio_sink sink;
    struct ibv_qp *qp;
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
    uint64_t wr_id;
    uint32_t inline_size;
    int error;         /* errno of the post that failed */
    uint8_t dead;      /* nothing may be posted any more */
    uint8_t flushing;  /* the end: receives that come back unused are only counted */
    uint8_t iwarp;
    uint8_t receiving; /* data may come */
    uint8_t sending;   /* data may go */
    uint8_t held;      /* but not by aio_stream_write; Python hears when there is room */
    uint8_t crediting; /* the peer is told of room and credits */
    uint8_t owing;     /* a message of the protocol's waits in Python: for a work request, a credit */
    uint8_t swapped;   /* the peer has the other byte order */
    uint8_t heard;     /* set when a word has come */
    uint8_t plain;     /* all that comes is for the protocol's data_received */
    uint8_t waiter;    /* or for a task, which waits */
    uint8_t stopped;   /* or is dropped */
    uint32_t posted;   /* work requests whose completion will come */

    uint8_t *send;     /* ring; behind it the payloads of four control messages */
    uint32_t send_size;
    uint32_t send_lkey;
    uint32_t head;
    uint32_t send_free;
    uint32_t largest;  /* bytes of a message */
    uint32_t control_next;
    uint64_t addr;     /* where the next bytes go */
    uint32_t key;
    uint32_t left;
    uint64_t spare_addr;
    uint32_t spare_key;
    uint32_t spare_left;
    uint32_t allowed;  /* messages */
    uint32_t limit;
    uint32_t sequence;
    uint32_t data_out; /* work requests under way */
    uint32_t data_limit;
    uint32_t data_wrs;
    uint32_t control_out;

    struct aio_message *messages; /* under way: from `first` to `next` */
    uint32_t messages_mask;
    uint32_t first;
    uint32_t next;
    uint32_t untold;       /* messages since the last that asked for its completion */
    uint32_t untold_bytes;
    uint32_t tell_messages;
    uint32_t tell_bytes;
    uint64_t progress;     /* messages that have completed */

    uint8_t *table;        /* ours, that the peer writes descriptors to */
    uint32_t entry;
    uint32_t peer_entry;
    uint64_t table_addr;   /* the peer's */
    uint32_t table_key;
    uint32_t table_length;

    uint8_t *ring;
    uint32_t ring_size;
    uint32_t ring_rkey;
    uint32_t offset;       /* of the first byte that is there */
    uint32_t readable;
    uint32_t want;         /* bytes that make news */
    uint32_t ring_left;    /* what the peer may use, see rsocket/flow.py */
    uint32_t ring_buffers;
    uint32_t ring_allowed;
    uint32_t ring_free;
    uint32_t ring_next;
    uint32_t credits;
    uint64_t consumed;
    uint64_t due;
    uint32_t *waiting;     /* lengths of the messages that wait */
    uint32_t waiting_mask;
    uint32_t waiting_first;
    uint32_t waiting_count;

    uint8_t *words;        /* on iWARP, four bytes for each receive */
    uint32_t words_lkey;
    uint32_t n_used;
    uint16_t used[8];      /* receives to be posted again */
};

void aio_stream_init(struct aio_stream *s);
int aio_stream_take(struct aio_sink *sink, const struct ibv_wc *wc);
int aio_stream_control(struct aio_stream *s, uint32_t word, uint32_t wrs, const void *payload,
                       uint32_t size, uint64_t to, uint32_t key, int signaled);
uint32_t aio_stream_room(const struct aio_stream *s);
int aio_stream_send(struct aio_stream *s, uint32_t length);
ssize_t aio_stream_write(struct aio_stream *s, const void *data, size_t size);
int aio_stream_announce(struct aio_stream *s);
int aio_stream_consume(struct aio_stream *s, uint32_t n);
uint32_t aio_stream_read(struct aio_stream *s, void *into, size_t size);
int aio_stream_fill(struct aio_stream *s, uint32_t count);
int aio_stream_used(struct aio_stream *s, uint32_t slot);
uint32_t aio_stream_reach(const struct aio_stream *s, uint32_t sub);
uint32_t aio_stream_retire(struct aio_stream *s);
void aio_stream_drop(struct aio_stream *s);

/* crc32c.c */
uint32_t aio_crc32c(uint32_t crc, const void *data, uint64_t length);
uint32_t aio_crc32c_table(uint32_t crc, const void *data, uint64_t length);
int aio_crc32c_hardware(void);
void aio_copy(void *to, const void *from, uint64_t length);

/* connecting.c */
int aio_qp_advance(struct rdma_cm_id *id, struct ibv_qp *qp, int first, int last, int access,
                   int timeout, int retry_count, int rnr_retry_count, int min_rnr_timer,
                   int max_dest_rd_atomic, int max_rd_atomic);
int aio_resolve(struct rdma_cm_id *id, struct sockaddr_storage *src, struct sockaddr_storage *dst,
                int limit, uint64_t token, int route);
int aio_connect(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
                int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
                uint32_t qp_num);
int aio_accept(struct rdma_cm_id *id, const char *data, int length, int responder_resources,
               int initiator_depth, int flow_control, int retry_count, int rnr_retry_count,
               uint32_t qp_num);
struct ibv_cq *aio_create_cq(struct ibv_context *context, int cqe, struct aio_cq *own,
                             struct ibv_comp_channel *channel, int vector);
struct ibv_qp *aio_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
                             struct ibv_srq *srq, int type, int all_signaled, uint64_t token,
                             uint32_t *numbers);
