/*
 * What all processes of a run know of one another: who is there, and who has which port.
 *
 * It is a file in the folder of the run that all map.  A process holds a lock on one byte of a
 * second file for as long as it lives: the kernel takes the lock away however it ends, and nobody
 * has to clean up behind it.  A process without a run has a registry of its own in memory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fabric.h"
#include "registry.h"

enum {
    PORTS = 8192,
    EPHEMERAL_FIRST = 32768,
    EPHEMERAL_LAST = 60999,
    MUTEX = 4096, /* the byte whose lock is the mutex of the file */
};

struct registry {
    uint32_t last_slot;
    uint32_t ports_used; /* entries behind it were never used */
    struct fabric_port ports[PORTS];
};

static struct registry *registry;
static int locks = -1;

static void die(const char *what)
{
    fprintf(stderr, "fabric: %s of the run: %s\n", what, strerror(errno));
    abort();
}

static int open_in_folder(const char *name)
{
    char path[4096];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", fabric_folder(), name);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0 && fd <= 2) { /* one of the standard streams, which a program has closed */
        int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);

        close(fd);
        fd = moved;
    }
    if (fd < 0)
        die("cannot open the files");
    return fd;
}

static void registry_open(void)
{
    int fd;

    if (registry)
        return;
    if (!fabric_folder()) {
        registry = calloc(1, sizeof(*registry));
        if (!registry)
            die("cannot allocate the registry");
        return;
    }
    locks = open_in_folder("locks");
    fd = open_in_folder("registry");
    if (ftruncate(fd, sizeof(*registry)))
        die("cannot size the registry");
    registry = mmap(NULL, sizeof(*registry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (registry == MAP_FAILED)
        die("cannot map the registry");
    close(fd);
}

void fabric_registry_forget(void)
{
    if (registry && locks >= 0) {
        munmap(registry, sizeof(*registry));
        close(locks);
    }
    registry = NULL;
    locks = -1;
}

static int lock_byte(int command, short type, off_t byte)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;

    if (locks < 0)
        return 0;
    do {
        result = fcntl(locks, command, &lock);
    } while (result < 0 && errno == EINTR);
    return result < 0 ? -1 : lock.l_type;
}

static void enter(void)
{
    registry_open();
    if (lock_byte(F_OFD_SETLKW, F_WRLCK, MUTEX) < 0)
        die("cannot lock the registry");
}

static void leave(void)
{
    lock_byte(F_OFD_SETLK, F_UNLCK, MUTEX);
}

static bool is_alive(unsigned slot)
{
    return slot == fabric_slot() ||
           (locks >= 0 && lock_byte(F_OFD_GETLK, F_WRLCK, slot) != F_UNLCK);
}

unsigned fabric_registry_join(void)
{
    unsigned tries;

    enter();
    /* The next number, so that one that was somebody's is not given again at once. */
    for (tries = 0; tries < FABRIC_SLOTS; tries++) {
        unsigned slot = registry->last_slot % FABRIC_SLOTS + 1;

        registry->last_slot = slot;
        if (lock_byte(F_OFD_SETLK, F_WRLCK, slot) >= 0) {
            leave();
            return slot;
        }
    }
    leave();
    fprintf(stderr, "fabric: the run has %d processes, and no room for one more\n", FABRIC_SLOTS);
    abort();
}

void fabric_slots_alive(uint64_t bits[(FABRIC_SLOTS + 64) / 64])
{
    unsigned slot;

    memset(bits, 0, (FABRIC_SLOTS + 64) / 64 * sizeof(*bits));
    registry_open();
    for (slot = 1; slot <= FABRIC_SLOTS; slot++)
        if (is_alive(slot))
            bits[slot / 64] |= (uint64_t)1 << slot % 64;
}

/* ---- ports ----------------------------------------------------------------------------------- */

/* Whether both may hear what comes for one address. */
static bool overlap(const struct fabric_port *one, const struct fabric_port *other)
{
    if (one->family != other->family)
        /* An IPv6 port of any address hears IPv4, too, unless it does not want to. */
        return (one->family == AF_INET6 && one->any && !one->only) ||
               (other->family == AF_INET6 && other->any && !other->only);
    return one->any || other->any || memcmp(one->address, other->address, 16) == 0;
}

static bool in_use(struct fabric_port *entry)
{
    if (entry->slot && !is_alive(entry->slot))
        memset(entry, 0, sizeof(*entry));
    return entry->slot;
}

static bool conflict(const struct fabric_port *wanted)
{
    unsigned i;

    for (i = 0; i < registry->ports_used; i++) {
        struct fabric_port *entry = &registry->ports[i];

        if (entry->slot && entry->space == wanted->space && entry->port == wanted->port &&
            overlap(entry, wanted) && !(entry->reuse && wanted->reuse && !entry->listens) &&
            in_use(entry))
            return true;
    }
    return false;
}

static bool port_is_taken(uint16_t space, uint16_t port)
{
    unsigned i;

    for (i = 0; i < registry->ports_used; i++)
        if (registry->ports[i].slot && registry->ports[i].space == space &&
            registry->ports[i].port == port && in_use(&registry->ports[i]))
            return true;
    return false;
}

static int choose_port(struct fabric_port *wanted)
{
    unsigned range = EPHEMERAL_LAST - EPHEMERAL_FIRST + 1;
    unsigned start = (unsigned)(fabric_random() % range), i;

    for (i = 0; i < range; i++) {
        wanted->port = (uint16_t)(EPHEMERAL_FIRST + (start + i) % range);
        if (!port_is_taken(wanted->space, wanted->port))
            return 0;
    }
    return EADDRNOTAVAIL;
}

static int enter_port(struct fabric_port *wanted, unsigned *index)
{
    unsigned i;

    wanted->slot = (uint16_t)fabric_slot();
    for (i = 0; i < PORTS; i++)
        if (i >= registry->ports_used || !in_use(&registry->ports[i])) {
            registry->ports[i] = *wanted;
            if (i >= registry->ports_used)
                registry->ports_used = i + 1;
            *index = i;
            return 0;
        }
    return ENOMEM;
}

int fabric_port_bind(struct fabric_port *wanted, unsigned *index)
{
    int error = 0;

    fabric_slot(); /* joined before the mutex is held */
    enter();
    if (!wanted->port)
        error = choose_port(wanted);
    else if (conflict(wanted))
        error = EADDRINUSE;
    if (!error)
        error = enter_port(wanted, index);
    leave();
    return error;
}

int fabric_port_listen(unsigned index)
{
    struct fabric_port *own = &registry->ports[index];
    unsigned i;
    int error = 0;

    enter();
    /* REUSEADDR shares a port among those that do not listen: who does has it alone. */
    for (i = 0; i < registry->ports_used; i++) {
        struct fabric_port *entry = &registry->ports[i];

        if (i != index && entry->slot && entry->space == own->space && entry->port == own->port &&
            overlap(entry, own) && in_use(entry))
            error = EADDRINUSE;
    }
    if (!error)
        own->listens = 1;
    leave();
    return error;
}

void fabric_port_free(unsigned index)
{
    if (!registry)
        return;
    enter();
    if (registry->ports[index].slot == fabric_slot())
        memset(&registry->ports[index], 0, sizeof(registry->ports[index]));
    leave();
}

bool fabric_port_find(uint16_t space, const struct sockaddr *address, struct fabric_port *found)
{
    struct fabric_port wanted = {.space = space, .family = (uint8_t)address->sa_family};
    const struct fabric_port *any = NULL, *exact = NULL;
    unsigned i;

    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)address;

        wanted.port = ntohs(four->sin_port);
        memcpy(wanted.address, &four->sin_addr, sizeof(four->sin_addr));
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)address;

        wanted.port = ntohs(six->sin6_port);
        memcpy(wanted.address, &six->sin6_addr, sizeof(six->sin6_addr));
    } else {
        return false;
    }
    enter();
    for (i = 0; i < registry->ports_used; i++) {
        struct fabric_port *entry = &registry->ports[i];

        if (!entry->slot || !entry->listens || entry->space != space ||
            entry->port != wanted.port || !overlap(entry, &wanted) || !in_use(entry))
            continue;
        if (entry->any)
            any = any ? any : entry;
        else
            exact = entry;
    }
    if (exact || any)
        *found = exact ? *exact : *any;
    leave();
    return exact || any;
}

/* For whoever starts a server and has to know when it is ready. */
FABRIC_API int fabric_listens(unsigned port)
{
    bool found = false;
    unsigned i;

    fabric_lock();
    fabric_slot(); /* joined before the mutex is held */
    enter();
    for (i = 0; i < registry->ports_used && !found; i++)
        found = registry->ports[i].listens && registry->ports[i].port == port &&
                in_use(&registry->ports[i]);
    leave();
    fabric_unlock();
    return found;
}
