/*
 * Between the processes of a run: one socket of packets for each pair and direction.
 *
 * A process listens at a path in the folder of the run, connects to another one when it has a
 * packet for it, and only sends there.  The kernel tells both ends when the other one has ended,
 * however it ended: for the connection manager that is the end of each connection with it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fabric.h"
#include "registry.h"

enum {
    PACKET_MOST = 64 * 1024, /* bytes that follow a header */
    AT_ONCE = 64,            /* packets that are read from one process before the next one's turn */
    BUFFER = 1 << 20,        /* bytes of a socket that wait to be read */
};

struct way { /* to another process */
    int fd;  /* 0: not connected; descriptors here are never 0, 1 or 2 */
    struct fabric_list queue;
};

static struct {
    unsigned slot; /* 0: has not joined */
    int listening, wake;
    struct way out[FABRIC_SLOTS + 1];
    struct {
        int fd;
        unsigned slot; /* 0: has sent nothing yet */
    } in[FABRIC_SLOTS + 1];
    unsigned in_count;
} wire;

const char *fabric_folder(void)
{
    const char *folder = getenv("AIORDMA_FABRIC");

    return folder && *folder && !fabric_is_stepped ? folder : NULL;
}

/* Move a descriptor away from those of the standard streams, which a program may have closed. */
static int keep_apart(int fd)
{
    int moved;

    if (fd < 0 || fd > 2)
        return fd;
    moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    close(fd);
    return moved;
}

static bool path_of(unsigned slot, struct sockaddr_un *address)
{
    int length;

    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    length =
        snprintf(address->sun_path, sizeof(address->sun_path), "%s/p%u", fabric_folder(), slot);
    return length > 0 && (size_t)length < sizeof(address->sun_path);
}

