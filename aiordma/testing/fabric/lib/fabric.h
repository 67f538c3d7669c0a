/*
 * What the files of the fabric share: an adapter of InfiniBand's verbs that is a library.
 *
 * The programs see libibverbs and librdmacm: the objects below begin with the structs of their
 * headers.  Behind them a world stands in the memory of the process: adapters, queue pairs that
 * exchange packets, a connection manager.  A packet for another process of the same run goes
 * through a socket (wire.c), and that process reads and writes its own memory.
 *
 * Each function of the interface holds the lock of the world while it works.  fabric_unlock()
 * first takes all steps that are due: packets that arrive, timers that ring.  Therefore a call
 * may have done all that follows from it when it returns; a program cannot tell this from an
 * adapter that is quick.  A simulator takes the steps itself, one by one (world.c).
 */
#ifndef FABRIC_H
#define FABRIC_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* What a program may call; all else is hidden. */
#define FABRIC_API __attribute__((visibility("default")))

#define FABRIC_CONTAINER(pointer, type, member)                                                    \
    ((type *)((char *)(pointer) - offsetof(type, member)))
#define FABRIC_LENGTH(array) (sizeof(array) / sizeof((array)[0]))

enum {
    FABRIC_MS = 1000 * 1000, /* nanoseconds */
    FABRIC_DEVICES = 8,      /* of a run */
    FABRIC_SLOTS = 200,      /* processes of a run */
    FABRIC_GIDS = 32,        /* of a port */
    FABRIC_QPS = 1 << 16, /* of a process: the low bits of a number; the high ones are the slot */
    FABRIC_SGES = 32,     /* of a work request */
    FABRIC_INLINE = 1024, /* bytes */
    FABRIC_CM_DATA = 256, /* private data of any message of the connection manager */
};

#define FABRIC_MULTICAST_QPN 0xffffffu

/* ---- lists: the head is an element, too ------------------------------------------------------ */

struct fabric_list {
    struct fabric_list *next, *previous;
};

static inline void fabric_list_init(struct fabric_list *head)
{
    head->next = head->previous = head;
}

static inline bool fabric_list_empty(const struct fabric_list *head)
{
    return head->next == head;
}

static inline void fabric_list_add(struct fabric_list *head, struct fabric_list *item)
{
    item->next = head;
    item->previous = head->previous;
    head->previous->next = item;
    head->previous = item;
}

/* The item is in no list afterwards, and may be removed again. */
static inline void fabric_list_remove(struct fabric_list *item)
{
    item->previous->next = item->next;
    item->next->previous = item->previous;
    fabric_list_init(item);
}

/* ---- the world: lock, clock, timers, steps (world.c) ----------------------------------------- */

/* A moment, in nanoseconds since a start that does not matter. */
typedef uint64_t fabric_time;

struct fabric_timer {
    void (*ring)(struct fabric_timer *timer);
    fabric_time due;
    unsigned place; /* in the heap, from 1; 0: not set */
    uint64_t order; /* of those that are due at one moment */
};

enum fabric_kind { /* objects that are counted; fabric_count() */
                   FABRIC_CONTEXT,
                   FABRIC_PD,
                   FABRIC_MR,
                   FABRIC_MW,
                   FABRIC_CHANNEL,
                   FABRIC_CQ,
                   FABRIC_SRQ,
                   FABRIC_QP,
                   FABRIC_AH,
                   FABRIC_EVENT_CHANNEL,
                   FABRIC_ID,
                   FABRIC_KINDS,
};

void fabric_lock(void);
/* Take what is due, then leave. */
void fabric_unlock(void);
/* Leave at once; for the service thread. */
void fabric_release(void);
/* Wait, without the lock, until another thread has called fabric_changed(). */
void fabric_wait(void);
void fabric_changed(void);

fabric_time fabric_now(void);
void fabric_timer_set(struct fabric_timer *timer, fabric_time due);
void fabric_timer_clear(struct fabric_timer *timer);

/* Random bits of the world's seed: the same in each run of a simulation. */
uint64_t fabric_random(void);

/* Objects of a process that has forked since belong to the parent: nothing of theirs may be done.
 * Each object notes the number at its birth. */
