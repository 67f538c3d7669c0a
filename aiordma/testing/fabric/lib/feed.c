/* Events behind a descriptor: completion channels, event channels, asynchronous events. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "fabric.h"

int fabric_feed_open(struct fabric_feed *feed)
{
    fabric_list_init(&feed->notes);
    feed->generation = fabric_generation();
    feed->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    return feed->fd < 0 ? -1 : 0;
}

void fabric_feed_close(struct fabric_feed *feed)
{
    fabric_feed_drop(feed, NULL);
    close(feed->fd);
    feed->fd = -1;
}

void fabric_feed_give(struct fabric_note *note)
{
    struct fabric_feed *feed = note->feed;
    uint64_t one = 1;

    fabric_list_remove(&note->links);
    fabric_list_add(&feed->notes, &note->links);
    /* It fails only where 2^64 - 2 notes are unread. */
    (void)!write(feed->fd, &one, sizeof(one));
}

void fabric_feed_push(struct fabric_feed *feed, struct fabric_note *note)
{
    note->feed = feed;
    fabric_list_init(&note->links);
    if (fabric_is_stepped)
        fabric_list_add(&fabric_late_notes, &note->links);
    else
        fabric_feed_give(note);
}

/* Whether the read is to fail for a fault: interrupted by a signal, for instance. */
static bool read_fails(const char *call)
{
    bool fails = false;

    if (fabric_has_faults()) {
        fabric_lock();
        fails = fabric_fails(call);
        fabric_release();
    }
    return fails;
}

struct fabric_note *fabric_feed_take(struct fabric_feed *feed, const char *call)
{
    struct fabric_note *note = NULL;
    uint64_t one;

    if (feed->generation != fabric_generation()) {
        errno = EBADF;
        return NULL;
    }
    if (read_fails(call))
        return NULL;
    /* A note may be dropped between the read and the lock. */
    while (!note) {
        if (read(feed->fd, &one, sizeof(one)) < 0)
            return NULL;
        fabric_lock();
        if (!fabric_list_empty(&feed->notes)) {
            note = FABRIC_CONTAINER(feed->notes.next, struct fabric_note, links);
            fabric_list_remove(&note->links);
        }
        fabric_unlock();
    }
    return note;
}

/* Take back the count of a note, if no reader has it already. */
static void count_back(struct fabric_feed *feed)
{
    struct pollfd waiting = {feed->fd, POLLIN, 0};
    uint64_t one;

    if (poll(&waiting, 1, 0) == 1)
        (void)!read(feed->fd, &one, sizeof(one));
}

static unsigned drop_from(struct fabric_list *list, struct fabric_feed *feed, void *about)
{
    struct fabric_list *item, *next;
    unsigned count = 0;

    for (item = list->next; item != list; item = next) {
        struct fabric_note *note = FABRIC_CONTAINER(item, struct fabric_note, links);

        next = item->next;
        if (note->feed != feed || (about && note->about != about))
            continue;
        fabric_list_remove(item);
        if (list == &feed->notes)
            count_back(feed);
        free(note);
        count++;
    }
    return count;
}

unsigned fabric_feed_drop(struct fabric_feed *feed, void *about)
{
    return drop_from(&feed->notes, feed, about) + drop_from(&fabric_late_notes, feed, about);
}

void fabric_feed_move(struct fabric_feed *from, struct fabric_feed *to, void *about)
{
    struct fabric_list *item, *next;

    if (from == to)
        return;
    for (item = from->notes.next; item != &from->notes; item = next) {
        struct fabric_note *note = FABRIC_CONTAINER(item, struct fabric_note, links);

        next = item->next;
        if (note->about != about)
            continue;
        count_back(from);
        note->feed = to;
        fabric_feed_give(note);
    }
    for (item = fabric_late_notes.next; item != &fabric_late_notes; item = item->next) {
        struct fabric_note *note = FABRIC_CONTAINER(item, struct fabric_note, links);

        if (note->feed == from && note->about == about)
            note->feed = to;
    }
}