static int open_socket(void)
{
    int fd = keep_apart(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int size = BUFFER;

    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    return fd;
}

static void listen_as(unsigned slot)
{
    struct sockaddr_un address;

    wire.listening = open_socket();
    if (wire.listening < 0 || !path_of(slot, &address)) {
        perror("fabric: a process cannot join the run");
        abort();
    }
    unlink(address.sun_path); /* of a process that had the number before */
    if (bind(wire.listening, (struct sockaddr *)&address, sizeof(address)) ||
        listen(wire.listening, FABRIC_SLOTS)) {
        perror("fabric: a process cannot join the run");
        abort();
    }
}

unsigned fabric_slot(void)
{
    if (!wire.slot && !fabric_folder())
        wire.slot = 1;
    if (!wire.slot) {
        wire.slot = fabric_registry_join();
        wire.wake = keep_apart(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        listen_as(wire.slot);
        fabric_service_start();
    }
    return wire.slot;
}

void fabric_wire_wake(void)
{
    uint64_t one = 1;

    if (!wire.wake)
        wire.wake = keep_apart(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    (void)!write(wire.wake, &one, sizeof(one));
}

void fabric_wire_forget(void)
{
    unsigned i;

    for (i = 0; i <= FABRIC_SLOTS; i++)
        if (wire.out[i].fd)
            close(wire.out[i].fd);
    for (i = 0; i < wire.in_count; i++)
        close(wire.in[i].fd);
    if (wire.listening)
        close(wire.listening);
    if (wire.wake)
        close(wire.wake);
    memset(&wire, 0, sizeof(wire));
}

/* ---- sending --------------------------------------------------------------------------------- */

static void way_close(unsigned slot)
{
    struct way *way = &wire.out[slot];

    if (!way->fd)
        return;
    close(way->fd);
    way->fd = 0;
    while (!fabric_list_empty(&way->queue)) {
        struct fabric_packet *packet =
            FABRIC_CONTAINER(way->queue.next, struct fabric_packet, links);

        fabric_list_remove(&packet->links);
        free(packet);
    }
}

static struct way *way_to(unsigned slot)
{
    struct way *way = &wire.out[slot];
    struct sockaddr_un address;
    int fd;

    if (way->fd)
        return way;
    fd = open_socket();
    if (fd < 0)
        return NULL;
    if (!path_of(slot, &address) || connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        close(fd);
        return NULL;
    }
    way->fd = fd;
    fabric_list_init(&way->queue);
    fabric_wire_wake(); /* the service thread waits for its end, too */
    return way;
}

/* 1: sent, or it never will be; 0: later. */
static int send_now(struct way *way, const struct fabric_packet *packet)
{
    ssize_t sent =
        send(way->fd, &packet->header, sizeof(packet->header) + packet->header.size, MSG_NOSIGNAL);

    return sent >= 0 || (errno != EAGAIN && errno != EINTR && errno != ENOBUFS);
}

void fabric_wire_send(struct fabric_packet *packet)
{
    unsigned slot = packet->header.slot;
    struct way *way;

    if (slot == 0 || slot > FABRIC_SLOTS || !fabric_folder() || !(way = way_to(slot))) {
        free(packet);
        return;
    }
    if (fabric_list_empty(&way->queue) && send_now(way, packet)) {
        free(packet);
        return;
    }
    if (fabric_list_empty(&way->queue))
        fabric_wire_wake();
    fabric_list_add(&way->queue, &packet->links);
}

static void way_go_on(struct way *way)
{
    while (!fabric_list_empty(&way->queue)) {
        struct fabric_packet *packet =
            FABRIC_CONTAINER(way->queue.next, struct fabric_packet, links);

        if (!send_now(way, packet))
            return;
        fabric_list_remove(&packet->links);
        free(packet);
    }
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* What it has sent comes before its end, and is taken before it, too. */
static void peer_gone(unsigned slot)
{
    struct fabric_packet *packet;

    if (!slot)
        return;
    way_close(slot);
    packet = fabric_packet_new(0);
    if (!packet) {
        fabric_cm_process_gone(slot);
        return;
    }
    packet->header.opcode = FABRIC_GONE;
    packet->header.from_slot = (uint16_t)slot;
    packet->header.from_device = packet->header.to_device = FABRIC_DEVICES; /* of none: never cut */
    fabric_enqueue(packet);
}

enum heard { HEARD_ALL, HEARD_MORE, HEARD_END }; /* MORE: there may be; END: the process's */

static enum heard read_from(unsigned place)
{
    static struct {
        struct fabric_header header;
        unsigned char bytes[PACKET_MOST];
    } came;
    struct fabric_packet *packet;
    ssize_t length;
    int i;

    for (i = 0; i < AT_ONCE; i++) {
        length = recv(wire.in[place].fd, &came, sizeof(came), MSG_DONTWAIT);
        if (length < 0)
            return errno == EAGAIN || errno == EINTR ? HEARD_ALL : HEARD_END;
        if (length == 0)
            return HEARD_END;
        if ((size_t)length < sizeof(came.header) ||
            came.header.size != (size_t)length - sizeof(came.header) ||
            came.header.from_slot > FABRIC_SLOTS || came.header.opcode == FABRIC_GONE)
            continue;
        wire.in[place].slot = came.header.from_slot;
        packet = fabric_packet_new(came.header.size);
        if (!packet)
            continue; /* lost, as a packet may be */
        packet->header = came.header;
        memcpy(packet->bytes, came.bytes, came.header.size);
        fabric_enqueue(packet);
    }
    return HEARD_MORE;
}

static void accept_all(void)
{
    int fd;

    while (wire.in_count <= FABRIC_SLOTS &&
           (fd = keep_apart(accept4(wire.listening, NULL, NULL, SOCK_CLOEXEC))) >= 0) {
        wire.in[wire.in_count].fd = fd;
        wire.in[wire.in_count++].slot = 0;
    }
}

static void in_close(unsigned place)
{
    unsigned slot = wire.in[place].slot;

    close(wire.in[place].fd);
    wire.in[place] = wire.in[--wire.in_count];
    peer_gone(slot);
}

/* The way to a process has ended: read what it had sent. Whether that has told of its end. */
static bool read_rest(unsigned slot)
{
    bool told = false;
    enum heard heard;
    unsigned i;

    accept_all();
    for (i = wire.in_count; i-- > 0;) {
        /* Who has not been heard yet may be the one. */
        if (wire.in[i].slot && wire.in[i].slot != slot)
            continue;
        do
            heard = read_from(i);
        while (heard == HEARD_MORE);
        if (heard == HEARD_END) {
            told |= wire.in[i].slot == slot;
            in_close(i);
        }
    }
    return told;
}

void fabric_wire_read(void)
{
    unsigned i;

    if (!wire.in_count || fabric_is_stepped)
        return;
    fabric_lock();
    for (i = wire.in_count; i-- > 0;)
        if (read_from(i) == HEARD_END)
            in_close(i);
    fabric_unlock();
}

static int wait_ms(fabric_time due)
{
    fabric_time now;

    if (due == UINT64_MAX)
        return -1;
    now = fabric_now();
    if (due <= now)
        return 0;
    due = (due - now + FABRIC_MS - 1) / FABRIC_MS;
    return due > 60000 ? 60000 : (int)due;
}

void fabric_wire_wait(fabric_time due)
{
    static struct pollfd polled[2 * FABRIC_SLOTS + 4];
    unsigned slots[2 * FABRIC_SLOTS + 4];
    unsigned count = 0, ins, i;
    uint64_t number;

    if (!wire.wake)
        wire.wake = keep_apart(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    polled[count++] = (struct pollfd){wire.wake, POLLIN, 0};
    polled[count++] = (struct pollfd){wire.listening ? wire.listening : -1, POLLIN, 0};
    for (ins = 0; ins < wire.in_count; ins++)
        polled[count++] = (struct pollfd){wire.in[ins].fd, POLLIN, 0};
    for (i = 1; i <= FABRIC_SLOTS; i++)
        if (wire.out[i].fd) {
            slots[count] = i;
            polled[count++] = (struct pollfd){
                wire.out[i].fd, fabric_list_empty(&wire.out[i].queue) ? 0 : POLLOUT, 0};
        }
    fabric_release();
    poll(polled, count, wait_ms(due));
    fabric_lock();
    (void)!read(wire.wake, &number, sizeof(number));
    for (i = 2 + ins; i < count; i++) {
        struct way *way = &wire.out[slots[i]];

        if (way->fd != polled[i].fd)
            continue;
        if (polled[i].revents & POLLOUT)
            way_go_on(way);
        if (polled[i].revents & (POLLHUP | POLLERR)) {
            way_close(slots[i]);
            if (!read_rest(slots[i]))
                peer_gone(slots[i]);
        }
    }
    /* From the last one, because a closed one's place is taken by the last. */
    for (i = ins; i-- > 0;)
        if (i < wire.in_count && polled[2 + i].fd == wire.in[i].fd && polled[2 + i].revents)
            if (read_from(i) == HEARD_END)
                in_close(i);
    if (polled[1].revents)
        accept_all();
}