unsigned fabric_generation(void);

void fabric_born(enum fabric_kind kind);
void fabric_gone(enum fabric_kind kind);

/* Whether this call is to fail for a fault that was asked for; errno is then set. */
bool fabric_fails(const char *call);
/* Whether any was; without the lock. */
bool fabric_has_faults(void);
/* An adapter works beside the program: in a simulation, steps may come in the middle of a call that
 * posts, polls or arms. Without the lock. */
void fabric_meanwhile(void);
/* A message of a reliable connection has found no receive. */
void fabric_overrun(void);
/* A call was for a queue that a thread destroys. */
void fabric_misuse(void);
/* How late completions are to come, in nanoseconds. */
fabric_time fabric_completion_delay(void);
/* Whether those of a queue pair that is gone stay in their queue, for a fault. */
bool fabric_completions_stay(void);
/* After what time the connection manager repeats what was not answered; 0: its own. */
fabric_time fabric_cm_response(void);

/* Notes that a simulation holds back; world.c chooses among them. */
extern struct fabric_list fabric_late_notes;

/* ---- feeds: events behind a descriptor on which a loop can wait (feed.c) --------------------- */

struct fabric_note { /* first in each event, which malloc() gave */
    struct fabric_list links;
    void *about; /* the object that it tells of */
    struct fabric_feed *feed;
};

/*
 * The descriptor is an eventfd that counts the notes: it is readable while there is one, O_NONBLOCK
 * works, and two readers do not get the same one.
 */
struct fabric_feed {
    int fd;
    unsigned generation;
    struct fabric_list notes;
};

/* 0, or -1 and errno. */
int fabric_feed_open(struct fabric_feed *feed);
void fabric_feed_close(struct fabric_feed *feed);
/* With the lock. A simulation lets the note come a step later. The note is the feed's. */
void fabric_feed_push(struct fabric_feed *feed, struct fabric_note *note);
/* Now; for world.c. */
void fabric_feed_give(struct fabric_note *note);
/* For a call, without the lock; waits if the descriptor blocks. NULL and errno: EAGAIN, EINTR,
 * EBADF. */
struct fabric_note *fabric_feed_take(struct fabric_feed *feed, const char *call);
/* With the lock: free the notes about an object; the number of those that were dropped. */
unsigned fabric_feed_drop(struct fabric_feed *feed, void *about);
/* With the lock: give the notes about an object to another feed, in their order. */
void fabric_feed_move(struct fabric_feed *from, struct fabric_feed *to, void *about);

/* ---- profiles (profile.c) -------------------------------------------------------------------- */

/*
 * How an adapter departs from the book, and its limits.  The file of a profile has a line
 * `name = value` for each member that is not as in the profile `standard`.
 */
struct fabric_profile {
    /* Names and numbers that a program reads. */
    char name[32];   /* of the profile */
    char device[32]; /* names are this and a number */
    char firmware[32];
    int vendor_id, vendor_part_id, hw_ver;
    int iwarp;           /* its transport is iWARP: no UD, no atomics, connections by the manager */
    int infiniband_link; /* the link layer is InfiniBand, with LIDs; else Ethernet (RoCE) */
    int gid_versions;    /* bits: 1: a GID for RoCE v1, 2: for v2 */
    int mtu;             /* bytes of a packet that the port sends: 256 to 4096 */
    int page_sizes;      /* page_size_cap */

    /* Limits. */
    int64_t max_mr_size;
    int max_qp, max_qp_wr, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
    int max_qp_rd_atom, max_qp_init_rd_atom, max_ah, max_mw, max_srq, max_srq_wr, max_srq_sge;
    int max_mcast_grp, max_mcast_qp_attach, max_pkeys, max_inline;
    int comp_vectors;
    int retry_timeout_min; /* the smallest exponent of an ACK timeout that the adapter keeps */
    int ack_delay;         /* local_ca_ack_delay, an exponent likewise */

