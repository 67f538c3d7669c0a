/*
 * Unreliable datagrams: address handles, multicast groups, and the queue pairs of type UD.
 *
 * A datagram for which there is no queue pair, no buffer, no room or no right is dropped, and
 * nobody hears of it.  The first 40 bytes of a buffer are the global route header of the packet: on
 * RoCE v2 with IPv4 addresses the IPv4 header, in the last 20 of them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/ip.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

enum {
    GRH = 40,
    NEXT_HEADER_IBA = 0x1b,
    HOPS = 64,
    UDP = 17,
};

/* ---- address handles ------------------------------------------------------------------------- */

static int ah_check(const struct fabric_pd *pd, const struct ibv_ah_attr *attr)
{
    unsigned index = attr->grh.sgid_index;

    if (fabric_profile.iwarp)
        return EOPNOTSUPP;
    if (attr->port_num != 1)
        return EINVAL;
    if (!attr->is_global)
        return fabric_profile.infiniband_link ? 0 : EINVAL;
    return index < FABRIC_GIDS && pd->context->device->gids[index].used ? 0 : EINVAL;
}

FABRIC_API struct ibv_ah *ibv_create_ah(struct ibv_pd *ibv_pd, struct ibv_ah_attr *attr)
{
    struct fabric_pd *pd = FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv);
    struct fabric_ah *ah = NULL;
    int error;

    fabric_lock();
    error = ah_check(pd, attr);
    if (!error && fabric_fails("ibv_create_ah"))
        error = errno;
    if (!error && !(ah = calloc(1, sizeof(*ah))))
        error = ENOMEM;
    if (ah) {
        ah->ibv.context = ibv_pd->context;
        ah->ibv.pd = ibv_pd;
        ah->pd = pd;
        ah->attr = *attr;
        pd->users++;
        pd->context->objects++;
        fabric_born(FABRIC_AH);
    }
    fabric_unlock();
    if (ah)
        return &ah->ibv;
    errno = error;
    return NULL;
}

FABRIC_API int ibv_destroy_ah(struct ibv_ah *ibv)
{
    struct fabric_ah *ah = FABRIC_CONTAINER(ibv, struct fabric_ah, ibv);

    fabric_lock();
    if (ah->pd->context->generation == fabric_generation()) {
        ah->pd->users--;
        ah->pd->context->objects--;
        fabric_gone(FABRIC_AH);
        free(ah);
    }
    fabric_unlock();
    return 0;
}

static bool is_ipv4_header(const unsigned char *bytes)
{
    return bytes[0] == 0x45 && bytes[9] == UDP;
}

static void map_ipv4(union ibv_gid *gid, const unsigned char *address)
{
    memset(gid, 0, sizeof(*gid));
    gid->raw[10] = gid->raw[11] = 0xff;
    memcpy(gid->raw + 12, address, 4);
}

FABRIC_API int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc,
                                   struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
    const unsigned char *bytes = (const unsigned char *)grh;
    struct fabric_device *device = fabric_context(context)->device;
    union ibv_gid own;
    unsigned i;

    memset(attr, 0, sizeof(*attr));
    attr->dlid = wc->slid;
    attr->sl = wc->sl;
    attr->src_path_bits = wc->dlid_path_bits;
    attr->port_num = port;
    if (!(wc->wc_flags & IBV_WC_GRH))
        return 0;
    attr->is_global = 1;
    if (is_ipv4_header(bytes + 20)) {
        map_ipv4(&attr->grh.dgid, bytes + 20 + 12);
        map_ipv4(&own, bytes + 20 + 16);
        attr->grh.hop_limit = bytes[20 + 8];
        attr->grh.traffic_class = bytes[20 + 1];
    } else {
        uint32_t first = ntohl(grh->version_tclass_flow);

        attr->grh.dgid = grh->sgid;
        own = grh->dgid;
        attr->grh.flow_label = first & 0xfffff;
        attr->grh.traffic_class = first >> 20 & 0xff;
        attr->grh.hop_limit = grh->hop_limit;
    }
    /* What came to a multicast group is answered from an address of this port's own. */
    for (i = FABRIC_GIDS; i-- > 0;)
        if (device->gids[i].used &&
            (own.raw[0] == 0xff || !memcmp(&device->gids[i].gid, &own, 16) ||
             (own.raw[10] == 0xff && own.raw[12] >= 224))) {
            attr->grh.sgid_index = (uint8_t)i;
            return 0;
        }
    return ENOENT;
}

