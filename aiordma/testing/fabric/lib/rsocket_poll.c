/*
 * rsockets: waiting, by one socket's call or by rpoll() for many.
 *
 * Who sleeps has armed the completion queue, has looked once more, and is on the socket's list of
 * sleepers.  For another thread may take the completions meanwhile, and with them the event that
 * the sleeper waits for: it then tells all who are on the list.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "rsocket.h"

struct entry { /* of what rpoll() is asked for; stream is NULL where it is no rsocket */
    struct stream *stream;
    struct stream_sleeper sleeper;
};

/* A thread that cannot be woken, for it may open no more descriptors, looks after so long. */
#define BLIND_MS 50

int64_t stream_clock(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* For poll(): the time until a deadline. */
static int time_left(int64_t deadline)
{
    int64_t left = deadline - stream_clock();

    if (deadline == STREAM_FOREVER)
        return -1;
    if (deadline == STREAM_NOT || left <= 0)
        return 0;
    return left < INT_MAX ? left : INT_MAX;
}

void stream_wake(struct stream *stream)
{
    uint64_t one = 1;

    for (struct stream_sleeper *sleeper = stream->sleepers; sleeper; sleeper = sleeper->next) {
        if (!sleeper->is_told)
            (void)!write(sleeper->wakeup, &one, sizeof(one));
        sleeper->is_told = true;
    }
}

void stream_arm(struct stream *stream)
{
    bool is_live = stream->state == STREAM_ACCEPTED || stream->state == STREAM_CONNECTED;

    /* Nobody takes completions in another state, and an event for them would be told for ever. */
    if (is_live && !stream->armed && !ibv_req_notify_cq(stream->cq, 0))
        stream->armed = true;
}

/* Before the sleep: what comes from now on wakes. The caller then looks at the state once more. */
static void fall_asleep(struct stream *stream, struct stream_sleeper *sleeper, int wakeup)
{
    stream_arm(stream);
    stream_progress(stream);
    *sleeper = (struct stream_sleeper){stream->sleepers, wakeup, false};
    stream->sleepers = sleeper;
}

static void wake_up(struct stream *stream, struct stream_sleeper *sleeper)
{
    struct stream_sleeper **place = &stream->sleepers;

    while (*place != sleeper)
        place = &(*place)->next;
    *place = sleeper->next;
}

/* poll(), and by another thread's word, which `own` has as the last of its entries. */
static int sleep_on(struct pollfd *own, nfds_t count, int timeout)
{
    struct pollfd *wakeup = &own[count - 1];
    bool is_blind = wakeup->fd < 0 && (timeout < 0 || timeout > BLIND_MS);
    int result = poll(own, count, is_blind ? BLIND_MS : timeout);
    uint64_t told;

    if (result > 0 && wakeup->revents)
        (void)!read(wakeup->fd, &told, sizeof(told));
    return result;
}

static int open_wakeup(void)
{
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

static void close_wakeup(int wakeup)
{
    if (wakeup >= 0)
        close(wakeup);
}

int stream_wait(struct stream *stream, bool (*condition)(const struct stream *stream),
                int64_t deadline)
{
    struct pollfd own[2] = {{stream->fd, POLLIN, 0}, {-1, POLLIN, 0}};
    struct stream_sleeper sleeper;
    int left, error = 0;

    stream_progress(stream);
    while (!error && !condition(stream)) {
        left = time_left(deadline);
        if (!left) {
            stream_take_events(stream);
            error = EAGAIN;
            break;
        }
        if (own[1].fd < 0)
            own[1].fd = open_wakeup();
        fall_asleep(stream, &sleeper, own[1].fd);
        if (!condition(stream)) {
            pthread_mutex_unlock(&stream->lock);
            if (sleep_on(own, FABRIC_LENGTH(own), left) < 0)
                error = errno;
            pthread_mutex_lock(&stream->lock);
        }
        wake_up(stream, &sleeper);
        stream_take_events(stream);
    }
    close_wakeup(own[1].fd);
    return condition(stream) ? 0 : error;
}

/* ---- rpoll() --------------------------------------------------------------------------------- */

static short ready_events(const struct stream *stream, short wanted)
{
    short in = wanted & (POLLIN | POLLRDNORM), out = wanted & (POLLOUT | POLLWRNORM), ready = 0;

    if (stream->state == STREAM_IDLE)
        return out | POLLHUP;
    if (stream->state == STREAM_LISTENING)
        return stream->has_request ? in : 0;
    if (stream->ring_bytes)
        ready |= in;
    if (stream_may_send(stream))
        ready |= out;
    if (stream->state == STREAM_CONNECTED && !stream->readable)
        ready |= in | (wanted & POLLRDHUP);
    if (stream->state == STREAM_CONNECTED && !stream->writable)
        ready |= out;
    if (stream->state == STREAM_ENDED)
        ready |= in | out | (wanted & POLLRDHUP);
    if (stream->error)
        ready |= POLLERR;
    /* Programs take it for the end of everything: there must be nothing left to read. */
    if (stream->state == STREAM_ENDED && !stream->ring_bytes)
        ready |= POLLHUP;
    return ready;
}

/* Before poll(): whether no socket has anything to tell, so that it may sleep. */
static bool fall_asleep_all(const struct pollfd *fds, struct pollfd *own, struct entry *entries,
                            nfds_t count)
{
    bool may_sleep = true;

    for (nfds_t i = 0; i < count; i++) {
        struct stream *stream = entries[i].stream;

        if (!stream)
            continue;
        pthread_mutex_lock(&stream->lock);
        fall_asleep(stream, &entries[i].sleeper, own[count].fd);
        /* Requests behind the one that waits for raccept() are no reason to wake. */
        own[i].events = stream->has_request ? 0 : POLLIN;
        may_sleep = may_sleep && !ready_events(stream, fds[i].events);
        pthread_mutex_unlock(&stream->lock);
    }
    return may_sleep;
}

/* After it: the number of sockets that have something to tell. */
static int wake_up_all(struct pollfd *fds, const struct pollfd *own, struct entry *entries,
                       nfds_t count)
{
    int ready = 0;

    for (nfds_t i = 0; i < count; i++) {
        struct stream *stream = entries[i].stream;

        if (!stream)
            continue;
        pthread_mutex_lock(&stream->lock);
        wake_up(stream, &entries[i].sleeper);
        if (own[i].revents)
            stream_take_events(stream);
        fds[i].revents = ready_events(stream, fds[i].events);
        pthread_mutex_unlock(&stream->lock);
        ready += fds[i].revents != 0;
    }
    return ready;
}

/* poll() with the descriptors of the sockets: `own` is a copy of what the program asks for. */
static int poll_streams(struct pollfd *fds, struct pollfd *own, struct entry *entries, nfds_t count,
                        int timeout)
{
    int64_t deadline = timeout < 0 ? STREAM_FOREVER : timeout ? stream_clock() + timeout : 0;
    int left, result, error, ready;
    bool may_sleep;

    memcpy(own, fds, count * sizeof(*own));
    own[count] = (struct pollfd){timeout ? open_wakeup() : -1, POLLIN, 0};
    for (;;) {
        left = time_left(deadline);
        may_sleep = fall_asleep_all(fds, own, entries, count);
        result = sleep_on(own, count + 1, may_sleep ? left : 0);
        error = errno;
        ready = wake_up_all(fds, own, entries, count);
        if (result < 0)
            ready = result;
        for (nfds_t i = 0; result >= 0 && i < count; i++) {
            if (entries[i].stream)
                continue;
            fds[i].revents = own[i].revents;
            ready += own[i].revents != 0;
        }
        if (ready || !left) {
            close_wakeup(own[count].fd);
            errno = error;
            return ready;
        }
    }
}

FABRIC_API int rpoll(struct pollfd *fds, nfds_t nfds, int timeout)
{
    struct entry *entries = NULL;
    struct pollfd *own = NULL;
    bool has_streams = false;
    int result, error;

    /* poll() refuses more than the process may have open, before it looks at them. */
    if (nfds && nfds <= (nfds_t)sysconf(_SC_OPEN_MAX)) {
        entries = calloc(nfds, sizeof(*entries));
        own = calloc(nfds + 1, sizeof(*own)); /* and one to be woken by */
        if (!entries || !own) {
            free(entries);
            free(own);
            errno = ENOMEM;
            return -1;
        }
        for (nfds_t i = 0; i < nfds; i++) {
            entries[i].stream = stream_get(fds[i].fd);
            has_streams = has_streams || entries[i].stream;
        }
    }
    result =
        has_streams ? poll_streams(fds, own, entries, nfds, timeout) : poll(fds, nfds, timeout);
    error = errno;
    for (nfds_t i = 0; has_streams && i < nfds; i++)
        if (entries[i].stream)
            stream_put(entries[i].stream);
    free(entries);
    free(own);
    errno = error;
    return result;
}

/* ---- rselect() ------------------------------------------------------------------------------- */

static bool wants(const fd_set *set, int fd)
{
    return set && FD_ISSET(fd, set);
}

/* Leave a descriptor in a set if it is ready: 1 or 0. */
static int keep(fd_set *set, int fd, bool is_ready)
{
    if (!wants(set, fd))
        return 0;
    if (!is_ready)
        FD_CLR(fd, set);
    return is_ready;
}

/* As select() of Linux, also in that the time left is told. */
FABRIC_API int rselect(int nfds, fd_set *readfds, fd_set *writefds, fd_set *exceptfds,
                       struct timeval *timeout)
{
    struct pollfd fds[FD_SETSIZE];
    int64_t deadline = STREAM_FOREVER, left;
    int count = 0, result, milliseconds = -1;

    if (nfds < 0 || nfds > FD_SETSIZE ||
        (timeout && (timeout->tv_sec < 0 || timeout->tv_usec < 0))) {
        errno = EINVAL;
        return -1;
    }
    for (int fd = 0; fd < nfds; fd++) {
        short events = (wants(readfds, fd) ? POLLIN : 0) | (wants(writefds, fd) ? POLLOUT : 0) |
                       (wants(exceptfds, fd) ? POLLPRI : 0);
        if (events)
            fds[count++] = (struct pollfd){fd, events, 0};
    }
    if (timeout && timeout->tv_sec < INT_MAX / 1000 - 1) {
        milliseconds = timeout->tv_sec * 1000 + (timeout->tv_usec + 999) / 1000;
        deadline = stream_clock() + milliseconds;
    }
    result = rpoll(fds, count, milliseconds);
    if (result < 0)
        return -1;
    for (int i = 0; i < count; i++) {
        if (fds[i].revents & POLLNVAL) {
            errno = EBADF;
            return -1;
        }
    }
    result = 0;
    for (int i = 0; i < count; i++) {
        short ready = fds[i].revents;

        result += keep(readfds, fds[i].fd, ready & (POLLIN | POLLHUP | POLLERR));
        result += keep(writefds, fds[i].fd, ready & (POLLOUT | POLLERR));
        result += keep(exceptfds, fds[i].fd, ready & POLLPRI);
    }
    if (milliseconds >= 0) {
        left = deadline - stream_clock();
        if (left < 0)
            left = 0;
        timeout->tv_sec = left / 1000;
        timeout->tv_usec = left % 1000 * 1000;
    }
    return result;
}