    /* Abilities. */
    int atomics;         /* 0: none, 1: of the adapter, 2: with the processor's, too */
    int windows;         /* bits: 1: type 1, 2: type 2A, 4: type 2B */
    int send_invalidate; /* and local invalidation */
    int immediate;       /* SEND and WRITE with immediate data */
    int solicited;       /* a completion channel can wait for solicited completions only */
    int zero_based;      /* regions whose addresses begin with zero */
    int on_demand;       /* regions without pinned pages */
    int resize_cq;
    int srq;
    int extended_cq; /* ibv_create_cq_ex() */
    int extended_qp; /* ibv_create_qp_ex(), and ibv_wr_start() with what follows it */
    int timestamps;  /* of completions */

    /* Habits. The standard's is 0, unless a line says otherwise. */
    int cqe_round_up;     /* a queue has at least what was asked for: 1: up to 2^n - 1; 2: to 2^n */
    int wr_round_up;      /* likewise the queues of a queue pair */
    int arm_tells_missed; /* arming a queue with completions in it gives an event at once */
    int overrun_is_silent;          /* a full completion queue loses, and tells nothing */
    int read_needs_write;           /* the local memory of a READ needs the right of REMOTE_WRITE */
    int vendor_errors;              /* vendor_err of a failed completion is not zero */
    int no_comm_established;        /* no event COMM_EST */
    int no_last_wqe;                /* no event LAST_WQE_REACHED */
    int no_timewait;                /* the connection manager tells no TIMEWAIT_EXIT */
    int no_qp_errors;               /* no events QP_ACCESS_ERR, QP_REQ_ERR and QP_FATAL */
    int local_faults_flush;         /* a send that fails for memory of its own ends as flushed */
    int receive_faults_operational; /* one that is too short, or not writable: LOC_QP_OP_ERR */
    int failures_unsolicited; /* failed completions do not wake who waits for solicited ones */
    int posts_negative;       /* the functions of posting return an errno with a minus */
    int sent_is_done; /* a refusal ends the connection, and changes no completion but a READ's */
    int srq_fixed;    /* a shared queue can neither be asked for its state nor grow */
    int completions_stay; /* in the queue, when their queue pair is destroyed or reset */
};

extern struct fabric_profile fabric_profile;
/* Read the file that the environment names; once, before the first device is listed. */
void fabric_profile_load(void);
/* The environment asks for what cannot be: say so, and end the process. */
_Noreturn void fabric_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- devices (device.c) ---------------------------------------------------------------------- */

struct fabric_gid {
    union ibv_gid gid;
    enum ibv_gid_type type; /* IBV_GID_TYPE_IB, _ROCE_V1, _ROCE_V2 */
    bool used;
};

/* An adapter, the same in each process of the run. */
struct fabric_device {
    struct ibv_device ibv;
    unsigned number;           /* from 0 */
    uint64_t guid;             /* network order */
    enum ibv_port_state state; /* no packet crosses a port that is not active */
    bool removed;              /* nobody finds it any more */
    bool unaddressed;          /* its addresses are gone, and their GIDs */
    uint16_t lid;
    struct fabric_gid gids[FABRIC_GIDS];
    struct sockaddr_storage addresses[FABRIC_GIDS];
    unsigned address_count;
};

struct fabric_context {
    struct fabric_device *device;
    struct fabric_feed events; /* asynchronous ones; its descriptor is async_fd */
    struct fabric_list links;  /* of all contexts */
    unsigned generation;
    unsigned objects;           /* that are there: closing leaves them, as the man page says */
    struct verbs_context verbs; /* last, as its own struct ibv_context is */
};

static inline struct fabric_context *fabric_context(struct ibv_context *context)
{
    return FABRIC_CONTAINER(context, struct fabric_context, verbs.context);
}

extern struct fabric_list fabric_contexts;

