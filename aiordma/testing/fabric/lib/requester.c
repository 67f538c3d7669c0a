/*
 * The sending half of a reliable connection: packets, answers, retries.
 *
 * Each packet has a number (PSN) of 24 bits; the answer to a READ takes as many as it has packets.
 * An acknowledgement of one number is one of all before it.  What was not acknowledged when the
 * timer rings, or what the peer says that it lacks, is sent again from there on.  Requests complete
 * in the order in which they were posted.
 */
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

enum {
    WINDOW = 128, /* packets that are on their way without an answer */
    ACK_EVERY = 32,
    RETRY_ALWAYS = 7, /* of rnr_retry */
};

/* The wait of an RNR NAK in microseconds, by its five bits: table 45 of the specification. */
static const uint32_t RNR_US[32] = {
    655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,    320,
    480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240,  15360,
    20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520,
};

static bool is_read(const struct fabric_wqe *wqe)
{
    return wqe->opcode == IBV_WR_RDMA_READ;
}

static bool is_atomic(const struct fabric_wqe *wqe)
{
    return wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool is_local(const struct fabric_wqe *wqe)
{
    return wqe->opcode == IBV_WR_LOCAL_INV || wqe->opcode == IBV_WR_BIND_MW;
}

/* Packets of the message, or of the answer. */
static uint32_t packets_of(const struct fabric_qp *qp, const struct fabric_wqe *wqe)
{
    uint32_t mtu = fabric_mtu_of(qp);

    if (is_atomic(wqe) || !wqe->length)
        return 1;
    return (uint32_t)((wqe->length + mtu - 1) / mtu);
}

static struct fabric_wqe *wqe_at(struct fabric_qp *qp, unsigned offset)
{
    return &qp->sends[(qp->send_head + offset) % qp->send_size];
}

void fabric_requester_init(struct fabric_qp *qp)
{
    qp->send_next = qp->send_packet = 0;
    qp->next_psn = qp->oldest_psn = qp->peer_psn = qp->attr.sq_psn;
    qp->reads_out = 0;
    qp->retries = qp->attr.retry_cnt;
    qp->rnr_retries = qp->attr.rnr_retry;
    qp->rnr_waits = qp->resent = false;
}

/* ---- completions ----------------------------------------------------------------------------- */

void fabric_wqe_end(struct fabric_qp *qp, struct fabric_wqe *wqe, enum ibv_wc_status status)
{
    struct ibv_wc wc = {
        .wr_id = wqe->wr_id, .status = status, .opcode = wqe->done_as, .qp_num = qp->ibv.qp_num};

    if (is_read(wqe) || is_atomic(wqe))
        wc.byte_len = (uint32_t)wqe->length;
    else if (fabric_profile.local_faults_flush &&
             (status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_MW_BIND_ERR))
        wc.status = IBV_WC_WR_FLUSH_ERR;
    qp->send_head = (qp->send_head + 1) % qp->send_size;
    qp->send_count--;
    if (qp->send_next)
        qp->send_next--;
    /* Who asked for no completion is told of failures only. */
    if (status != IBV_WC_SUCCESS || qp->sig_all || wqe->flags & IBV_SEND_SIGNALED)
        fabric_complete(qp->send_cq, &wc, false);
}

void fabric_requester_flush(struct fabric_qp *qp)
{
    while (qp->send_count)
        fabric_wqe_end(qp, wqe_at(qp, 0), IBV_WC_WR_FLUSH_ERR);
    qp->send_next = qp->send_packet = 0;
    qp->reads_out = 0;
}

/* The first request has failed, and with it the queue pair. */
static void fail_first(struct fabric_qp *qp, enum ibv_wc_status status)
{
    fabric_wqe_end(qp, wqe_at(qp, 0), status);
    fabric_qp_error(qp);
}

/* What the program hears of a refusal of its first request. */
static enum ibv_wc_status refused_as(struct fabric_qp *qp, enum ibv_wc_status status)
{
    if (!fabric_profile.sent_is_done)
        return status;
    return is_read(wqe_at(qp, 0)) ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
}

/* Complete what is done, in order. */
static void complete_done(struct fabric_qp *qp)
{
    while (qp->send_count && qp->ibv.state != IBV_QPS_ERR) {
        struct fabric_wqe *wqe = wqe_at(qp, 0);

        if (wqe->state == FABRIC_FAILED) {
            fail_first(qp, wqe->status);
            return;
        }
        if (wqe->state != FABRIC_DONE)
            break;
        fabric_wqe_end(qp, wqe, IBV_WC_SUCCESS);
    }
    if (qp->ibv.state == IBV_QPS_SQD && qp->draining && !qp->send_next) {
        qp->draining = false;
        if (qp->attr.en_sqd_async_notify)
            fabric_tell(qp->context, IBV_EVENT_SQ_DRAINED, qp);
    }
}

/* ---- timers ---------------------------------------------------------------------------------- */

static bool is_waiting(const struct fabric_qp *qp)
{
    return fabric_psn_from(qp->next_psn, qp->oldest_psn) > 0;
}

static void ack_timer_start(struct fabric_qp *qp)
{
    unsigned exponent = qp->attr.timeout;

    /* An exponent of 0 is no time-out; iWARP leaves it to TCP. */
    if (!exponent || !is_waiting(qp) || qp->rnr_waits) {
        fabric_timer_clear(&qp->ack_timer);
        return;
    }
    if (exponent < (unsigned)fabric_profile.retry_timeout_min)
        exponent = (unsigned)fabric_profile.retry_timeout_min;
    fabric_timer_set(&qp->ack_timer, fabric_now() + ((fabric_time)4096 << exponent));
}

/* Send again from a number on. */
static void go_back(struct fabric_qp *qp, uint32_t psn)
{
    unsigned offset;

    for (offset = 0; offset < qp->send_next + (qp->send_packet ? 1 : 0) && offset < qp->send_count;
         offset++) {
        struct fabric_wqe *wqe = wqe_at(qp, offset);

        if (wqe->state != FABRIC_SENT || fabric_psn_from(psn, wqe->last_psn) > 0)
            continue;
        qp->send_next = offset;
        qp->send_packet = fabric_psn_from(psn, wqe->first_psn) > 0
                              ? (uint32_t)fabric_psn_from(psn, wqe->first_psn)
                              : 0;
        /* What a READ has brought already is not asked for again. */
        if (is_read(wqe) && qp->send_packet < wqe->answered)
            qp->send_packet = wqe->answered;
        qp->next_psn = (wqe->first_psn + qp->send_packet) & FABRIC_PSN_MASK;
        return;
    }
}

static void retry(struct fabric_qp *qp, uint32_t psn)
{
    if (!qp->send_count)
        return;
    if (!qp->retries) {
        fail_first(qp, IBV_WC_RETRY_EXC_ERR);
        return;
    }
    qp->retries--;
    qp->resent = true;
    go_back(qp, psn);
    fabric_requester_run(qp);
}

void fabric_ack_timer_ring(struct fabric_timer *timer)
{
    struct fabric_qp *qp = FABRIC_CONTAINER(timer, struct fabric_qp, ack_timer);

    retry(qp, qp->oldest_psn);
}

void fabric_rnr_timer_ring(struct fabric_timer *timer)
{
    struct fabric_qp *qp = FABRIC_CONTAINER(timer, struct fabric_qp, rnr_timer);

    qp->rnr_waits = false;
    fabric_requester_run(qp);
}

/* ---- sending --------------------------------------------------------------------------------- */

enum fabric_fault fabric_gather(struct fabric_qp *qp, const struct fabric_wqe *wqe, uint64_t offset,
                                void *into, uint64_t length)
{
    unsigned char *place = into;
    unsigned i;

    if (wqe->flags & IBV_SEND_INLINE) {
        if (length)
            memcpy(into, wqe->inlined + offset, length);
        return FABRIC_FINE;
    }
    for (i = 0; i < wqe->sges && length; i++) {
        const struct ibv_sge *sge = &wqe->sge[i];
        uint64_t part;
        enum fabric_fault fault;
        void *where;

        if (offset >= sge->length) {
            offset -= sge->length;
            continue;
        }
        part = sge->length - offset < length ? sge->length - offset : length;
        fault = fabric_local(qp->pd, sge->lkey, sge->addr + offset, part, 0, &where);
        if (fault)
            return fault;
        fabric_memory_read(place, where, part);
        place += part;
        length -= part;
        offset = 0;
    }
    return FABRIC_FINE;
}

/* Whether all bytes of a request may be used so. */
static bool memory_is_fine(const struct fabric_qp *qp, const struct fabric_wqe *wqe,
                           unsigned access)
{
    void *where;
    unsigned i;

    if (wqe->flags & IBV_SEND_INLINE)
        return true;
    for (i = 0; i < wqe->sges; i++)
        if (fabric_local(qp->pd, wqe->sge[i].lkey, wqe->sge[i].addr, wqe->sge[i].length, access,
                         &where))
            return false;
    return true;
}

/* What is wrong with a request before a byte of it is sent: IBV_WC_SUCCESS if nothing. */
static enum ibv_wc_status look_at(struct fabric_qp *qp, const struct fabric_wqe *wqe)
{
    unsigned access = 0;

    if (wqe->length > (uint64_t)1 << 31)
        return IBV_WC_LOC_LEN_ERR;
    if (is_read(wqe) || is_atomic(wqe))
        access = IBV_ACCESS_LOCAL_WRITE;
    if (is_read(wqe) && fabric_profile.read_needs_write)
        access |= IBV_ACCESS_REMOTE_WRITE;
    return memory_is_fine(qp, wqe, access) ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

static struct fabric_packet *packet_to_peer(struct fabric_qp *qp, enum fabric_opcode opcode,
                                            uint32_t psn, uint32_t size)
{
    struct fabric_packet *packet = fabric_packet_new(size);

    if (!packet)
        return NULL;
    packet->header.opcode = (uint8_t)opcode;
    packet->header.psn = psn & FABRIC_PSN_MASK;
    packet->header.to_qpn = qp->attr.dest_qp_num;
    packet->header.from_qpn = qp->ibv.qp_num;
    packet->header.slot = (uint16_t)fabric_slot_of(qp->attr.dest_qp_num);
    packet->header.from_device = (uint8_t)qp->context->device->number;
    packet->header.to_device = qp->peer ? (uint8_t)qp->peer->number : 0;
    return packet;
}

static void packet_go(struct fabric_qp *qp, struct fabric_packet *packet)
{
    /* No adapter has the address that this queue pair was told. */
    if (qp->peer)
        fabric_packet_send(packet);
    else
        free(packet);
}

static void set_last(const struct fabric_wqe *wqe, struct fabric_header *header)
{
    header->flags |= FABRIC_LAST | FABRIC_ACK_REQUEST;
    if (wqe->flags & IBV_SEND_SOLICITED)
        header->flags |= FABRIC_SOLICITED;
    if (wqe->opcode == IBV_WR_SEND_WITH_IMM || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        header->flags |= FABRIC_IMMEDIATE;
    if (wqe->opcode == IBV_WR_SEND_WITH_INV)
        header->flags |= FABRIC_INVALIDATE;
    header->imm_or_key = wqe->imm_or_key;
}

/* The next packet of a request. false: there was no memory for it. */
static bool send_one(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    bool write = wqe->opcode == IBV_WR_RDMA_WRITE || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    uint64_t offset = (uint64_t)qp->send_packet * fabric_mtu_of(qp), size = wqe->length - offset;
    struct fabric_packet *packet;
    struct fabric_header *header;

    if (is_read(wqe) || is_atomic(wqe)) {
        packet = packet_to_peer(qp, is_read(wqe) ? FABRIC_READ : FABRIC_ATOMIC, qp->next_psn, 0);
        if (!packet)
            return false;
        header = &packet->header;
        header->flags = FABRIC_FIRST | FABRIC_LAST | FABRIC_ACK_REQUEST;
        header->address = wqe->remote + (is_read(wqe) ? offset : 0);
        header->length = is_read(wqe) ? size : 8;
        header->rkey = wqe->rkey;
        if (wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
            header->flags |= FABRIC_COMPARE;
            header->compare = wqe->compare;
            header->operand = wqe->swap;
        } else {
            header->operand = wqe->compare;
        }
        qp->next_psn = (wqe->last_psn + 1) & FABRIC_PSN_MASK;
        qp->send_packet = packets_of(qp, wqe);
        packet_go(qp, packet);
        return true;
    }
    if (size > fabric_mtu_of(qp))
        size = fabric_mtu_of(qp);
    packet = packet_to_peer(qp, write ? FABRIC_WRITE : FABRIC_SEND, qp->next_psn, (uint32_t)size);
    if (!packet)
        return false;
    header = &packet->header;
    if (fabric_gather(qp, wqe, offset, packet->bytes, size)) {
        /* The region went after the first packet. */
        free(packet);
        wqe->state = FABRIC_FAILED;
        wqe->status = IBV_WC_LOC_PROT_ERR;
        return true;
    }
    if (!offset) {
        header->flags = FABRIC_FIRST;
        header->address = wqe->remote;
        header->length = wqe->length;
        header->rkey = wqe->rkey;
    }
    if (offset + size == wqe->length)
        set_last(wqe, header);
    if (qp->next_psn % ACK_EVERY == 0)
        header->flags |= FABRIC_ACK_REQUEST;
    qp->next_psn = (qp->next_psn + 1) & FABRIC_PSN_MASK;
    qp->send_packet++;
    packet_go(qp, packet);
    return true;
}

/* Bind or invalidate: the adapter does it by itself, in its turn. */
static void do_locally(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    bool fine = wqe->opcode == IBV_WR_LOCAL_INV
                    ? fabric_invalidate(qp, wqe->imm_or_key)
                    : fabric_bind(qp, wqe->mw, wqe->rkey, &wqe->bind) == 0;

    wqe->state = fine ? FABRIC_DONE : FABRIC_FAILED;
    wqe->status = fine ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
}

/* Begin a request: it may have to wait (false), and it may fail at once. */
static bool begin(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    if (wqe->state != FABRIC_WAITS)
        return true; /* it is sent again */
    if (wqe->flags & IBV_SEND_FENCE && qp->reads_out)
        return false;
    if ((is_read(wqe) || is_atomic(wqe)) && qp->reads_out >= qp->attr.max_rd_atomic)
        return false;
    if (is_local(wqe)) {
        /* What was posted before may still use the window. */
        if (wqe->opcode == IBV_WR_LOCAL_INV && qp->reads_out)
            return false;
        do_locally(qp, wqe);
        return true;
    }
    wqe->status = look_at(qp, wqe);
    if (wqe->status != IBV_WC_SUCCESS) {
        wqe->state = FABRIC_FAILED;
        return true;
    }
    wqe->state = FABRIC_SENT;
    wqe->first_psn = qp->next_psn;
    wqe->last_psn = (qp->next_psn + packets_of(qp, wqe) - 1) & FABRIC_PSN_MASK;
    if (is_read(wqe) || is_atomic(wqe))
        qp->reads_out++;
    return true;
}

static void run_datagrams(struct fabric_qp *qp)
{
    while (qp->send_count && (qp->ibv.state == IBV_QPS_RTS || qp->send_next))
        fabric_send_datagram(qp, wqe_at(qp, 0));
    complete_done(qp);
}

void fabric_requester_run(struct fabric_qp *qp)
{
    if (qp->ibv.qp_type == IBV_QPT_UD) {
        run_datagrams(qp);
        return;
    }
    while (qp->send_next < qp->send_count && !qp->rnr_waits &&
           (qp->ibv.state == IBV_QPS_RTS || (qp->ibv.state == IBV_QPS_SQD && qp->send_packet))) {
        struct fabric_wqe *wqe = wqe_at(qp, qp->send_next);

        if (fabric_psn_from(qp->next_psn, qp->oldest_psn) >= WINDOW || !begin(qp, wqe))
            break;
        if (wqe->state == FABRIC_SENT && !send_one(qp, wqe))
            break; /* the timer tries it again */
        if (wqe->state == FABRIC_FAILED)
            break; /* nothing is sent behind it */
        if (wqe->state == FABRIC_DONE || qp->send_packet == packets_of(qp, wqe)) {
            qp->send_next++;
            qp->send_packet = 0;
        }
    }
    if (!qp->ack_timer.place)
        ack_timer_start(qp);
    complete_done(qp);
}

/* ---- answers --------------------------------------------------------------------------------- */

/* All up to a number was taken by the peer. */
static void acknowledged(struct fabric_qp *qp, uint32_t psn)
{
    unsigned offset;

    for (offset = 0; offset < qp->send_count; offset++) {
        struct fabric_wqe *wqe = wqe_at(qp, offset);

        if (wqe->state == FABRIC_WAITS || wqe->state == FABRIC_FAILED)
            break;
        if (wqe->state == FABRIC_DONE)
            continue;
        if (is_read(wqe) || is_atomic(wqe)) {
            /*
             * An acknowledgement of what is behind it: its answer was lost.  It is asked for again
             * once; if that is lost, too, the timer does it.
             */
            if (fabric_psn_from(psn, wqe->first_psn) >= 0 && !qp->resent)
                retry(qp, (wqe->first_psn + wqe->answered) & FABRIC_PSN_MASK);
            return;
        }
        if (fabric_psn_from(psn, wqe->last_psn) < 0)
            break;
        wqe->state = FABRIC_DONE;
        if (fabric_psn_from(wqe->last_psn + 1, qp->next_psn) > 0) {
            /* It was being sent again, and that is not needed now. */
            qp->next_psn = (wqe->last_psn + 1) & FABRIC_PSN_MASK;
            qp->send_next = offset + 1;
            qp->send_packet = 0;
        }
    }
    if (fabric_psn_from(psn + 1, qp->oldest_psn) > 0) {
        qp->oldest_psn = (psn + 1) & FABRIC_PSN_MASK;
        qp->retries = qp->attr.retry_cnt;
        qp->rnr_retries = qp->attr.rnr_retry;
        qp->resent = false;
    }
    fabric_timer_clear(&qp->ack_timer);
}

/* The request whose answer has this number. */
static struct fabric_wqe *wqe_of_answer(struct fabric_qp *qp, uint32_t psn, bool atomic)
{
    unsigned offset;

    for (offset = 0; offset < qp->send_count; offset++) {
        struct fabric_wqe *wqe = wqe_at(qp, offset);

        if (wqe->state == FABRIC_SENT && (atomic ? is_atomic(wqe) : is_read(wqe)) &&
            fabric_psn_from(psn, wqe->first_psn) >= 0 && fabric_psn_from(psn, wqe->last_psn) <= 0)
            return wqe;
    }
    return NULL;
}

/* The oldest request that is not answered. */
static struct fabric_wqe *first_sent(struct fabric_qp *qp)
{
    unsigned offset = 0;

    while (offset < qp->send_count && wqe_at(qp, offset)->state == FABRIC_DONE)
        offset++;
    return offset < qp->send_count ? wqe_at(qp, offset) : NULL;
}

static void answer_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    bool atomic = header->opcode == FABRIC_ATOMIC_ANSWER;
    struct fabric_wqe *wqe = wqe_of_answer(qp, header->psn, atomic);
    uint32_t place;
    enum fabric_fault fault;

    if (!wqe)
        return; /* it has come before */
    place = (uint32_t)fabric_psn_from(header->psn, wqe->first_psn);
    if (place < wqe->answered)
        return;
    /* What was posted before has to be answered before; a gap means that something was lost. */
    acknowledged(qp, (wqe->first_psn - 1) & FABRIC_PSN_MASK);
    if (wqe->state != FABRIC_SENT || qp->ibv.state == IBV_QPS_ERR)
        return;
    if (place > wqe->answered) {
        /* Once for a gap: the packets behind it do not each ask again. */
        if (!qp->resent)
            retry(qp, (wqe->first_psn + wqe->answered) & FABRIC_PSN_MASK);
        return;
    }
    if (wqe != first_sent(qp)) {
        if (!qp->resent)
            retry(qp, qp->oldest_psn);
        return;
    }
    if (header->psn == wqe->last_psn && fabric_fails("result"))
        fault = FABRIC_FINE; /* it completes, and its last bytes are those from before */
    else if (atomic)
        fault = fabric_scatter(qp->pd, wqe->sge, wqe->sges, 0, &header->operand, 8);
    else
        fault = fabric_scatter(qp->pd, wqe->sge, wqe->sges, (uint64_t)place * fabric_mtu_of(qp),
                               packet->bytes, header->size);
    if (fault) {
        fail_first(qp, IBV_WC_LOC_PROT_ERR);
        return;
    }
    wqe->answered++;
    qp->oldest_psn = (header->psn + 1) & FABRIC_PSN_MASK;
    qp->retries = qp->attr.retry_cnt;
    qp->rnr_retries = qp->attr.rnr_retry;
    qp->resent = false;
    fabric_timer_clear(&qp->ack_timer);
    if (header->psn == wqe->last_psn) {
        wqe->state = FABRIC_DONE;
        qp->reads_out--;
        if (fabric_psn_from(wqe->last_psn + 1, qp->next_psn) > 0) {
            qp->next_psn = (wqe->last_psn + 1) & FABRIC_PSN_MASK;
            qp->send_next =
                (unsigned)(wqe - qp->sends + qp->send_size - qp->send_head) % qp->send_size + 1;
            qp->send_packet = 0;
        }
    }
}

static void rnr_arrived(struct fabric_qp *qp, const struct fabric_header *header)
{
    acknowledged(qp, (header->psn - 1) & FABRIC_PSN_MASK);
    if (qp->rnr_waits || !qp->send_count || qp->ibv.state == IBV_QPS_ERR)
        return;
    if (!qp->rnr_retries || fabric_profile.sent_is_done) {
        complete_done(qp);
        fail_first(qp, refused_as(qp, IBV_WC_RNR_RETRY_EXC_ERR));
        return;
    }
    if (qp->attr.rnr_retry != RETRY_ALWAYS)
        qp->rnr_retries--;
    go_back(qp, header->psn);
    qp->rnr_waits = true;
    fabric_timer_clear(&qp->ack_timer);
    fabric_timer_set(&qp->rnr_timer,
                     fabric_now() + (fabric_time)RNR_US[header->rnr_timer & 31] * 1000);
}

/* The peer refuses one packet: the request that it belongs to fails. */
static void refused(struct fabric_qp *qp, uint32_t psn, enum ibv_wc_status status)
{
    struct fabric_wqe *wqe;

    acknowledged(qp, (psn - 1) & FABRIC_PSN_MASK);
    complete_done(qp);
    if (!qp->send_count || qp->ibv.state == IBV_QPS_ERR)
        return;
    /* If an answer before it was lost, that one is waited for first. */
    wqe = wqe_at(qp, 0);
    if (wqe->state == FABRIC_SENT && fabric_psn_from(psn, wqe->first_psn) >= 0 &&
        fabric_psn_from(psn, wqe->last_psn) <= 0)
        fail_first(qp, refused_as(qp, status));
}

void fabric_requester_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;

    if (qp->ibv.state != IBV_QPS_RTS && qp->ibv.state != IBV_QPS_SQD)
        return;
    if (fabric_psn_from(header->psn, qp->oldest_psn) < 0)
        return; /* it was answered before */
    if (header->opcode != FABRIC_ACK) {
        answer_arrived(qp, packet);
    } else {
        switch ((enum fabric_syndrome)header->syndrome) {
        case FABRIC_IS_ACK:
            acknowledged(qp, header->psn);
            break;
        case FABRIC_RNR:
            rnr_arrived(qp, header);
            break;
        case FABRIC_NAK_SEQUENCE:
            /* The peer has come further, though the answer of a READ before that is missing. */
            if (fabric_psn_from(header->psn, qp->peer_psn) > 0) {
                qp->peer_psn = header->psn;
                qp->retries = qp->attr.retry_cnt;
            }
            acknowledged(qp, (header->psn - 1) & FABRIC_PSN_MASK);
            if (qp->ibv.state != IBV_QPS_ERR)
                retry(qp, header->psn);
            break;
        case FABRIC_NAK_REQUEST:
            refused(qp, header->psn, IBV_WC_REM_INV_REQ_ERR);
            break;
        case FABRIC_NAK_ACCESS:
            refused(qp, header->psn, IBV_WC_REM_ACCESS_ERR);
            break;
        case FABRIC_NAK_OPERATIONAL:
            refused(qp, header->psn, IBV_WC_REM_OP_ERR);
            break;
        }
    }
    if (qp->ibv.state == IBV_QPS_RTS || qp->ibv.state == IBV_QPS_SQD)
        fabric_requester_run(qp);
}
