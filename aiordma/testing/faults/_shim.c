/*
 * Faults of RDMA on a device, for `aiordma.testing.faults`: calls that fail, events that are lost,
 * requests that the adapter gets late, and things that happen just before a request is posted.
 *
 * The data path of verbs is called through the table `ops` of a device's context: its entries are
 * replaced.  All other calls go through the global offset table (GOT) of the object that calls:
 * the entries of all loaded objects are replaced there, but for those of libibverbs and its
 * drivers.  shim_begin() does both, and shim_end() puts back what was there.  The wrappers stay
 * valid afterwards, because a thread may just be in one of them.
 *
 * Nothing here calls Python, so that it does not matter which thread posts, or what it holds.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* Macros that look at the arguments; what is replaced are the functions. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define SHIM_API  __attribute__((visibility("default")))
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

enum { FAULTS = 64, MOMENTS = 64, CONTEXTS = 64 };

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOB_DAT  R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOB_DAT  R_AARCH64_GLOB_DAT
#endif

/* A call that is to fail, as the fabric has it (world.c). */
struct fault {
    char call[48];
    int64_t calls_left; /* before it */
    int64_t times;      /* how often, then; -1: always */
    int64_t struck;     /* how often it has */
    int number;         /* errno */
    bool used;
};

/* Something that happens just before a send request is posted. */
struct moment {
    bool used;
    struct ibv_qp *qp; /* of this queue pair; NULL: of any */
    bool over;         /* it has come, or never will */
    int64_t requests_left, struck;
    struct rdma_cm_id *id; /* of the connection that ends; NULL: silently */
    pid_t process;         /* that is killed; 0: the connection ends */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[FAULTS];
static struct moment moments[MOMENTS];
static int active; /* faults and moments that are set: without them no lock is taken */

/* ---- faults --------------------------------------------------------------------------------- */

static bool fails(const char *call)
{
    bool found = false;

    if (!__atomic_load_n(&active, __ATOMIC_ACQUIRE))
        return false;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < FAULTS && !found; i++) {
        struct fault *fault = &faults[i];

        if (!fault->used || !fault->times || strcmp(fault->call, call) != 0)
            continue;
        if (fault->calls_left > 0) {
            fault->calls_left--;
            continue;
        }
        if (fault->times > 0)
            fault->times--;
        fault->struck++;
        errno = fault->number;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* As fabric_fault_add(). */
SHIM_API int shim_fault_add(const char *call, int64_t calls, int64_t times, int number)
{
    int result = -1;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < FAULTS && result < 0; i++) {
        if (faults[i].used || strlen(call) >= sizeof(faults[i].call))
            continue;
        faults[i] =
            (struct fault){.calls_left = calls, .times = times, .number = number, .used = true};
        memcpy(faults[i].call, call, strlen(call));
        __atomic_add_fetch(&active, 1, __ATOMIC_RELEASE);
        result = i;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

SHIM_API int64_t shim_fault_struck(int number)
{
    int64_t struck;

    pthread_mutex_lock(&lock);
    struck = faults[number].struck;
    pthread_mutex_unlock(&lock);
    return struck;
}

SHIM_API int shim_fault_clear(int number)
{
    pthread_mutex_lock(&lock);
    faults[number].used = false;
    __atomic_sub_fetch(&active, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- moments -------------------------------------------------------------------------------- */

/*
 * The connection ends: the requests under way are flushed, and with an id the peer hears of the
 * end, as if the kernel had ended what a killed process leaves.  Without one it hears nothing,
 * where the transport allows that.
 */
SHIM_API int shim_end_connection(struct ibv_qp *qp, struct rdma_cm_id *id)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE);

    /* On iWARP it may be over by now, for the peer as well. */
    if (id)
        rdma_disconnect(id);
    return error;
}

static void act(const struct moment *moment, struct ibv_qp *qp)
{
    if (moment->process)
        kill(moment->process, SIGKILL);
    else
        shim_end_connection(qp, moment->id);
}

/* A request is about to be posted. */
static void moments_pass(struct ibv_qp *qp)
{
    if (!__atomic_load_n(&active, __ATOMIC_ACQUIRE))
        return;
    for (unsigned i = 0; i < MOMENTS; i++) {
        struct moment now = {.used = false};

        pthread_mutex_lock(&lock);
        if (moments[i].used && !moments[i].over && (!moments[i].qp || moments[i].qp == qp) &&
            moments[i].requests_left-- <= 0) {
            moments[i].over = true;
            moments[i].struck = 1;
            now = moments[i];
        }
        pthread_mutex_unlock(&lock);
        if (now.used)
            act(&now, qp);
    }
}

/* The number of the moment; -1: there are too many. */
SHIM_API int shim_moment_add(struct ibv_qp *qp, int64_t requests, struct rdma_cm_id *id,
                             int process)
{
    int result = -1;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOMENTS && result < 0; i++) {
        if (moments[i].used)
            continue;
        moments[i] = (struct moment){
            .used = true, .qp = qp, .requests_left = requests, .id = id, .process = process};
        __atomic_add_fetch(&active, 1, __ATOMIC_RELEASE);
        result = i;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

SHIM_API int64_t shim_moment_struck(int number)
{
    int64_t struck;

    pthread_mutex_lock(&lock);
    struck = moments[number].struck;
    pthread_mutex_unlock(&lock);
    return struck;
}

SHIM_API int shim_moment_clear(int number)
{
    pthread_mutex_lock(&lock);
    moments[number].used = false;
    __atomic_sub_fetch(&active, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* The queue pair is destroyed, and another one may get its address. */
static void moments_forget(const struct ibv_qp *qp)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < MOMENTS; i++)
        if (moments[i].used && moments[i].qp == qp)
            moments[i].over = true;
    pthread_mutex_unlock(&lock);
}

/* ---- contexts ------------------------------------------------------------------------------- */

struct adopted {
    struct ibv_context *context; /* NULL: it is closed, or put back */
    struct ibv_context_ops real;
    struct ibv_context *was; /* a thread may be in a wrapper while it is put back */
};

static struct adopted contexts[CONTEXTS];

static const struct ibv_context_ops *real_of(const struct ibv_context *context)
{
    unsigned i = 0;

    while (__atomic_load_n(&contexts[i].was, __ATOMIC_ACQUIRE) != context)
        i++; /* it is there: else no wrapper would have been called */
    return &contexts[i].real;
}

/* ---- requests that the adapter gets late ---------------------------------------------------- */

/* A chain of send requests, with all that it points to. */
struct late {
    struct late *next;
    struct ibv_qp *qp;
    int64_t due;
    struct ibv_send_wr wr;
    struct ibv_sge sge[];
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t delay_ns, struck;
    struct late *first, **end;
    bool thread;
} late = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .end = &late.first,
};

static int64_t now_ns(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* A request of which the memory is its own: a program may use that of an inline one again. */
static struct late *copy_of(const struct ibv_send_wr *wr)
{
    size_t sges = (size_t)wr->num_sge * sizeof(*wr->sg_list), inlined = 0;
    struct late *copy;
    char *bytes;

    if (wr->send_flags & IBV_SEND_INLINE)
        for (int i = 0; i < wr->num_sge; i++)
            inlined += wr->sg_list[i].length;
    if (!(copy = malloc(sizeof(*copy) + sges + inlined)))
        return NULL;
    copy->wr = *wr;
    copy->wr.next = NULL;
    copy->wr.sg_list = copy->sge;
    if (wr->num_sge)
        memcpy(copy->sge, wr->sg_list, sges);
    bytes = (char *)copy->sge + sges;
    for (int i = 0; i < wr->num_sge && inlined; i++) {
        memcpy(bytes, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        copy->sge[i].addr = (uintptr_t)bytes;
        bytes += wr->sg_list[i].length;
    }
    return copy;
}

/* Give the adapter those that are due, or all; the lock is held. */
static void late_post(int64_t now)
{
    while (late.first && late.first->due <= now) {
        struct late *item = late.first;
        struct ibv_send_wr *bad;

        if (!(late.first = item->next))
            late.end = &late.first;
        /* The program has been told that it is posted: what is refused now ends the connection. */
        if (real_of(item->qp->context)->post_send(item->qp, &item->wr, &bad))
            shim_end_connection(item->qp, NULL);
        free(item);
    }
}

static void *late_serve(void *unused)
{
    pthread_mutex_lock(&late.lock);
    for (;;) {
        late_post(now_ns(CLOCK_MONOTONIC));
        if (late.first) {
            /* A condition waits by the clock of the calendar, if old C libraries are to have it. */
            int64_t at = now_ns(CLOCK_REALTIME) + late.first->due - now_ns(CLOCK_MONOTONIC);
            struct timespec due = {at / 1000000000, at % 1000000000};

            pthread_cond_timedwait(&late.changed, &late.lock, &due);
        } else {
            pthread_cond_wait(&late.changed, &late.lock);
        }
    }
    return unused;
}

/* The thread that posts; the lock is held. */
static bool late_start(void)
{
    pthread_attr_t attr;
    sigset_t all, before;
    pthread_t thread;

    if (late.thread)
        return true;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    /* Signals are the program's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    late.thread = !pthread_create(&thread, &attr, late_serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return late.thread;
}

/* Requests are held back for so long; 0: no longer, and those that are held are posted now. */
SHIM_API int shim_delay(int64_t delay_ns)
{
    bool can;

    pthread_mutex_lock(&late.lock);
    can = !delay_ns || late_start();
    late.delay_ns = can ? delay_ns : 0;
    if (!late.delay_ns)
        late_post(INT64_MAX);
    pthread_mutex_unlock(&late.lock);
    return can ? 0 : -1;
}

/* How many requests were held back since the beginning. */
SHIM_API int64_t shim_delayed(void)
{
    int64_t struck;

    pthread_mutex_lock(&late.lock);
    struck = late.struck;
    pthread_mutex_unlock(&late.lock);
    return struck;
}

static void late_forget(const struct ibv_qp *qp)
{
    pthread_mutex_lock(&late.lock);
    late.end = &late.first;
    while (*late.end) {
        struct late *item = *late.end;

        if (item->qp == qp) {
            *late.end = item->next;
            free(item);
        } else {
            late.end = &item->next;
        }
    }
    pthread_mutex_unlock(&late.lock);
}

/*
 * In other states the adapter refuses a request, and the program is to hear of it.  On iWARP the
 * connection manager brings a queue pair up, and libibverbs does not know its state.
 */
static bool takes_requests(const struct ibv_qp *qp)
{
    return qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_ERR ||
           qp->context->device->transport_type == IBV_TRANSPORT_IWARP;
}

/* Hold a chain back: false if it is to be posted now. */
static bool late_hold(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
    bool held = false;
    int64_t due;

    if (!__atomic_load_n(&late.delay_ns, __ATOMIC_ACQUIRE))
        return false;
    pthread_mutex_lock(&late.lock);
    if (late.delay_ns && takes_requests(qp)) {
        due = now_ns(CLOCK_MONOTONIC) + late.delay_ns;
        held = true;
        for (; wr && held; wr = wr->next) {
            struct late *copy = copy_of(wr);

            if (!copy)
                abort(); /* half of a chain, or requests in another order, were worse */
            copy->qp = qp;
            copy->due = due;
            copy->next = NULL;
            *late.end = copy;
            late.end = &copy->next;
            late.struck++;
        }
        pthread_cond_signal(&late.changed);
    }
    pthread_mutex_unlock(&late.lock);
    return held;
}

/* ---- the data path: entries of `ops` -------------------------------------------------------- */

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    moments_pass(qp);
    if (fails("ibv_post_send")) {
        *bad = wr;
        return errno;
    }
    if (late_hold(qp, wr))
        return 0;
    return real_of(qp->context)->post_send(qp, wr, bad);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    if (fails("ibv_post_recv")) {
        *bad = wr;
        return errno;
    }
    return real_of(qp->context)->post_recv(qp, wr, bad);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    if (fails("ibv_post_srq_recv")) {
        *bad = wr;
        return errno;
    }
    return real_of(srq->context)->post_srq_recv(srq, wr, bad);
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    return fails("ibv_poll_cq") ? -1 : real_of(cq->context)->poll_cq(cq, most, wc);
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    if (fails("ibv_req_notify_cq"))
        return errno;
    return real_of(cq->context)->req_notify_cq(cq, solicited_only);
}

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    return fails("ibv_alloc_mw") ? NULL : real_of(pd->context)->alloc_mw(pd, type);
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    return fails("ibv_bind_mw") ? errno : real_of(qp->context)->bind_mw(qp, mw, bind);
}

#define EACH_OP(X)                                                                                 \
    X(post_send) X(post_recv) X(post_srq_recv) X(poll_cq) X(req_notify_cq) X(alloc_mw) X(bind_mw)

/* Wrap the calls of a context; -1: there are too many. */
SHIM_API int shim_adopt(struct ibv_context *context)
{
    struct adopted *place = NULL;
    bool known = false;

    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < CONTEXTS; i++) {
        if (contexts[i].was == context) {
            known = contexts[i].context;
            place = known ? NULL : &contexts[i];
            break;
        }
        if (!place && !contexts[i].was)
            place = &contexts[i];
    }
    if (place) {
        place->context = context;
        place->real = context->ops;
        __atomic_store_n(&place->was, context, __ATOMIC_RELEASE);
        /* Where a driver has none, verbs.h says so itself. */
#define WRAP(name)                                                                                 \
    if (context->ops.name)                                                                         \
        __atomic_store_n(&context->ops.name, name, __ATOMIC_RELEASE);
        EACH_OP(WRAP)
#undef WRAP
    }
    pthread_mutex_unlock(&lock);
    return known || place ? 0 : -1;
}

/* A driver may have set an entry of its own meanwhile, which stays. */
static void contexts_put_back(void)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < CONTEXTS; i++) {
        struct ibv_context *context = contexts[i].context;

        if (!context)
            continue;
#define PUT_BACK(name)                                                                             \
    if (context->ops.name == name)                                                                 \
        __atomic_store_n(&context->ops.name, contexts[i].real.name, __ATOMIC_RELEASE);
        EACH_OP(PUT_BACK)
#undef PUT_BACK
        contexts[i].context = NULL;
    }
    pthread_mutex_unlock(&lock);
}

static void context_forget(const struct ibv_context *context)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < CONTEXTS; i++)
        if (contexts[i].was == context)
            contexts[i].context = contexts[i].was = NULL;
    pthread_mutex_unlock(&lock);
}