/* All devices; the lock is held. */
struct fabric_device *fabric_device(unsigned number);
unsigned fabric_device_count(void);
/* The addresses of a device go or come back, with their GIDs. */
void fabric_device_address(struct fabric_device *device, bool present);
/* All devices are as at the beginning, whatever has happened to them. */
void fabric_devices_anew(void);
/* The device that has an address (its port does not matter); NULL: none. Any of a wildcard. */
struct fabric_device *fabric_device_of_address(const struct sockaddr *address);
/* Whether a host with this address would be on the network of one of the devices. */
bool fabric_is_neighbor(const struct sockaddr *address);
/* The device that has a GID, and the index there; NULL: none. */
struct fabric_device *fabric_device_of_gid(const union ibv_gid *gid, unsigned *index);
struct fabric_device *fabric_device_of_lid(uint16_t lid);
/* The index of the GID that an address of a device has, of the newest type; -1: none. */
int fabric_gid_index(struct fabric_device *device, const struct sockaddr *address);
void fabric_address_to_gid(const struct sockaddr *address, union ibv_gid *gid);
/* Open a device as ibv_open_device() does; without the lock. NULL and errno. */
struct ibv_context *fabric_open(struct fabric_device *device);

/* How many places a port's tables have. */
unsigned fabric_gid_table_length(void);
unsigned fabric_pkey_table_length(void);

/* An asynchronous event of a context; element: what is in event.element. */
void fabric_tell(struct fabric_context *context, enum ibv_event_type type, void *element);

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

struct fabric_pd {
    struct ibv_pd ibv;
    struct fabric_context *context;
    unsigned users;
};

struct fabric_mr {
    struct ibv_mr ibv;
    struct fabric_pd *pd;
    uint64_t iova; /* what the peer calls the first byte */
    unsigned access, windows;
    bool invalid; /* by LOCAL_INV or SEND_WITH_INV; only windows can be */
};

struct fabric_mw {
    struct ibv_mw ibv;
    struct fabric_pd *pd;
    struct fabric_mr *mr; /* NULL: not bound */
    struct fabric_qp *qp; /* of type 2: the one that may use it */
    uint64_t address, length;
    unsigned access;
};

/* What a range of memory may be used for: 0, or an errno-like number of the fault. */
enum fabric_fault { FABRIC_FINE, FABRIC_NO_KEY, FABRIC_NO_RIGHT, FABRIC_NO_BYTES };

/* Own memory of a queue pair's domain: the address is in *where. write: bytes come into it. */
enum fabric_fault fabric_local(struct fabric_pd *pd, uint32_t lkey, uint64_t address,
                               uint64_t length, unsigned access, void **where);
/* What a peer names, by the key of a region or of a window. */
enum fabric_fault fabric_remote(struct fabric_qp *qp, uint32_t rkey, uint64_t address,
                                uint64_t length, unsigned access, void **where);
/* Copy to and from memory of a region, which the program may have unmapped since. */
void fabric_memory_write(void *where, const void *from, size_t length);
void fabric_memory_read(void *into, const void *where, size_t length);
/* 0, or an errno: bind a window to a region, or to nothing (length 0). */
int fabric_bind(struct fabric_qp *qp, struct fabric_mw *mw, uint32_t rkey,
                const struct ibv_mw_bind_info *info);
/* false: the key cannot be invalidated. */
bool fabric_invalidate(struct fabric_qp *qp, uint32_t rkey);
void fabric_windows_of_qp_gone(struct fabric_qp *qp);

/* Objects by a number; of keys the low eight bits change with each use. */
struct fabric_table {
    void **items;
    unsigned size, used, next;
};
/* The index, or 0 where there is no memory or more than `most` are there; 0 is never an index. */
unsigned fabric_table_add(struct fabric_table *table, void *item, unsigned most);
void *fabric_table_find(struct fabric_table *table, unsigned index);
void fabric_table_remove(struct fabric_table *table, unsigned index);

/* ---- completion queues, channels, shared receive queues (queue.c) ---------------------------- */

struct fabric_channel {
    struct ibv_comp_channel ibv;
    struct fabric_context *context;
    struct fabric_feed feed; /* its descriptor is ibv.fd */
};

struct fabric_cqe {
    struct ibv_wc wc;
    fabric_time at;
};

enum fabric_arm { FABRIC_DISARMED, FABRIC_ARM_ANY, FABRIC_ARM_SOLICITED };