FABRIC_API struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc,
                                                struct ibv_grh *grh, uint8_t port)
{
    struct ibv_ah_attr attr;
    int error = ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr);

    if (error) {
        errno = error;
        return NULL;
    }
    return ibv_create_ah(pd, &attr);
}

/* ---- multicast ------------------------------------------------------------------------------- */

struct member {
    struct fabric_list links;
    struct fabric_qp *qp;
    union ibv_gid gid;
};

static struct fabric_list members = {&members, &members};
static unsigned members_generation;

static struct fabric_list *all_members(void)
{
    if (members_generation != fabric_generation()) {
        fabric_list_init(&members); /* they are the parent's */
        members_generation = fabric_generation();
    }
    return &members;
}

static struct member *member_find(struct fabric_qp *qp, const union ibv_gid *gid)
{
    struct fabric_list *item;

    for (item = all_members()->next; item != &members; item = item->next) {
        struct member *member = FABRIC_CONTAINER(item, struct member, links);

        if (member->qp == qp && !memcmp(&member->gid, gid, sizeof(*gid)))
            return member;
    }
    return NULL;
}

/* IPv6 multicast addresses, and the groups of IPv4 as RoCE writes them. */
static bool is_multicast(const union ibv_gid *gid)
{
    static const unsigned char MAPPED[12] = {[10] = 0xff, [11] = 0xff};

    return gid->raw[0] == 0xff ||
           (!memcmp(gid->raw, MAPPED, sizeof(MAPPED)) && gid->raw[12] >> 4 == 0xe);
}

FABRIC_API int ibv_attach_mcast(struct ibv_qp *ibv, const union ibv_gid *gid, uint16_t lid)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    struct member *member;
    int error = 0;

    if (ibv->qp_type != IBV_QPT_UD || !is_multicast(gid))
        return EINVAL;
    fabric_lock();
    if (fabric_fails("ibv_attach_mcast"))
        error = errno;
    else if (qp->multicast >= (unsigned)fabric_profile.max_mcast_qp_attach)
        error = ENOMEM;
    else if (!member_find(qp, gid)) {
        member = calloc(1, sizeof(*member));
        if (member) {
            member->qp = qp;
            member->gid = *gid;
            fabric_list_add(all_members(), &member->links);
            qp->multicast++;
        } else {
            error = ENOMEM;
        }
    }
    fabric_unlock();
    return error;
}

FABRIC_API int ibv_detach_mcast(struct ibv_qp *ibv, const union ibv_gid *gid, uint16_t lid)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    struct member *member;
    int error = 0;

    fabric_lock();
    member = member_find(qp, gid);
    if (member) {
        fabric_list_remove(&member->links);
        free(member);
        qp->multicast--;
    } else {
        error = EINVAL;
    }
    fabric_unlock();
    return error;
}

/* ---- sending --------------------------------------------------------------------------------- */

/* To each process of the run; each gives it to its own members. */
static void send_to_all(const struct fabric_packet *packet)
{
    uint64_t alive[(FABRIC_SLOTS + 64) / 64];
    unsigned slot;

    fabric_slots_alive(alive);
    for (slot = 1; slot <= FABRIC_SLOTS; slot++) {
        struct fabric_packet *copy;

        if (!(alive[slot / 64] >> slot % 64 & 1))
            continue;
        copy = fabric_packet_copy(packet);
        if (!copy)
            return;
        copy->header.slot = (uint16_t)slot;
        fabric_packet_send(copy);
    }
}