/* ---- all other calls ------------------------------------------------------------------------ */

#define POINTER(type, name, call, parameters, arguments)                                           \
    static struct type *own_##name parameters                                                      \
    {                                                                                              \
        return fails(call) ? NULL : name arguments;                                                \
    }
#define ERROR(name, parameters, arguments)                                                         \
    static int own_##name parameters                                                               \
    {                                                                                              \
        return fails(#name) ? errno : name arguments;                                              \
    }
#define MINUS_ONE(name, parameters, arguments)                                                     \
    static int own_##name parameters                                                               \
    {                                                                                              \
        return fails(#name) ? -1 : name arguments;                                                 \
    }

/* clang-format off */
POINTER(ibv_pd, ibv_alloc_pd, "ibv_alloc_pd", (struct ibv_context *context), (context))
POINTER(ibv_mr, ibv_reg_mr, "ibv_reg_mr",
        (struct ibv_pd *pd, void *address, size_t length, int access),
        (pd, address, length, access))
POINTER(ibv_mr, ibv_reg_mr_iova, "ibv_reg_mr",
        (struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access),
        (pd, address, length, iova, access))
POINTER(ibv_mr, ibv_reg_mr_iova2, "ibv_reg_mr",
        (struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access),
        (pd, address, length, iova, access))
POINTER(ibv_comp_channel, ibv_create_comp_channel, "ibv_create_comp_channel",
        (struct ibv_context *context), (context))
POINTER(ibv_cq, ibv_create_cq, "ibv_create_cq",
        (struct ibv_context *context, int cqe, void *data, struct ibv_comp_channel *channel, int vector),
        (context, cqe, data, channel, vector))
POINTER(ibv_srq, ibv_create_srq, "ibv_create_srq",
        (struct ibv_pd *pd, struct ibv_srq_init_attr *attr), (pd, attr))
POINTER(ibv_qp, ibv_create_qp, "ibv_create_qp",
        (struct ibv_pd *pd, struct ibv_qp_init_attr *attr), (pd, attr))
POINTER(ibv_ah, ibv_create_ah, "ibv_create_ah",
        (struct ibv_pd *pd, struct ibv_ah_attr *attr), (pd, attr))
POINTER(rdma_event_channel, rdma_create_event_channel, "rdma_create_event_channel", (void), ())
ERROR(ibv_modify_qp, (struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask), (qp, attr, mask))
ERROR(ibv_attach_mcast, (struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid), (qp, gid, lid))
MINUS_ONE(rdma_create_id,
          (struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
           enum rdma_port_space space),
          (channel, id, context, space))
MINUS_ONE(rdma_bind_addr, (struct rdma_cm_id *id, struct sockaddr *address), (id, address))
MINUS_ONE(rdma_resolve_addr,
          (struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout_ms),
          (id, from, to, timeout_ms))
MINUS_ONE(rdma_resolve_route, (struct rdma_cm_id *id, int timeout_ms), (id, timeout_ms))
MINUS_ONE(rdma_listen, (struct rdma_cm_id *id, int backlog), (id, backlog))
MINUS_ONE(rdma_connect, (struct rdma_cm_id *id, struct rdma_conn_param *param), (id, param))
MINUS_ONE(rdma_accept, (struct rdma_cm_id *id, struct rdma_conn_param *param), (id, param))
MINUS_ONE(rdma_establish, (struct rdma_cm_id *id), (id))
MINUS_ONE(rdma_reject, (struct rdma_cm_id *id, const void *data, uint8_t length), (id, data, length))
MINUS_ONE(rdma_disconnect, (struct rdma_cm_id *id), (id))
/* clang-format on */

static int own_rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *address, void *context)
{
    return fails("rdma_join_multicast") ? -1 : rdma_join_multicast(id, address, context);
}

static int own_rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr,
                                      void *context)
{
    return fails("rdma_join_multicast") ? -1 : rdma_join_multicast_ex(id, attr, context);
}

