/* rsockets: the calls of a program, each as the socket call of its name. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rsocket.h"

#define SOCKET_FLAGS (SOCK_NONBLOCK | SOCK_CLOEXEC)

/* ---- the sockets of the process, by descriptor ----------------------------------------------- */

static struct {
    pthread_once_t once;
    pthread_mutex_t lock;
    unsigned generation; /* of the process: fork() begins a new one */
    struct stream **streams;
    int size;
} table = {.once = PTHREAD_ONCE_INIT, .lock = PTHREAD_MUTEX_INITIALIZER};

static void hold_table(void)
{
    pthread_mutex_lock(&table.lock);
}

static void give_table(void)
{
    pthread_mutex_unlock(&table.lock);
}

static void give_table_in_child(void)
{
    table.generation++;
    pthread_mutex_unlock(&table.lock);
}

static void watch_forks(void)
{
    pthread_atfork(hold_table, give_table, give_table_in_child);
}

/* 0, or an errno. The socket then has the table as its first user. */
static int add_stream(struct stream *stream)
{
    struct stream **streams;
    int size = table.size, error = 0;

    pthread_once(&table.once, watch_forks);
    pthread_mutex_lock(&table.lock);
    while (size <= stream->fd)
        size = size ? size * 2 : 64;
    if (size > table.size) {
        streams = realloc(table.streams, size * sizeof(*streams));
        if (streams) {
            memset(streams + table.size, 0, (size - table.size) * sizeof(*streams));
            table.streams = streams;
            table.size = size;
        } else {
            error = ENOMEM;
        }
    }
    if (!error) {
        stream->users = 1;
        stream->generation = table.generation;
        table.streams[stream->fd] = stream;
    }
    pthread_mutex_unlock(&table.lock);
    return error;
}

static struct stream *find_stream(int fd)
{
    return fd >= 0 && fd < table.size ? table.streams[fd] : NULL;
}

struct stream *stream_get(int fd)
{
    struct stream *stream;

    pthread_mutex_lock(&table.lock);
    stream = find_stream(fd);
    if (stream && stream->generation != table.generation)
        stream = NULL;
    if (stream)
        stream->users++;
    pthread_mutex_unlock(&table.lock);
    if (!stream)
        errno = EBADF;
    return stream;
}

void stream_put(struct stream *stream)
{
    bool is_last;

    pthread_mutex_lock(&table.lock);
    is_last = --stream->users == 0;
    pthread_mutex_unlock(&table.lock);
    if (is_last)
        stream_destroy(stream);
}

struct stream *stream_take(int fd)
{
    struct stream *stream = stream_get(fd);

    if (stream)
        pthread_mutex_lock(&stream->lock);
    return stream;
}

void stream_release(struct stream *stream)
{
    int error = errno;

    pthread_mutex_unlock(&stream->lock);
    stream_put(stream);
    errno = error;
}

int stream_finish(struct stream *stream, int error)
{
    stream_release(stream);
    if (error)
        errno = error;
    return error ? -1 : 0;
}

/* ---- conditions to wait for ------------------------------------------------------------------ */

static bool is_connecting(const struct stream *stream)
{
    return stream->state >= STREAM_ADDRESS && stream->state <= STREAM_CONNECTING;
}

static bool is_decided(const struct stream *stream)
{
    return !is_connecting(stream);
}

static bool has_request(const struct stream *stream)
{
    return stream->has_request || stream->state != STREAM_LISTENING;
}

static bool can_read(const struct stream *stream)
{
    return stream->ring_bytes || stream->state == STREAM_ENDED ||
           (stream->state >= STREAM_ACCEPTED && !stream->readable);
}

static bool can_write(const struct stream *stream)
{
    return stream_may_send(stream) || stream->state == STREAM_ENDED ||
           (stream->state >= STREAM_ACCEPTED && !stream->writable);
}

/* All that was sent is with the peer, and the last word, too. */
static bool is_flushed(const struct stream *stream)
{
    return stream->state == STREAM_ENDED ||
           (!stream->word && !stream->data_out && !stream->control_out);
}