struct fabric_cq {
    union {
        struct ibv_cq ibv;
        struct ibv_cq_ex ex;
    };
    struct fabric_context *context;
    struct fabric_channel *channel;
    struct fabric_cqe *ring;
    unsigned size, head, count; /* size: of the ring, ibv.cqe and more */
    enum fabric_arm arm;
    bool overrun;              /* no completion comes any more */
    bool leaves;               /* a thread destroys it */
    unsigned empty_polls;      /* no lock holds it: it only counts */
    bool polling;              /* between ibv_start_poll and ibv_end_poll */
    bool one_thread;           /* the program lets only one thread at a time poll */
    struct fabric_cqe current; /* the one that ibv_start_poll or ibv_next_poll has taken */
    unsigned generation, users, told, acked; /* told: events that ibv_get_cq_event has given */
    unsigned async_told, async_acked;
    uint64_t wc_flags;         /* of ibv_create_cq_ex */
    struct fabric_list links;  /* of all queues */
    struct fabric_list late;   /* completions that come later, for a fault */
    struct fabric_list strays; /* likewise, whatever becomes of their queue pair */
};

/* NULL and errno. The lock is held. */
struct fabric_cq *fabric_cq_create(struct fabric_context *context, int cqe, void *cq_context,
                                   struct ibv_comp_channel *channel, int comp_vector);