static struct ibv_context *own_ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *context = fails("ibv_open_device") ? NULL : ibv_open_device(device);

    if (context)
        shim_adopt(context);
    return context;
}

static int own_ibv_close_device(struct ibv_context *context)
{
    context_forget(context);
    return ibv_close_device(context);
}

static int own_ibv_destroy_qp(struct ibv_qp *qp)
{
    late_forget(qp);
    moments_forget(qp);
    return ibv_destroy_qp(qp);
}

/* The program has seen a descriptor that is readable, and finds nothing, or waits for the next. */
static int own_ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq,
                                void **context)
{
    int before = errno;

    for (;;) {
        if (ibv_get_cq_event(channel, cq, context))
            return -1;
        if (!fails("completion event"))
            return 0;
        ibv_ack_cq_events(*cq, 1);
        errno = before;
    }
}

static const struct hook {
    const char *name;
    void *own, *real;
} HOOKS[] = {
#define HOOK(name) {#name, (void *)own_##name, (void *)name}
    HOOK(ibv_alloc_pd),
    HOOK(ibv_reg_mr),
    HOOK(ibv_reg_mr_iova),
    HOOK(ibv_reg_mr_iova2),
    HOOK(ibv_create_comp_channel),
    HOOK(ibv_create_cq),
    HOOK(ibv_create_srq),
    HOOK(ibv_create_qp),
    HOOK(ibv_create_ah),
    HOOK(rdma_create_event_channel),
    HOOK(ibv_modify_qp),
    HOOK(ibv_attach_mcast),
    HOOK(rdma_create_id),
    HOOK(rdma_bind_addr),
    HOOK(rdma_resolve_addr),
    HOOK(rdma_resolve_route),
    HOOK(rdma_listen),
    HOOK(rdma_connect),
    HOOK(rdma_accept),
    HOOK(rdma_establish),
    HOOK(rdma_reject),
    HOOK(rdma_disconnect),
    HOOK(rdma_join_multicast),
    HOOK(rdma_join_multicast_ex),
    HOOK(ibv_open_device),
    HOOK(ibv_close_device),
    HOOK(ibv_destroy_qp),
    HOOK(ibv_get_cq_event),
#undef HOOK
};