static int64_t deadline_of(const struct stream *stream, int flags)
{
    return stream->nonblocking || flags & MSG_DONTWAIT ? STREAM_NOT : STREAM_FOREVER;
}

static int take_error(struct stream *stream)
{
    int error = stream->error;

    stream->error = 0;
    return error;
}

/* ---- making and closing ---------------------------------------------------------------------- */

FABRIC_API int rsocket(int domain, int type, int protocol)
{
    struct stream_options options;
    struct stream *stream;
    int error;

    if (domain != AF_INET && domain != AF_INET6 && domain != AF_IB)
        error = EAFNOSUPPORT;
    else if ((type & ~SOCKET_FLAGS) != SOCK_STREAM || (protocol && protocol != IPPROTO_TCP))
        error = EPROTONOSUPPORT;
    else {
        stream_default_options(&options);
        error = stream_create(&stream, domain, &options);
    }
    if (error) {
        errno = error;
        return -1;
    }
    stream->nonblocking = type & SOCK_NONBLOCK;
    if (rdma_create_id(stream->channel, &stream->id, stream, RDMA_PS_TCP))
        error = errno;
    if (!error)
        error = add_stream(stream);
    if (!error)
        return stream->fd;
    stream_destroy(stream);
    errno = error;
    return -1;
}

static socklen_t address_size(int family)
{
    switch (family) {
    case AF_INET:
        return sizeof(struct sockaddr_in);
    case AF_INET6:
        return sizeof(struct sockaddr_in6);
    default:
        return sizeof(struct sockaddr_ib);
    }
}

static int check_address(const struct stream *stream, const struct sockaddr *address,
                         socklen_t size)
{
    if (size < address_size(stream->domain))
        return EINVAL;
    return address->sa_family == stream->domain ? 0 : EAFNOSUPPORT;
}

static int bind_stream(struct stream *stream, const struct sockaddr *address)
{
    if (stream->bound || stream->state != STREAM_IDLE)
        return EINVAL;
    if (rdma_bind_addr(stream->id, (struct sockaddr *)address))
        return errno;
    stream->bound = true;
    return 0;
}

FABRIC_API int rbind(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
    struct stream *stream = stream_take(socket);
    int error;

    if (!stream)
        return -1;
    error = check_address(stream, addr, addrlen);
    return stream_finish(stream, error ? error : bind_stream(stream, addr));
}

FABRIC_API int rlisten(int socket, int backlog)
{
    struct stream *stream = stream_take(socket);
    struct sockaddr_storage any = {0};
    int error = 0;

    if (!stream)
        return -1;
    if (stream->state == STREAM_LISTENING)
        return stream_finish(stream, 0);
    if (stream->state != STREAM_IDLE)
        return stream_finish(stream, EINVAL);
    any.ss_family = stream->domain;
    if (!stream->bound)
        error = bind_stream(stream, (struct sockaddr *)&any);
    if (!error && rdma_listen(stream->id, backlog))
        error = errno;
    if (!error)
        stream->state = STREAM_LISTENING;
    return stream_finish(stream, error);
}

/* Tell an address as the calls of sockets do: cut to the memory, and how long it is. */
static void tell_address(const struct sockaddr *address, struct sockaddr *into, socklen_t *size)
{
    socklen_t whole = address_size(address->sa_family);

    if (!into || !size)
        return;
    memcpy(into, address, *size < whole ? *size : whole);
    *size = whole;
}

FABRIC_API int raccept(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
    struct stream *listener = stream_take(socket), *stream;
    struct stream_event request;
    int error;

    if (!listener)
        return -1;
    error = stream_wait(listener, has_request, deadline_of(listener, 0));
    if (!error && !listener->has_request)
        error = EINVAL;
    if (error)
        return stream_finish(listener, error);
    request = listener->request;
    listener->has_request = false;
    error = stream_create(&stream, listener->domain, &listener->options);
    if (error) {
        rdma_reject(request.id, NULL, 0);
        rdma_destroy_id(request.id);
        return stream_finish(listener, error);
    }
    stream_release(listener);
    error = stream_accept(stream, &request);
    if (!error)
        tell_address(rdma_get_peer_addr(stream->id), addr, addrlen);
    if (!error)
        error = add_stream(stream);
    if (!error)
        return stream->fd;
    stream_destroy(stream);
    errno = error;
    return -1;
}