static struct fabric_packet *datagram_new(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    struct fabric_device *device = qp->context->device;
    struct fabric_packet *packet = fabric_packet_new((uint32_t)wqe->length);
    struct fabric_header *header;

    if (!packet)
        return NULL;
    header = &packet->header;
    header->opcode = FABRIC_DATAGRAM;
    header->from_device = (uint8_t)device->number;
    header->from_lid = device->lid;
    header->from_qpn = qp->ibv.qp_num;
    header->to_qpn = wqe->remote_qpn;
    /* A key whose highest bit is set stands for the queue pair's own. */
    header->qkey = wqe->remote_qkey >> 31 ? qp->attr.qkey : wqe->remote_qkey;
    header->sl = wqe->to.sl;
    header->to_gid = wqe->to.gid;
    header->from_gid = device->gids[wqe->to.sgid_index].gid;
    header->gid_type = (uint8_t)device->gids[wqe->to.sgid_index].type;
    header->imm_or_key = wqe->imm_or_key;
    if (wqe->opcode == IBV_WR_SEND_WITH_IMM)
        header->flags |= FABRIC_IMMEDIATE;
    if (wqe->flags & IBV_SEND_SOLICITED)
        header->flags |= FABRIC_SOLICITED;
    return packet;
}

void fabric_send_datagram(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    struct fabric_packet *packet = NULL;
    struct fabric_device *to;

    if (fabric_fails("datagram")) {
        /* Its way is gone: as on Soft-RoCE, it comes back flushed, with all that is posted. */
        fabric_qp_error(qp);
        return;
    }
    if (wqe->length > (uint64_t)fabric_profile.mtu) {
        /* No packet, and no error: C10-93.1.1 of the specification. */
        fabric_wqe_end(qp, wqe, IBV_WC_SUCCESS);
        return;
    }
    if ((packet = datagram_new(qp, wqe)) && fabric_gather(qp, wqe, 0, packet->bytes, wqe->length)) {
        free(packet);
        /* The receiving half goes on. */
        qp->ibv.state = IBV_QPS_SQE;
        fabric_wqe_end(qp, wqe, IBV_WC_LOC_PROT_ERR);
        fabric_requester_flush(qp);
        return;
    }
    fabric_wqe_end(qp, wqe, IBV_WC_SUCCESS);
    if (!packet)
        return;
    if (packet->header.to_qpn == FABRIC_MULTICAST_QPN && is_multicast(&packet->header.to_gid)) {
        packet->header.flags |= FABRIC_MULTICAST;
        send_to_all(packet);
        free(packet);
        return;
    }
    to = fabric_to_device(&wqe->to);
    if (!to) {
        free(packet);
        return;
    }
    packet->header.to_device = (uint8_t)to->number;
    packet->header.slot = (uint16_t)fabric_slot_of(packet->header.to_qpn);
    fabric_packet_send(packet);
}

/* ---- receiving ------------------------------------------------------------------------------- */

static uint16_t ipv4_checksum(const unsigned char *header)
{
    uint32_t sum = 0;
    unsigned i;

    for (i = 0; i < 20; i += 2)
        sum += (uint32_t)header[i] << 8 | header[i + 1];
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~(sum + (sum >> 16));
}