/* ---- entries of the GOT --------------------------------------------------------------------- */

#ifdef JUMP_SLOT

/* What is replaced, by what. */
enum way { TO_OWN, TO_REAL };

struct object {
    uintptr_t base, relro, relro_end; /* entries there are for reading only */
    const ElfW(Rela) * tables[2];
    size_t sizes[2];
    const ElfW(Sym) * symbols;
    const char *names;
};

/* Where a table of the dynamic section is: glibc has added the base to it, others have not. */
static uintptr_t address_of(const struct object *object, uintptr_t value)
{
    return value < object->base ? object->base + value : value;
}

static bool object_read(struct object *object, const struct dl_phdr_info *info)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const ElfW(Dyn) *dynamic = NULL;
    bool is_rela = true;

    *object = (struct object){.base = info->dlpi_addr};
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];

        if (part->p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + part->p_vaddr);
        if (part->p_type == PT_GNU_RELRO) {
            object->relro = (info->dlpi_addr + part->p_vaddr) & ~(page - 1);
            object->relro_end = (info->dlpi_addr + part->p_vaddr + part->p_memsz) & ~(page - 1);
        }
    }
    if (!dynamic)
        return false;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        uintptr_t value = dynamic->d_un.d_val;

        if (dynamic->d_tag == DT_JMPREL)
            object->tables[0] = (const void *)address_of(object, value);
        else if (dynamic->d_tag == DT_PLTRELSZ)
            object->sizes[0] = value / sizeof(ElfW(Rela));
        else if (dynamic->d_tag == DT_PLTREL)
            is_rela = value == DT_RELA;
        else if (dynamic->d_tag == DT_RELA)
            object->tables[1] = (const void *)address_of(object, value);
        else if (dynamic->d_tag == DT_RELASZ)
            object->sizes[1] = value / sizeof(ElfW(Rela));
        else if (dynamic->d_tag == DT_SYMTAB)
            object->symbols = (const void *)address_of(object, value);
        else if (dynamic->d_tag == DT_STRTAB)
            object->names = (const void *)address_of(object, value);
    }
    return is_rela && object->symbols && object->names;
}