/* Add a completion. `solicited`: it is an answer to a SEND with the bit, or an error. */
void fabric_complete(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Forget the completions of a queue pair that is destroyed or reset. */
void fabric_cq_clean(struct fabric_cq *cq, uint32_t qp_num);
/* Take one; false: there is none. The lock is held. */
bool fabric_cq_take(struct fabric_cq *cq, struct fabric_cqe *into);

struct fabric_recv { /* a buffer that waits for a message */
    uint64_t wr_id;
    unsigned sges;
    struct ibv_sge sge[FABRIC_SGES];
};

struct fabric_recv_ring {
    struct fabric_recv *items;
    unsigned size, head, count;
};

int fabric_recv_ring_init(struct fabric_recv_ring *ring, unsigned size);
/* 0, or an errno. */
int fabric_recv_add(struct fabric_recv_ring *ring, const struct ibv_recv_wr *wr, unsigned max_sge);

struct fabric_srq {
    struct ibv_srq ibv;
    struct fabric_pd *pd;
    struct fabric_recv_ring ring;
    unsigned max_wr, max_sge, limit, users, generation;
    unsigned async_told, async_acked;
};

/* ---- queue pairs (qp.c, requester.c, responder.c, datagram.c) -------------------------------- */

enum fabric_wqe_state {
    FABRIC_WAITS,
    FABRIC_SENT,   /* its packets have numbers; they may have to be sent again */
    FABRIC_DONE,   /* it completes when those before it have */
    FABRIC_FAILED, /* likewise, with `status` */
};

struct fabric_wqe { /* a send request */
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    enum ibv_wc_opcode done_as;
    unsigned flags;
    enum fabric_wqe_state state;
    enum ibv_wc_status status;
    uint32_t imm_or_key; /* network order of immediate data; the key to invalidate */
    uint64_t remote;
    uint32_t rkey;
    uint64_t length; /* of all bytes */
    unsigned sges;
    struct ibv_sge sge[FABRIC_SGES];
    unsigned char *inlined; /* the bytes, of IBV_SEND_INLINE; in the slot's own memory */
    uint64_t compare, swap;
    uint32_t first_psn, last_psn;
    uint32_t answered; /* packets of a READ's answer that have come */
    struct ibv_ah *ah; /* of UD, as was posted; what it says is in to */
    struct fabric_to {
        union ibv_gid gid;
        uint16_t lid;
        uint8_t sgid_index, sl;
    } to;
    uint32_t remote_qpn, remote_qkey;
    struct fabric_mw *mw; /* of IBV_WR_BIND_MW */
    struct ibv_mw_bind_info bind;
};

/* What was answered to a READ or an atomic, to be answered again if the answer is lost. */
struct fabric_resource {
    uint32_t first_psn, last_psn;
    bool atomic;
    uint64_t value; /* of an atomic: what was there */
};

struct fabric_qp {
    union {
        struct ibv_qp ibv;
        struct ibv_qp_ex ex;
    };
    struct fabric_context *context;
    struct fabric_pd *pd;
    struct fabric_cq *send_cq, *recv_cq;
    struct fabric_srq *srq;
    struct ibv_qp_cap cap;
    struct ibv_qp_attr attr; /* as was set */
    bool sig_all, grh;
    unsigned generation, async_told, async_acked, multicast;
    struct fabric_device *peer; /* of the address in attr.ah_attr; NULL: nobody has it */

    /* The requester: what was posted, from the oldest that has not completed. */
    struct fabric_wqe *sends;
    unsigned char *inlined;
    unsigned send_size, send_head, send_count;
    unsigned send_next;       /* offset from the head of the next one to be sent */
    uint32_t send_packet;     /* packets of it that were sent */
    uint32_t next_psn;        /* of the next packet */
    uint32_t oldest_psn;      /* that was not acknowledged */
    uint32_t peer_psn;        /* that the peer waits for, as its last NAK of the order said */
    unsigned reads_out;       /* READs and atomics that were not answered */
    int retries, rnr_retries; /* that are left */
    bool rnr_waits, draining, resent; /* resent: since something came the last time */
    struct fabric_timer ack_timer, rnr_timer;
    /* ibv_wr_start() to ibv_wr_complete(): those that are not posted yet */
    unsigned staged;
    int staged_error;
    bool staging;
    pthread_t stager;
    struct fabric_wqe *staged_wqe; /* the one that the setters are about; NULL: none */
    uint64_t send_ops;             /* requests that the program has named: others are refused */

    /* The responder. */
    struct fabric_recv_ring recvs;
    uint32_t expected_psn, msn;
    bool nak_sent, established;
    struct fabric_recv current; /* the buffer of the message that is coming */
    bool has_current, in_write, in_send;
    uint64_t received; /* bytes of it */
    uint64_t write_address, write_left;
    uint32_t write_rkey;
    struct fabric_resource *resources;
    unsigned resource_size, resource_next;

    struct fabric_list links;
};

static inline struct fabric_qp *fabric_qp(struct ibv_qp *qp)
{
    return FABRIC_CONTAINER(qp, struct fabric_qp, ibv);
}

/* Bytes of all its pieces. */
uint64_t fabric_recv_room(const struct fabric_recv *recv);
/* The oldest receive of a queue pair, or of its shared queue; NULL: there is none. */
struct fabric_recv *fabric_recv_first(struct fabric_qp *qp);
/* Take it out; false: there is none. */
bool fabric_recv_take(struct fabric_qp *qp, struct fabric_recv *into);

enum { FABRIC_PSN_MASK = 0xffffff }; /* the numbers of packets have 24 bits */

/* How far one number is behind another; negative: it is before it. */
static inline int32_t fabric_psn_from(uint32_t psn, uint32_t other)
{
    return (int32_t)((psn - other) << 8) >> 8;
}

/* Bytes of a packet of a connection. */
uint32_t fabric_mtu_of(const struct fabric_qp *qp);

extern struct fabric_list fabric_qps;
extern struct fabric_list fabric_ids; /* of the connection manager */
struct fabric_qp *fabric_qp_find(uint32_t number);

/* The state after something went wrong: all that waits completes as flushed. */
void fabric_qp_error(struct fabric_qp *qp);
/* NULL and errno. The lock is held. */
struct fabric_qp *fabric_qp_create(struct fabric_pd *pd, struct ibv_qp_init_attr_ex *attr);
/* For the connection manager: modify as ibv_modify_qp() does, the lock is held. An errno, or 0. */
int fabric_qp_modify(struct fabric_qp *qp, const struct ibv_qp_attr *attr, int mask);
/* The peer of an address. */
struct fabric_device *fabric_to_device(const struct fabric_to *to);
struct fabric_to fabric_to_of_attr(const struct ibv_ah_attr *attr);

/* A send request of the plain interface, copied into the queue. An errno, or 0. */
int fabric_post_one(struct fabric_qp *qp, const struct ibv_send_wr *wr);
/*
 * The same in parts, for ibv_wr_start() and what follows it: room for the next request, zeroed
 * (NULL: the queue is full); a check of what was filled in (an errno, or 0); and at the end as many
 * as were staged are posted.
 */
struct fabric_wqe *fabric_wqe_next(struct fabric_qp *qp);
int fabric_wqe_check(struct fabric_qp *qp, struct fabric_wqe *wqe);
void fabric_post_staged(struct fabric_qp *qp);
/* Wait until no other thread is between ibv_wr_start() and its end. 0, or EINVAL: this one is. */
int fabric_staging_wait(struct fabric_qp *qp);
/* Send what may be sent; what waits goes out when answers come. */
void fabric_requester_run(struct fabric_qp *qp);
void fabric_requester_flush(struct fabric_qp *qp);
void fabric_ack_timer_ring(struct fabric_timer *timer);
void fabric_rnr_timer_ring(struct fabric_timer *timer);
void fabric_requester_init(struct fabric_qp *qp);
void fabric_responder_init(struct fabric_qp *qp);
void fabric_responder_flush(struct fabric_qp *qp);
void fabric_send_datagram(struct fabric_qp *qp, struct fabric_wqe *wqe);
/* Complete a send request, and all before it that asked for no completion. */
void fabric_wqe_end(struct fabric_qp *qp, struct fabric_wqe *wqe, enum ibv_wc_status status);

/* Bytes of a request's or a buffer's memory, from an offset: false with a fault. */
enum fabric_fault fabric_gather(struct fabric_qp *qp, const struct fabric_wqe *wqe, uint64_t offset,
                                void *into, uint64_t length);
enum fabric_fault fabric_scatter(struct fabric_pd *pd, const struct ibv_sge *sge, unsigned sges,
                                 uint64_t offset, const void *from, uint64_t length);

struct fabric_ah {
    struct ibv_ah ibv;
    struct fabric_pd *pd;
    struct ibv_ah_attr attr;
};

/* ---- calls behind the functions of verbs.h: device.c puts them into each context ------------- */

int fabric_poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc);
int fabric_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int fabric_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int fabric_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
int fabric_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
struct ibv_mw *fabric_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int fabric_dealloc_mw(struct ibv_mw *mw);
int fabric_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* query.c */
int fabric_query_device_ex(struct ibv_context *context,
                           const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size);