static void write_grh(const struct fabric_header *header, unsigned char *grh)
{
    unsigned payload = 8 + 12 + 8 + header->size + 4; /* UDP, BTH, DETH, bytes, ICRC */
    uint16_t sum;

    memset(grh, 0, GRH);
    if (header->gid_type == IBV_GID_TYPE_ROCE_V2 && header->from_gid.raw[10] == 0xff &&
        !header->from_gid.raw[0]) {
        unsigned char *four = grh + 20;

        four[0] = 0x45;
        four[2] = (unsigned char)((payload + 20) >> 8);
        four[3] = (unsigned char)(payload + 20);
        four[6] = 0x40; /* do not fragment */
        four[8] = HOPS;
        four[9] = UDP;
        memcpy(four + 12, header->from_gid.raw + 12, 4);
        memcpy(four + 16, header->to_gid.raw + 12, 4);
        sum = ipv4_checksum(four);
        four[10] = (unsigned char)(sum >> 8);
        four[11] = (unsigned char)sum;
        return;
    }
    grh[0] = 0x60;
    grh[4] = (unsigned char)(payload >> 8);
    grh[5] = (unsigned char)payload;
    grh[6] = header->gid_type == IBV_GID_TYPE_ROCE_V2 ? UDP : NEXT_HEADER_IBA;
    grh[7] = HOPS;
    memcpy(grh + 8, &header->from_gid, 16);
    memcpy(grh + 24, &header->to_gid, 16);
}

static void datagram_take(struct fabric_qp *qp, const struct fabric_packet *packet)
{
    const struct fabric_header *header = &packet->header;
    struct ibv_wc wc = {.opcode = IBV_WC_RECV,
                        .byte_len = GRH + header->size,
                        .qp_num = qp->ibv.qp_num,
                        .src_qp = header->from_qpn,
                        .slid = header->from_lid,
                        .sl = header->sl};
    static const union ibv_gid NONE;
    unsigned char grh[GRH];
    const struct fabric_recv *first = fabric_recv_first(qp);
    struct fabric_recv recv;

    if ((qp->ibv.state != IBV_QPS_RTR && qp->ibv.state != IBV_QPS_RTS &&
         qp->ibv.state != IBV_QPS_SQD && qp->ibv.state != IBV_QPS_SQE) ||
        qp->attr.qkey != header->qkey || !first)
        return;
    if (fabric_recv_room(first) < wc.byte_len && !qp->srq)
        return; /* it is dropped, and the receive is the next one's: class D of section 9.9.3 */
    fabric_recv_take(qp, &recv);
    wc.wr_id = recv.wr_id;
    if (fabric_recv_room(&recv) < wc.byte_len) {
        /* What was taken from a shared queue completes: class E. */
        wc.status = IBV_WC_LOC_LEN_ERR;
        fabric_complete(qp->recv_cq, &wc, true);
        fabric_qp_error(qp);
        return;
    }
    if (memcmp(&header->to_gid, &NONE, sizeof(NONE))) {
        write_grh(header, grh);
        wc.wc_flags |= IBV_WC_GRH;
    } else {
        memset(grh, 0, sizeof(grh));
    }
    if (fabric_scatter(qp->pd, recv.sge, recv.sges, 0, grh, GRH) ||
        fabric_scatter(qp->pd, recv.sge, recv.sges, GRH, packet->bytes, header->size)) {
        wc.status = IBV_WC_LOC_PROT_ERR;
        fabric_complete(qp->recv_cq, &wc, true);
        fabric_qp_error(qp);
        return;
    }
    if (header->flags & FABRIC_IMMEDIATE) {
        wc.wc_flags |= IBV_WC_WITH_IMM;
        wc.imm_data = header->imm_or_key;
    }
    fabric_complete(qp->recv_cq, &wc, header->flags & FABRIC_SOLICITED);
}

void fabric_datagram_arrived(struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    struct fabric_list *item;
    struct fabric_qp *qp;

    if (!(header->flags & FABRIC_MULTICAST)) {
        qp = fabric_qp_find(header->to_qpn);
        if (qp && qp->ibv.qp_type == IBV_QPT_UD)
            datagram_take(qp, packet);
        return;
    }
    for (item = all_members()->next; item != &members; item = item->next) {
        struct member *member = FABRIC_CONTAINER(item, struct member, links);

        /* The sender itself is a member like others: to leave it out, a flag is asked for at its
         * making (IBV_QP_CREATE_BLOCK_SELF_MCAST_LB), which the fabric does not offer. */
        if (!memcmp(&member->gid, &header->to_gid, sizeof(member->gid)))
            datagram_take(member->qp, packet);
    }
}
