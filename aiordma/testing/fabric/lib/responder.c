/*
 * The receiving half of a reliable connection: it takes packets in their order, answers them, and
 * refuses what the rights of memory do not allow.
 *
 * A packet before its turn is refused once for the gap; one that has come before is answered again,
 * without being done again.  A READ is simply read once more; the result of an atomic is kept.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

void fabric_responder_init(struct fabric_qp *qp)
{
    qp->expected_psn = qp->attr.rq_psn;
    qp->msn = 0;
    qp->nak_sent = qp->established = qp->has_current = qp->in_write = qp->in_send = false;
    qp->received = 0;
    if (qp->resources)
        memset(qp->resources, 0, qp->resource_size * sizeof(*qp->resources));
    qp->resource_next = 0;
}

/* ---- answers --------------------------------------------------------------------------------- */

static struct fabric_packet *answer_new(struct fabric_qp *qp, enum fabric_opcode opcode,
                                        uint32_t psn, uint32_t size)
{
    struct fabric_packet *packet = qp->peer ? fabric_packet_new(size) : NULL;

    if (!packet)
        return NULL;
    packet->header.opcode = (uint8_t)opcode;
    packet->header.psn = psn & FABRIC_PSN_MASK;
    packet->header.msn = qp->msn;
    packet->header.to_qpn = qp->attr.dest_qp_num;
    packet->header.from_qpn = qp->ibv.qp_num;
    packet->header.slot = (uint16_t)fabric_slot_of(qp->attr.dest_qp_num);
    packet->header.from_device = (uint8_t)qp->context->device->number;
    packet->header.to_device = (uint8_t)qp->peer->number;
    return packet;
}

static void answer(struct fabric_qp *qp, enum fabric_syndrome syndrome, uint32_t psn)
{
    struct fabric_packet *packet = answer_new(qp, FABRIC_ACK, psn, 0);

    if (!packet)
        return;
    packet->header.syndrome = (uint8_t)syndrome;
    packet->header.rnr_timer = qp->attr.min_rnr_timer;
    fabric_packet_send(packet);
}

static void receive_end(struct fabric_qp *qp, struct ibv_wc *wc, bool solicited)
{
    wc->wr_id = qp->current.wr_id;
    wc->qp_num = qp->ibv.qp_num;
    wc->src_qp = qp->attr.dest_qp_num;
    qp->has_current = false;
    fabric_complete(qp->recv_cq, wc, solicited);
}

/* The receive is not fit for the message. */
static void refuse(struct fabric_qp *qp, enum fabric_syndrome syndrome, enum ibv_wc_status own);

static void refuse_receive(struct fabric_qp *qp, enum fabric_syndrome syndrome,
                           enum ibv_wc_status own)
{
    if (fabric_profile.receive_faults_operational)
        refuse(qp, FABRIC_NAK_OPERATIONAL, IBV_WC_LOC_QP_OP_ERR);
    else
        refuse(qp, syndrome, own);
}

/* Refuse a packet: the connection is over on both sides. */
static void refuse(struct fabric_qp *qp, enum fabric_syndrome syndrome, enum ibv_wc_status own)
{
    struct ibv_wc wc = {.status = own, .opcode = IBV_WC_RECV};

    answer(qp, syndrome, qp->expected_psn);
    if (qp->has_current && own != IBV_WC_SUCCESS)
        receive_end(qp, &wc, true);
    if (!fabric_profile.no_qp_errors)
        fabric_tell(qp->context,
                    syndrome == FABRIC_NAK_ACCESS ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR,
                    qp);
    fabric_qp_error(qp);
}

void fabric_responder_flush(struct fabric_qp *qp)
{
    struct ibv_wc wc = {.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};

    if (qp->has_current)
        receive_end(qp, &wc, true);
    qp->in_send = qp->in_write = false;
    while (qp->recvs.count) {
        qp->current = qp->recvs.items[qp->recvs.head];
        qp->recvs.head = (qp->recvs.head + 1) % qp->recvs.size;
        qp->recvs.count--;
        receive_end(qp, &wc, true);
    }
}

/* ---- buffers --------------------------------------------------------------------------------- */

