/* Packets: how they are made, and who takes them when they have come. */
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

struct fabric_packet *fabric_packet_new(uint32_t size)
{
    struct fabric_packet *packet = malloc(sizeof(*packet) + size);

    if (!packet)
        return NULL;
    memset(packet, 0, sizeof(*packet));
    packet->header.size = size;
    return packet;
}

struct fabric_packet *fabric_packet_copy(const struct fabric_packet *packet)
{
    struct fabric_packet *copy = malloc(sizeof(*copy) + packet->header.size);

    if (copy)
        memcpy(copy, packet, sizeof(*copy) + packet->header.size);
    return copy;
}

void fabric_packet_arrived(struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    struct fabric_qp *qp;

    switch ((enum fabric_opcode)header->opcode) {
    case FABRIC_CM:
        fabric_cm_arrived(packet);
        return;
    case FABRIC_GONE:
        fabric_cm_process_gone(header->from_slot);
        return;
    case FABRIC_DATAGRAM:
        fabric_datagram_arrived(packet);
        return;
    case FABRIC_SEND:
    case FABRIC_WRITE:
    case FABRIC_READ:
    case FABRIC_ATOMIC:
    case FABRIC_ACK:
    case FABRIC_READ_ANSWER:
    case FABRIC_ATOMIC_ANSWER:
        break;
    default:
        return;
    }
    /* A packet for a queue pair that is gone, or from another peer than its own, is dropped. */
    qp = fabric_qp_find(header->to_qpn);
    if (!qp || qp->ibv.qp_type != IBV_QPT_RC || qp->attr.dest_qp_num != header->from_qpn)
        return;
    if (qp->ibv.state != IBV_QPS_RTR && qp->ibv.state != IBV_QPS_RTS &&
        qp->ibv.state != IBV_QPS_SQD)
        return;
    if (header->opcode >= FABRIC_ACK)
        fabric_requester_arrived(qp, packet);
    else
        fabric_responder_arrived(qp, packet);
}
