/* rsockets: rsetsockopt(), rgetsockopt(), rfcntl(), and the defaults. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rsocket.h"

#define LEAST_BYTES 2048 /* of a ring */
#define MOST_BYTES  (1 << 30)
#define LEAST_QUEUE 16
#define MOST_QUEUE  0xfffe
#define MOST_SLOTS  32512

enum kind {
    FLAG,     /* any number but 0 is 1 */
    POSITIVE, /* another number is refused */
    BUFFER,   /* twice as much is taken, and within the limits; a hint once the memory is there */
    QUEUE,    /* taken within the limits; refused once the queues are there */
};

/* The options that are a number of struct stream_options. */
static const struct number {
    int level, name;
    enum kind kind;
    size_t place;
    int least, most;
} numbers[] = {
#define PLACE(member) offsetof(struct stream_options, member)
    {SOL_SOCKET, SO_REUSEADDR, FLAG, PLACE(reuse), 0, 0},
    {SOL_SOCKET, SO_KEEPALIVE, FLAG, PLACE(keepalive), 0, 0},
    {SOL_SOCKET, SO_OOBINLINE, FLAG, PLACE(oob_inline), 0, 0},
    {SOL_SOCKET, SO_RCVBUF, BUFFER, PLACE(receive_bytes), LEAST_BYTES, MOST_BYTES},
    {SOL_SOCKET, SO_SNDBUF, BUFFER, PLACE(send_bytes), LEAST_BYTES, MOST_BYTES},
    {IPPROTO_TCP, TCP_NODELAY, FLAG, PLACE(nodelay), 0, 0},
    {IPPROTO_TCP, TCP_MAXSEG, POSITIVE, PLACE(maxseg), 0, 0},
    {IPPROTO_TCP, TCP_KEEPIDLE, POSITIVE, PLACE(keep_idle), 0, 0},
    {IPPROTO_TCP, TCP_KEEPINTVL, POSITIVE, PLACE(keep_interval), 0, 0},
    {IPPROTO_TCP, TCP_KEEPCNT, POSITIVE, PLACE(keep_count), 0, 0},
    {IPPROTO_IPV6, IPV6_V6ONLY, FLAG, PLACE(v6only), 0, 0},
    {SOL_RDMA, RDMA_SQSIZE, QUEUE, PLACE(sends), LEAST_QUEUE, MOST_QUEUE},
    {SOL_RDMA, RDMA_RQSIZE, QUEUE, PLACE(receives), LEAST_QUEUE, MOST_QUEUE},
    {SOL_RDMA, RDMA_INLINE, QUEUE, PLACE(inline_bytes), 0, STREAM_INLINE},
    {SOL_RDMA, RDMA_IOMAPSIZE, QUEUE, PLACE(slots), 0, MOST_SLOTS},
};

static const struct number *find_number(int level, int name)
{
    for (size_t i = 0; i < FABRIC_LENGTH(numbers); i++)
        if (numbers[i].level == level && numbers[i].name == name)
            return &numbers[i];
    return NULL;
}

static int *place_of(struct stream_options *options, const struct number *number)
{
    return (int *)((char *)options + number->place);
}

static int within(int64_t value, int least, int most)
{
    if (value < least)
        return least;
    return value > most ? most : (int)value;
}

/* ---- defaults -------------------------------------------------------------------------------- */

/* What the administrator says, or a number of our own. */
static int configured(const char *name, int otherwise, int least, int most)
{
    long value = otherwise;
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "/etc/rdma/rsocket/%s", name);
    file = fopen(path, "re");
    if (file && fscanf(file, "%ld", &value) != 1)
        value = otherwise;
    if (file)
        fclose(file);
    return within(value, least, most);
}

static struct stream_options defaults;

static void read_defaults(void)
{
    const int kib = 1024;

    defaults = (struct stream_options){
        /* A ring is used in halves. */
        .receive_bytes = configured("mem_default", 128 * kib, LEAST_BYTES, MOST_BYTES) & ~1,
        .send_bytes = configured("wmem_default", 128 * kib, LEAST_BYTES, MOST_BYTES),
        .sends = configured("sqsize_default", 384, LEAST_QUEUE, MOST_QUEUE),
        .receives = configured("rqsize_default", 384, LEAST_QUEUE, MOST_QUEUE),
        .inline_bytes = configured("inline_default", 64, 0, STREAM_INLINE),
        .slots = configured("iomap_size", 0, 0, MOST_SLOTS),
        .maxseg = 2048,
        .keep_idle = 7200,
        .keep_interval = 75,
        .keep_count = 9,
    };
}

void stream_default_options(struct stream_options *options)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, read_defaults);
    *options = defaults;
}

/* ---- setting --------------------------------------------------------------------------------- */

/* What the connection manager has to know, too. 0, or an errno. */
static int tell_manager(struct stream *stream, int level, int name, int value)
{
    int option = -1;

    if (level == SOL_SOCKET && name == SO_REUSEADDR)
        option = RDMA_OPTION_ID_REUSEADDR;
    else if (level == IPPROTO_IPV6 && name == IPV6_V6ONLY)
        option = RDMA_OPTION_ID_AFONLY;
    if (option < 0 || !rdma_set_option(stream->id, RDMA_OPTION_ID, option, &value, sizeof(value)))
        return 0;
    return errno;
}

