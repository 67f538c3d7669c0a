/*
 * What happens to an adapter, on demand: its port goes down, somebody takes it away, an event
 * comes that no state of the fabric leads to.  Each is of this process alone; the adapters of the
 * others, which have the same names, go on.
 */
#define _GNU_SOURCE
#include "fabric.h"

static void tell_contexts(const struct fabric_device *device, enum ibv_event_type type)
{
    struct fabric_list *item;

    for (item = fabric_contexts.next; item != &fabric_contexts; item = item->next) {
        struct fabric_context *context = FABRIC_CONTAINER(item, struct fabric_context, links);

        if (context->device == device)
            fabric_tell(context, type, (void *)1); /* the port */
    }
}

/* The port of a device goes up or down, and its users hear so. 0, or -1: there is none such. */
FABRIC_API int fabric_link(unsigned number, int up)
{
    enum ibv_port_state state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    struct fabric_device *device;
    int result = -1;

    fabric_lock();
    device = fabric_device(number);
    if (device && !device->removed) {
        if (device->state != state)
            tell_contexts(device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
        device->state = state;
        result = 0;
    }
    fabric_unlock();
    return result;
}

/*
 * All addresses of a device go or come back, as on a network interface from which somebody takes
 * them: their GIDs change, and no packet gets to the device or away from it while they are gone.
 */
FABRIC_API int fabric_address(unsigned number, int present)
{
    struct fabric_device *device;
    int result = -1;

    fabric_lock();
    device = fabric_device(number);
    if (device && !device->removed) {
        if (device->unaddressed == !!present) {
            fabric_device_address(device, present);
            tell_contexts(device, IBV_EVENT_GID_CHANGE);
        }
        result = 0;
    }
    fabric_unlock();
    return result;
}

/*
 * A device is taken away.  Its port is down, its queue pairs have failed (drivers of hardware that
 * is gone flush in its place), its users and ids are told, and nobody finds it any more.  The
 * objects stay until the program destroys them.  There is no way back.
 */
FABRIC_API int fabric_remove(unsigned number)
{
    struct fabric_device *device;
    struct fabric_list *item;
    int result = -1;

    fabric_lock();
    device = fabric_device(number);
    if (device && !device->removed) {
        device->removed = true;
        device->state = IBV_PORT_DOWN;
        for (item = fabric_qps.next; item != &fabric_qps; item = item->next) {
            struct fabric_qp *qp = FABRIC_CONTAINER(item, struct fabric_qp, links);

            if (qp->context->device == device)
                fabric_qp_error(qp);
        }
        tell_contexts(device, IBV_EVENT_DEVICE_FATAL);
        fabric_cm_incident(device, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        result = 0;
    }
    fabric_unlock();
    return result;
}

/*
 * An event of a port or of a device, by its number; of a queue pair, or of the queue in which its
 * sends complete, by the number of the queue pair.  A fatal one has ended the queue pair before.
 */
FABRIC_API int fabric_raise(int type, unsigned number)
{
    struct fabric_device *device;
    struct fabric_qp *qp;
    int result = -1;

    fabric_lock();
    switch (type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        if ((qp = fabric_qp_find(number)))
            fabric_qp_error(qp);
        /* fall through */
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        if ((qp = fabric_qp_find(number))) {
            fabric_tell(qp->context, (enum ibv_event_type)type, &qp->ibv);
            result = 0;
        }
        break;
    case IBV_EVENT_CQ_ERR:
        if ((qp = fabric_qp_find(number))) {
            fabric_tell(qp->context, IBV_EVENT_CQ_ERR, &qp->send_cq->ibv);
            result = 0;
        }
        break;
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
        if ((device = fabric_device(number))) {
            tell_contexts(device, (enum ibv_event_type)type);
            result = 0;
        }
        break;
    default:
        break;
    }
    fabric_unlock();
    return result;
}

/* An event of the connection manager for each id of a device that is connected. */
FABRIC_API int fabric_cm_raise(int type, unsigned number, int status)
{
    struct fabric_device *device;

    fabric_lock();
    device = fabric_device(number);
    if (device && type != RDMA_CM_EVENT_DEVICE_REMOVAL)
        fabric_cm_incident(device, (enum rdma_cm_event_type)type, status);
    fabric_unlock();
    return device && type != RDMA_CM_EVENT_DEVICE_REMOVAL ? 0 : -1;
}