static void slot_write(const struct object *object, void **slot, void *value)
{
    const uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)((uintptr_t)slot & ~(size - 1));
    bool is_relro = (uintptr_t)slot >= object->relro && (uintptr_t)slot < object->relro_end;

    if (is_relro && mprotect(page, size, PROT_READ | PROT_WRITE))
        return;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (is_relro)
        mprotect(page, size, PROT_READ);
}

static void object_turn(const struct object *object, enum way way)
{
    for (unsigned k = 0; k < LENGTH(object->tables); k++)
        for (size_t i = 0; object->tables[k] && i < object->sizes[k]; i++) {
            const ElfW(Rela) *entry = &object->tables[k][i];
            void **slot = (void **)(object->base + entry->r_offset);
            const char *name;

            if (ELF64_R_TYPE(entry->r_info) != JUMP_SLOT && ELF64_R_TYPE(entry->r_info) != GLOB_DAT)
                continue;
            name = object->names + object->symbols[ELF64_R_SYM(entry->r_info)].st_name;
            if (strncmp(name, "ibv_", 4) != 0 && strncmp(name, "rdma_", 5) != 0)
                continue;
            for (unsigned j = 0; j < LENGTH(HOOKS); j++)
                if (strcmp(name, HOOKS[j].name) == 0) {
                    if (way == TO_OWN)
                        slot_write(object, slot, HOOKS[j].own);
                    else if (*slot == HOOKS[j].own)
                        slot_write(object, slot, HOOKS[j].real);
                }
        }
}