static bool take_buffer(struct fabric_qp *qp)
{
    if (!fabric_recv_take(qp, &qp->current))
        return false;
    qp->has_current = true;
    return true;
}

enum fabric_fault fabric_scatter(struct fabric_pd *pd, const struct ibv_sge *sge, unsigned sges,
                                 uint64_t offset, const void *from, uint64_t length)
{
    const unsigned char *place = from;
    unsigned i;

    for (i = 0; i < sges && length; i++) {
        uint64_t part;
        enum fabric_fault fault;
        void *where;

        if (offset >= sge[i].length) {
            offset -= sge[i].length;
            continue;
        }
        part = sge[i].length - offset < length ? sge[i].length - offset : length;
        fault = fabric_local(pd, sge[i].lkey, sge[i].addr + offset, part, IBV_ACCESS_LOCAL_WRITE,
                             &where);
        if (fault)
            return fault;
        fabric_memory_write(where, place, part);
        place += part;
        length -= part;
        offset = 0;
    }
    return length ? FABRIC_NO_BYTES : FABRIC_FINE;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* The packet was taken: what it carries is done. */
static void taken(struct fabric_qp *qp, const struct fabric_header *header)
{
    qp->expected_psn = (qp->expected_psn + 1) & FABRIC_PSN_MASK;
    qp->nak_sent = false;
    if (header->flags & FABRIC_LAST)
        qp->msn = (qp->msn + 1) & FABRIC_PSN_MASK;
    if (header->flags & FABRIC_ACK_REQUEST)
        answer(qp, FABRIC_IS_ACK, header->psn);
}

/* What a completion says of a message that has come whole. */
static void message_end(struct fabric_qp *qp, const struct fabric_header *header,
                        enum ibv_wc_opcode opcode, uint64_t length)
{
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = opcode, .byte_len = (uint32_t)length};

    if (header->flags & FABRIC_IMMEDIATE) {
        wc.wc_flags |= IBV_WC_WITH_IMM;
        wc.imm_data = header->imm_or_key;
    } else if (header->flags & FABRIC_INVALIDATE) {
        wc.wc_flags |= IBV_WC_WITH_INV;
        wc.invalidated_rkey = header->imm_or_key;
    }
    receive_end(qp, &wc, header->flags & FABRIC_SOLICITED);
}

static void send_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    enum fabric_fault fault;

    if (!(header->flags & FABRIC_FIRST) != qp->in_send || qp->in_write ||
        (!(header->flags & FABRIC_LAST) && header->size != fabric_mtu_of(qp))) {
        refuse(qp, FABRIC_NAK_REQUEST, IBV_WC_LOC_QP_OP_ERR);
        return;
    }
    if (header->flags & FABRIC_FIRST) {
        if (!take_buffer(qp)) {
            fabric_overrun();
            answer(qp, FABRIC_RNR, header->psn);
            if (fabric_profile.sent_is_done)
                fabric_qp_error(qp);
            return;
        }
        qp->received = 0;
        qp->in_send = true;
    }
    if (qp->received + header->size > fabric_recv_room(&qp->current)) {
        refuse_receive(qp, FABRIC_NAK_REQUEST, IBV_WC_LOC_LEN_ERR);
        return;
    }
    fault = fabric_scatter(qp->pd, qp->current.sge, qp->current.sges, qp->received, packet->bytes,
                           header->size);
    if (fault) {
        refuse_receive(qp, FABRIC_NAK_OPERATIONAL, IBV_WC_LOC_PROT_ERR);
        return;
    }
    qp->received += header->size;
    if (header->flags & FABRIC_LAST) {
        qp->in_send = false;
        if (header->flags & FABRIC_INVALIDATE && !fabric_invalidate(qp, header->imm_or_key)) {
            refuse(qp, FABRIC_NAK_ACCESS, IBV_WC_MW_BIND_ERR);
            return;
        }
        message_end(qp, header, IBV_WC_RECV, qp->received);
    }
    taken(qp, header);
}

/*
 * An operation that the queue pair was not set up for is invalid, whatever it names: only one that
 * it knows can be refused for its key.
 */