FABRIC_API int rconnect(int socket, const struct sockaddr *addr, socklen_t addrlen)
{
    struct stream *stream = stream_take(socket);
    bool was_connecting;
    int error = 0;

    if (!stream)
        return -1;
    was_connecting = is_connecting(stream);
    if (stream->state == STREAM_ACCEPTED || stream->state == STREAM_CONNECTED)
        return stream_finish(stream, EISCONN);
    if (stream->state == STREAM_LISTENING)
        return stream_finish(stream, EINVAL);
    if (stream->state == STREAM_IDLE)
        error = check_address(stream, addr, addrlen);
    if (stream->state == STREAM_IDLE && !error)
        error = stream_connect(stream, addr);
    if (!error)
        error = stream_wait(stream, is_decided, deadline_of(stream, 0));
    if (error == EAGAIN)
        error = was_connecting ? EALREADY : EINPROGRESS;
    if (!error && stream->state == STREAM_ENDED)
        error = stream->error ? take_error(stream) : ECONNABORTED;
    return stream_finish(stream, error);
}

FABRIC_API int rshutdown(int socket, int how)
{
    struct stream *stream = stream_take(socket);
    int error;

    if (!stream)
        return -1;
    if (how != SHUT_RD && how != SHUT_WR && how != SHUT_RDWR)
        return stream_finish(stream, EINVAL);
    if (stream->state < STREAM_ACCEPTED)
        return stream_finish(stream, ENOTCONN);
    stream_shutdown(stream, how != SHUT_WR, how != SHUT_RD);
    do
        error = stream_wait(stream, is_flushed, stream_clock() + STREAM_LINGER_MS);
    while (error == EINTR);
    return stream_finish(stream, 0);
}

/* Say that the connection ends, and wait until the peer has what was sent. */
static void close_stream(struct stream *stream)
{
    const struct linger *linger = &stream->options.linger;
    int64_t most = linger->l_onoff ? linger->l_linger * INT64_C(1000) : STREAM_LINGER_MS;
    int64_t deadline = stream_clock() + most;

    if (most && stream->state >= STREAM_ACCEPTED) {
        stream_shutdown(stream, true, true);
        while (stream_wait(stream, is_flushed, deadline) == EINTR)
            ;
    }
    stream_end(stream, 0);
}

FABRIC_API int rclose(int socket)
{
    struct stream *stream;
    bool is_ours;

    pthread_mutex_lock(&table.lock);
    stream = find_stream(socket);
    if (stream)
        table.streams[socket] = NULL;
    is_ours = stream && stream->generation == table.generation;
    pthread_mutex_unlock(&table.lock);
    if (!stream) {
        errno = EBADF;
        return -1;
    }
    /* The parent's process has the connection: what is here is a copy of its memory. */
    if (!is_ours)
        return close(socket);
    pthread_mutex_lock(&stream->lock);
    close_stream(stream);
    stream_release(stream);
    return 0;
}

/* ---- data ------------------------------------------------------------------------------------ */

/* The bytes of all parts; -1 and errno: they are not as readv() takes them. */
static ssize_t size_of_parts(const struct iovec *parts, int count)
{
    size_t size = 0;

    if (count < 0 || count > IOV_MAX) {
        errno = EINVAL;
        return -1;
    }
    for (int i = 0; i < count; i++) {
        if (parts[i].iov_len > SSIZE_MAX - size) {
            errno = EINVAL;
            return -1;
        }
        size += parts[i].iov_len;
    }
    return size;
}