static int object_visit(struct dl_phdr_info *info, size_t size, void *way)
{
    const char *name = strrchr(info->dlpi_name, '/');
    struct object object;

    name = name ? name + 1 : info->dlpi_name;
    /* libibverbs and its drivers call one another, and this library calls what it replaces. */
    if (strncmp(name, "libibverbs", 10) == 0 || strstr(name, "-rdmav") ||
        strncmp(name, "_shim.", 6) == 0)
        return 0;
    if (object_read(&object, info))
        object_turn(&object, *(const enum way *)way);
    return 0;
}

static void objects_turn(enum way way)
{
    dl_iterate_phdr(object_visit, &way);
}

/* Whether calls that do not go through a context can be replaced on this processor. */
SHIM_API int shim_has_hooks(void)
{
    return 1;
}

#else

enum way { TO_OWN, TO_REAL };

static void objects_turn(enum way way)
{
}

SHIM_API int shim_has_hooks(void)
{
    return 0;
}

#endif

/*
 * Replace the calls, also those of what was loaded since the last time.  Contexts that librdmacm
 * has opened are found here; the caller knows of others.
 */
SHIM_API void shim_begin(void)
{
    struct ibv_context **opened;
    int count = 0;

    objects_turn(TO_OWN);
    if (!(opened = rdma_get_devices(&count)))
        return;
    for (int i = 0; i < count; i++)
        shim_adopt(opened[i]);
    /* The contexts stay; the list would keep a protection domain. */
    rdma_free_devices(opened);
}

SHIM_API void shim_end(void)
{
    shim_delay(0);
    contexts_put_back();
    objects_turn(TO_REAL);
}