static bool is_set_up(const struct fabric_qp *qp, unsigned access)
{
    return fabric_profile.iwarp || (unsigned)qp->attr.qp_access_flags & access;
}

static void write_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    void *where;

    if (!(header->flags & FABRIC_FIRST) != qp->in_write || qp->in_send ||
        !is_set_up(qp, IBV_ACCESS_REMOTE_WRITE)) {
        refuse(qp, FABRIC_NAK_REQUEST, IBV_WC_LOC_QP_OP_ERR);
        return;
    }
    if (header->flags & FABRIC_FIRST) {
        qp->write_address = header->address;
        qp->write_left = header->length;
        qp->write_rkey = header->rkey;
        qp->received = 0;
        if (fabric_remote(qp, header->rkey, header->address, header->length,
                          IBV_ACCESS_REMOTE_WRITE, &where)) {
            refuse(qp, FABRIC_NAK_ACCESS, IBV_WC_SUCCESS);
            return;
        }
        qp->in_write = true;
    }
    if (header->size > qp->write_left ||
        (header->flags & FABRIC_LAST ? header->size != qp->write_left
                                     : header->size != fabric_mtu_of(qp))) {
        refuse(qp, FABRIC_NAK_REQUEST, IBV_WC_SUCCESS);
        return;
    }
    /* A WRITE with immediate data takes a buffer, though none of its bytes go there. */
    if (header->flags & FABRIC_LAST && header->flags & FABRIC_IMMEDIATE && !take_buffer(qp)) {
        if (header->flags & FABRIC_FIRST)
            qp->in_write = false; /* it comes again from its beginning */
        fabric_overrun();
        answer(qp, FABRIC_RNR, header->psn);
        return;
    }
    /* The region may have gone since the first packet. */
    if (fabric_remote(qp, qp->write_rkey, qp->write_address, header->size, IBV_ACCESS_REMOTE_WRITE,
                      &where)) {
        refuse(qp, FABRIC_NAK_ACCESS, IBV_WC_SUCCESS);
        return;
    }
    fabric_memory_write(where, packet->bytes, header->size);
    qp->write_address += header->size;
    qp->write_left -= header->size;
    qp->received += header->size;
    if (header->flags & FABRIC_LAST) {
        qp->in_write = false;
        if (header->flags & FABRIC_IMMEDIATE)
            message_end(qp, header, IBV_WC_RECV_RDMA_WITH_IMM, qp->received);
    }
    taken(qp, header);
}

static struct fabric_resource *resource_new(struct fabric_qp *qp)
{
    struct fabric_resource *resource = &qp->resources[qp->resource_next];

    qp->resource_next = (qp->resource_next + 1) % qp->resource_size;
    memset(resource, 0, sizeof(*resource));
    return resource;
}

static uint32_t read_packets(const struct fabric_qp *qp, uint64_t length)
{
    return length ? (uint32_t)((length + fabric_mtu_of(qp) - 1) / fabric_mtu_of(qp)) : 1;
}

static void read_answer(struct fabric_qp *qp, const struct fabric_header *header, const char *from)
{
    uint32_t count = read_packets(qp, header->length), i;
    uint64_t left = header->length;

    for (i = 0; i < count; i++) {
        uint32_t size = left > fabric_mtu_of(qp) ? fabric_mtu_of(qp) : (uint32_t)left;
        struct fabric_packet *packet = answer_new(qp, FABRIC_READ_ANSWER, header->psn + i, size);

        if (!packet)
            return; /* the requester asks again */
        fabric_memory_read(packet->bytes, from, size);
        from += size;
        left -= size;
        fabric_packet_send(packet);
    }
}

static bool may_be_asked(struct fabric_qp *qp)
{
    return qp->attr.max_dest_rd_atomic && !qp->in_send && !qp->in_write;
}