static ssize_t receive(int socket, const struct iovec *parts, int count, int flags)
{
    struct stream_cursor cursor = {parts, 0};
    ssize_t size = size_of_parts(parts, count), done = 0;
    struct stream *stream;
    int error = 0;

    if (size < 0)
        return -1;
    stream = stream_take(socket);
    if (!stream)
        return -1;
    if (flags & (MSG_OOB | MSG_ERRQUEUE | MSG_TRUNC))
        error = EOPNOTSUPP;
    else if (stream->state < STREAM_ADDRESS)
        error = ENOTCONN;
    while (!error && done < size) {
        error = stream_wait(stream, can_read, deadline_of(stream, flags));
        if (!error && !stream->ring_bytes) {
            error = done ? 0 : take_error(stream);
            break;
        }
        if (!error)
            done += stream_read(stream, &cursor, size - done, flags & MSG_PEEK);
        if (!(flags & MSG_WAITALL) || flags & MSG_PEEK)
            break;
    }
    stream_finish(stream, done ? 0 : error);
    return done || !error ? done : -1;
}

static int error_of_write(struct stream *stream)
{
    int error = take_error(stream);

    if (error)
        return error;
    return stream->state == STREAM_ENDED ? ECONNRESET : EPIPE;
}

static ssize_t transmit(int socket, const struct iovec *parts, int count, int flags)
{
    struct stream_cursor cursor = {parts, 0};
    ssize_t size = size_of_parts(parts, count), done = 0;
    struct stream *stream;
    int error = 0;

    if (size < 0)
        return -1;
    stream = stream_take(socket);
    if (!stream)
        return -1;
    /* Flags without a meaning here are ignored, as Linux does. */
    if (flags & MSG_OOB)
        error = EOPNOTSUPP;
    else if (stream->state < STREAM_ADDRESS)
        error = ENOTCONN;
    while (!error && done < size) {
        error = stream_wait(stream, can_write, deadline_of(stream, flags));
        if (!error && !stream_may_send(stream))
            error = done ? EPIPE : error_of_write(stream);
        if (!error)
            done += stream_write(stream, &cursor, size - done);
    }
    stream_finish(stream, done ? 0 : error);
    return done || !error ? done : -1;
}

FABRIC_API ssize_t rrecv(int socket, void *buf, size_t len, int flags)
{
    struct iovec part = {buf, len};

    return receive(socket, &part, 1, flags);
}

FABRIC_API ssize_t rrecvfrom(int socket, void *buf, size_t len, int flags,
                             struct sockaddr *src_addr, socklen_t *addrlen)
{
    ssize_t result = rrecv(socket, buf, len, flags);

    if (result > 0 && src_addr && rgetpeername(socket, src_addr, addrlen))
        return -1;
    return result;
}

FABRIC_API ssize_t rrecvmsg(int socket, struct msghdr *msg, int flags)
{
    ssize_t result = receive(socket, msg->msg_iov, msg->msg_iovlen, flags);

    if (result >= 0) {
        msg->msg_namelen = 0;
        msg->msg_controllen = 0;
        msg->msg_flags = 0;
    }
    return result;
}

FABRIC_API ssize_t rread(int socket, void *buf, size_t count)
{
    return rrecv(socket, buf, count, 0);
}

FABRIC_API ssize_t rreadv(int socket, const struct iovec *iov, int iovcnt)
{
    return receive(socket, iov, iovcnt, 0);
}

FABRIC_API ssize_t rsend(int socket, const void *buf, size_t len, int flags)
{
    struct iovec part = {(void *)buf, len};

    return transmit(socket, &part, 1, flags);
}

FABRIC_API ssize_t rsendto(int socket, const void *buf, size_t len, int flags,
                           const struct sockaddr *dest_addr, socklen_t addrlen)
{
    if (dest_addr || addrlen) {
        errno = EISCONN;
        return -1;
    }
    return rsend(socket, buf, len, flags);
}

FABRIC_API ssize_t rsendmsg(int socket, const struct msghdr *msg, int flags)
{
    if (msg->msg_controllen) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return transmit(socket, msg->msg_iov, msg->msg_iovlen, flags);
}

FABRIC_API ssize_t rwrite(int socket, const void *buf, size_t count)
{
    return rsend(socket, buf, count, 0);
}

FABRIC_API ssize_t rwritev(int socket, const struct iovec *iov, int iovcnt)
{
    return transmit(socket, iov, iovcnt, 0);
}

/* ---- memory of the peer ---------------------------------------------------------------------- */