int fabric_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                      size_t size);
int fabric_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);
/* extended.c */
struct ibv_cq_ex *fabric_create_cq_ex(struct ibv_context *context,
                                      struct ibv_cq_init_attr_ex *attr);
int fabric_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
struct ibv_qp *fabric_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* ---- packets (packet.c, wire.c) -------------------------------------------------------------- */

enum fabric_opcode {
    /* Requests of RC. A message is one packet with FIRST and LAST, or more. */
    FABRIC_SEND,
    FABRIC_WRITE,
    FABRIC_READ,
    FABRIC_ATOMIC,
    /* Answers. */
    FABRIC_ACK,
    FABRIC_READ_ANSWER,
    FABRIC_ATOMIC_ANSWER,
    /* UD. */
    FABRIC_DATAGRAM,
    /* The connection manager's. */
    FABRIC_CM,
    /* Never sent: a process has ended, and all that it had sent has come. */
    FABRIC_GONE,
};

enum fabric_packet_flags {
    FABRIC_FIRST = 1,
    FABRIC_LAST = 2,
    FABRIC_SOLICITED = 4,
    FABRIC_IMMEDIATE = 8,
    FABRIC_INVALIDATE = 16,
    FABRIC_ACK_REQUEST = 32,
    FABRIC_MULTICAST = 64,
    FABRIC_COMPARE = 128, /* of an atomic: compare and swap; else fetch and add */
};

enum fabric_syndrome { /* of an ACK */
                       FABRIC_IS_ACK,
                       FABRIC_RNR,
                       FABRIC_NAK_SEQUENCE,
                       FABRIC_NAK_REQUEST,
                       FABRIC_NAK_ACCESS,
                       FABRIC_NAK_OPERATIONAL,
};