static void read_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    void *where;

    if (!may_be_asked(qp) || !is_set_up(qp, IBV_ACCESS_REMOTE_READ) ||
        header->length > (uint64_t)1 << 31) {
        refuse(qp, FABRIC_NAK_REQUEST, IBV_WC_SUCCESS);
        return;
    }
    if (fabric_remote(qp, header->rkey, header->address, header->length, IBV_ACCESS_REMOTE_READ,
                      &where)) {
        refuse(qp, FABRIC_NAK_ACCESS, IBV_WC_SUCCESS);
        return;
    }
    qp->expected_psn = (header->psn + read_packets(qp, header->length)) & FABRIC_PSN_MASK;
    qp->nak_sent = false;
    qp->msn = (qp->msn + 1) & FABRIC_PSN_MASK;
    read_answer(qp, header, where);
}

static void atomic_answer(struct fabric_qp *qp, uint32_t psn, uint64_t value)
{
    struct fabric_packet *packet = answer_new(qp, FABRIC_ATOMIC_ANSWER, psn, 0);

    if (!packet)
        return;
    packet->header.operand = value;
    fabric_packet_send(packet);
}

static void atomic_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    struct fabric_resource *resource;
    uint64_t value;
    void *where;

    if (!may_be_asked(qp) || !is_set_up(qp, IBV_ACCESS_REMOTE_ATOMIC) || !fabric_profile.atomics ||
        header->address % 8) {
        refuse(qp, FABRIC_NAK_REQUEST, IBV_WC_SUCCESS);
        return;
    }
    if (fabric_remote(qp, header->rkey, header->address, 8, IBV_ACCESS_REMOTE_ATOMIC, &where)) {
        refuse(qp, FABRIC_NAK_ACCESS, IBV_WC_SUCCESS);
        return;
    }
    if (header->flags & FABRIC_COMPARE) {
        value = header->compare;
        __atomic_compare_exchange_n((uint64_t *)where, &value, header->operand, false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    } else {
        value = __atomic_fetch_add((uint64_t *)where, header->operand, __ATOMIC_SEQ_CST);
    }
    resource = resource_new(qp);
    resource->first_psn = resource->last_psn = header->psn;
    resource->atomic = true;
    resource->value = value;
    qp->expected_psn = (qp->expected_psn + 1) & FABRIC_PSN_MASK;
    qp->nak_sent = false;
    qp->msn = (qp->msn + 1) & FABRIC_PSN_MASK;
    atomic_answer(qp, header->psn, value);
}

/* It has come before: its answer was lost, or is on its way. */
static void answer_again(struct fabric_qp *qp, struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    void *where;
    unsigned i;

    switch (header->opcode) {
    case FABRIC_READ:
        /* A part of it may not have been asked for before: then it is no repetition. */
        if (!fabric_remote(qp, header->rkey, header->address, header->length,
                           IBV_ACCESS_REMOTE_READ, &where))
            read_answer(qp, header, where);
        return;
    case FABRIC_ATOMIC:
        for (i = 0; i < qp->resource_size; i++)
            if (qp->resources[i].atomic && qp->resources[i].first_psn == header->psn)
                atomic_answer(qp, header->psn, qp->resources[i].value);
        return;
    default:
        answer(qp, FABRIC_IS_ACK, (qp->expected_psn - 1) & FABRIC_PSN_MASK);
    }
}

void fabric_responder_arrived(struct fabric_qp *qp, struct fabric_packet *packet)
{
    int32_t ahead = fabric_psn_from(packet->header.psn, qp->expected_psn);

    if (!qp->established) {
        qp->established = true;
        if (qp->ibv.state == IBV_QPS_RTR && !fabric_profile.no_comm_established)
            fabric_tell(qp->context, IBV_EVENT_COMM_EST, qp);
    }
    if (ahead < 0) {
        answer_again(qp, packet);
        return;
    }
    if (ahead > 0) {
        if (!qp->nak_sent)
            answer(qp, FABRIC_NAK_SEQUENCE, qp->expected_psn);
        qp->nak_sent = true;
        return;
    }
    switch (packet->header.opcode) {
    case FABRIC_SEND:
        send_arrived(qp, packet);
        break;
    case FABRIC_WRITE:
        write_arrived(qp, packet);
        break;
    case FABRIC_READ:
        read_arrived(qp, packet);
        break;
    default:
        atomic_arrived(qp, packet);
    }
}