static int set_number(struct stream *stream, const struct number *number, int value)
{
    int *place = place_of(&stream->options, number), error;

    switch (number->kind) {
    case FLAG:
        value = !!value;
        error = tell_manager(stream, number->level, number->name, value);
        if (error)
            return error;
        break;
    case POSITIVE:
        if (value <= 0)
            return EINVAL;
        break;
    case BUFFER:
        value = stream->cq ? *place : within(value * INT64_C(2), number->least, number->most);
        break;
    case QUEUE:
        if (stream->cq || value < 0)
            return EINVAL;
        value = within(value, number->least, number->most);
        break;
    }
    *place = value;
    return 0;
}

static int set_route(struct stream *stream, const void *route, socklen_t size)
{
    void *copy;

    if (stream->cq || !size || size % sizeof(struct ibv_path_data))
        return EINVAL;
    copy = malloc(size);
    if (!copy)
        return ENOMEM;
    memcpy(copy, route, size);
    free(stream->route);
    stream->route = copy;
    stream->route_size = size;
    return 0;
}

static int set_option(struct stream *stream, int level, int name, const void *value, socklen_t size)
{
    const struct number *number = find_number(level, name);
    struct linger *linger = &stream->options.linger;
    int copy;

    if (level == SOL_RDMA && name == RDMA_ROUTE)
        return set_route(stream, value, size);
    if (level == SOL_SOCKET && name == SO_LINGER) {
        if (size < sizeof(*linger))
            return EINVAL;
        memcpy(linger, value, sizeof(*linger));
        return 0;
    }
    if (!number)
        return ENOPROTOOPT;
    if (size < sizeof(copy))
        return EINVAL;
    memcpy(&copy, value, sizeof(copy));
    return set_number(stream, number, copy);
}

FABRIC_API int rsetsockopt(int socket, int level, int optname, const void *optval, socklen_t optlen)
{
    struct stream *stream = stream_take(socket);

    if (!stream)
        return -1;
    return stream_finish(stream, set_option(stream, level, optname, optval, optlen));
}

/* ---- getting --------------------------------------------------------------------------------- */

/* Copy as much as the program has room for; the size becomes that. */
static int tell(const void *from, socklen_t whole, void *value, socklen_t *size)
{
    if (*size > whole)
        *size = whole;
    memcpy(value, from, *size);
    return 0;
}

/* What a socket says of itself. 0, or an errno. */
static int get_state(struct stream *stream, int name, int *value)
{
    switch (name) {
    case SO_ERROR:
        stream_take_events(stream);
        *value = stream->error;
        stream->error = 0;
        return 0;
    case SO_TYPE:
        *value = SOCK_STREAM;
        return 0;
    case SO_DOMAIN:
        *value = stream->domain;
        return 0;
    case SO_PROTOCOL:
        *value = IPPROTO_TCP;
        return 0;
    case SO_ACCEPTCONN:
        *value = stream->state == STREAM_LISTENING;
        return 0;
    default:
        return ENOPROTOOPT;
    }
}

static int get_option(struct stream *stream, int level, int name, void *value, socklen_t *size)
{
    const struct number *number = find_number(level, name);
    int state, error;

    if (level == SOL_SOCKET && name == SO_LINGER)
        return tell(&stream->options.linger, sizeof(struct linger), value, size);
    if (level == SOL_RDMA && name == RDMA_ROUTE && stream->route)
        return tell(stream->route, stream->route_size, value, size);
    if (number)
        return tell(place_of(&stream->options, number), sizeof(int), value, size);
    error = level == SOL_SOCKET ? get_state(stream, name, &state) : ENOPROTOOPT;
    return error ? error : tell(&state, sizeof(state), value, size);
}

FABRIC_API int rgetsockopt(int socket, int level, int optname, void *optval, socklen_t *optlen)
{
    struct stream *stream = stream_take(socket);

    if (!stream)
        return -1;
    return stream_finish(stream, get_option(stream, level, optname, optval, optlen));
}

FABRIC_API int rfcntl(int socket, int cmd, ... /* arg */)
{
    struct stream *stream = stream_take(socket);
    int result = 0;
    va_list arguments;

    if (!stream)
        return -1;
    va_start(arguments, cmd);
    switch (cmd) {
    case F_GETFL:
        result = O_RDWR | (stream->nonblocking ? O_NONBLOCK : 0);
        break;
    case F_SETFL:
        stream->nonblocking = va_arg(arguments, int) & O_NONBLOCK;
        break;
    case F_GETFD:
        result = fcntl(stream->fd, F_GETFD);
        break;
    case F_SETFD:
        result = fcntl(stream->fd, F_SETFD, va_arg(arguments, int));
        break;
    default:
        errno = EINVAL;
        result = -1;
    }
    va_end(arguments);
    stream_release(stream);
    return result;
}