/* All that is sent; a packet of another process comes with these bytes before its own. */
struct fabric_header {
    uint8_t opcode, flags, syndrome, rnr_timer;
    uint16_t slot; /* of the process that it goes to */
    uint16_t from_slot;
    uint8_t from_device, to_device;
    uint16_t from_lid;
    uint32_t to_qpn, from_qpn;
    uint32_t psn, msn;
    uint32_t imm_or_key, qkey, rkey;
    uint64_t address, length;  /* of the memory of a WRITE, READ or atomic */
    uint64_t operand, compare; /* of an atomic; the answer's value is operand */
    union ibv_gid from_gid, to_gid;
    uint8_t sl, gid_type;
    uint32_t size; /* of the bytes that follow */
};

struct fabric_packet {
    struct fabric_list links;
    fabric_time due;
    struct fabric_header header;
    unsigned char bytes[];
};

/* A packet with room for so many bytes; its header is zero. NULL: no memory. */
struct fabric_packet *fabric_packet_new(uint32_t size);
struct fabric_packet *fabric_packet_copy(const struct fabric_packet *packet);
/* Let it go its way; the packet is the wire's. */
void fabric_packet_send(struct fabric_packet *packet);
/* It has come: called by the world, in a step. The packet stays the caller's. */
void fabric_packet_arrived(struct fabric_packet *packet);
void fabric_requester_arrived(struct fabric_qp *qp, struct fabric_packet *packet);
void fabric_responder_arrived(struct fabric_qp *qp, struct fabric_packet *packet);
void fabric_datagram_arrived(struct fabric_packet *packet);
void fabric_cm_arrived(struct fabric_packet *packet);

/* The process of a queue pair, from its number; those of the run are 1 to FABRIC_SLOTS. */
static inline unsigned fabric_slot_of(uint32_t qpn)
{
    return qpn / FABRIC_QPS;
}

/* The number of this process in the run; it joins if it has not. */
unsigned fabric_slot(void);
/* A process has ended: what it was connected with hears so. */
void fabric_cm_process_gone(unsigned slot);
/* Tell each id of a device; its own end is that of the device, if it is removed. */
void fabric_cm_incident(const struct fabric_device *device, enum rdma_cm_event_type type,
                        int status);

/* ---- what all processes of a run know (registry.c) ------------------------------------------- */

/* A port of the connection manager that somebody has bound. */
struct fabric_port {
    uint16_t slot;  /* 0: unused */
    uint16_t space; /* enum rdma_port_space */
    uint16_t port;  /* host order */
    uint8_t family; /* AF_INET or AF_INET6 */
    uint8_t any;    /* bound to no address of its own */
    uint8_t only;   /* IPv6 without IPv4 */
    uint8_t reuse, listens;
    uint8_t address[16];
    uint32_t number; /* of the id in its process */
};

/* Bind: `port` 0 chooses a free one. 0, or an errno (EADDRINUSE). The entry is in *index. */
int fabric_port_bind(struct fabric_port *wanted, unsigned *index);
int fabric_port_listen(unsigned index);
void fabric_port_free(unsigned index);
/* Who listens there: false: nobody. */
bool fabric_port_find(uint16_t space, const struct sockaddr *address, struct fabric_port *found);
/* The processes of the run that are alive: one bit each, (slot / 64, slot % 64). */
void fabric_slots_alive(uint64_t bits[(FABRIC_SLOTS + 64) / 64]);

/* A simulation takes the steps: world.c. */
extern bool fabric_is_stepped;

/* ---- between processes (wire.c) -------------------------------------------------------------- */

/* To another process of the run; the packet is the wire's. */
void fabric_wire_send(struct fabric_packet *packet);
/* The service thread waits for sockets and for the moment `due`; then it holds the lock. */
void fabric_wire_wait(fabric_time due);
/* Without the lock: take what has come, and do not wait. */
void fabric_wire_read(void);
/* Wake the service thread: something is due earlier. */
void fabric_wire_wake(void);
/* In the child of a fork: the sockets are the parent's. */
void fabric_wire_forget(void);
void fabric_registry_forget(void);
/* Start the thread that keeps time and reads sockets; the lock is held. */
void fabric_service_start(void);
/* A packet is on its way to this process: world.c. */
void fabric_enqueue(struct fabric_packet *packet);
/* The folder of the run; NULL: this process is alone. */
const char *fabric_folder(void);

#endif