/* A slot of the peer's table that no mapping has; -1: there is none. */
static int free_slot(const struct stream *stream)
{
    for (int slot = 0; slot < (int)stream->peer_slots; slot++) {
        const struct stream_map *map = stream->maps;

        while (map && map->slot != slot)
            map = map->next;
        if (!map)
            return slot;
    }
    return -1;
}

static int add_map(struct stream *stream, void *buf, size_t len, bool remote, off_t offset)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | (remote ? IBV_ACCESS_REMOTE_WRITE : 0);
    int slot = remote ? free_slot(stream) : -1, error;
    struct stream_map *map, **end = &stream->maps;

    if (remote && slot < 0)
        return ENOMEM;
    map = calloc(1, sizeof(*map));
    if (!map)
        return ENOMEM;
    map->mr = ibv_reg_mr(stream->pd, buf, len, access);
    if (!map->mr) {
        error = errno;
        free(map);
        return error;
    }
    map->slot = slot;
    map->offset = offset;
    /* They are published in the order in which they were made. */
    while (*end)
        end = &(*end)->next;
    *end = map;
    return 0;
}

FABRIC_API off_t riomap(int socket, void *buf, size_t len, int prot, int flags, off_t offset)
{
    struct stream *stream = stream_take(socket);
    int error;

    if (!stream)
        return -1;
    if (offset == -1)
        offset = (off_t)(uintptr_t)buf;
    if (!len || len > UINT32_MAX || flags || prot & ~PROT_WRITE)
        error = EINVAL;
    else if (stream->state != STREAM_ACCEPTED && stream->state != STREAM_CONNECTED)
        error = ENOTCONN;
    else
        error = add_map(stream, buf, len, prot & PROT_WRITE, offset);
    return stream_finish(stream, error) ? -1 : offset;
}

FABRIC_API int riounmap(int socket, void *buf, size_t len)
{
    struct stream *stream = stream_take(socket);
    struct stream_map *map, **place;
    int error = EINVAL;

    if (!stream)
        return -1;
    for (place = &stream->maps; (map = *place); place = &map->next)
        if (map->mr->addr == buf && map->mr->length == len)
            break;
    if (map) {
        error = ibv_dereg_mr(map->mr);
        *place = map->next;
        free(map);
    }
    return stream_finish(stream, error);
}

FABRIC_API size_t riowrite(int socket, const void *buf, size_t count, off_t offset, int flags)
{
    struct iovec part = {(void *)buf, count};
    struct stream_cursor cursor = {&part, 0};
    struct stream *stream = stream_take(socket);
    size_t done = 0;
    int error = 0;

    if (!stream)
        return -1;
    if (flags & MSG_OOB)
        error = EOPNOTSUPP;
    else if (stream->state < STREAM_ADDRESS)
        error = ENOTCONN;
    while (!error && done < count) {
        error = stream_wait(stream, can_write, deadline_of(stream, flags));
        if (!error && !stream_may_send(stream)) {
            error = done ? EPIPE : error_of_write(stream);
        } else if (!error) {
            ssize_t now = stream_write_mapped(stream, &cursor, count - done, offset + done);

            if (now < 0)
                error = EINVAL;
            else
                done += now;
        }
    }
    stream_finish(stream, done ? 0 : error);
    return done || !error ? done : (size_t)-1;
}

/* ---- names ----------------------------------------------------------------------------------- */

FABRIC_API int rgetpeername(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
    struct stream *stream = stream_take(socket);

    if (!stream)
        return -1;
    if (!stream->peer_credits)
        return stream_finish(stream, ENOTCONN);
    tell_address(rdma_get_peer_addr(stream->id), addr, addrlen);
    return stream_finish(stream, 0);
}

FABRIC_API int rgetsockname(int socket, struct sockaddr *addr, socklen_t *addrlen)
{
    struct stream *stream = stream_take(socket);
    struct sockaddr_storage none = {0};
    struct sockaddr *local;

    if (!stream)
        return -1;
    none.ss_family = stream->domain;
    local = rdma_get_local_addr(stream->id);
    tell_address(local->sa_family ? local : (struct sockaddr *)&none, addr, addrlen);
    return stream_finish(stream, 0);
}
