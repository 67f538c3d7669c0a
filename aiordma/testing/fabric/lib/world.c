/*
 * The world of a process: its lock, its clock, its timers, and what is on its way.
 *
 * In ordinary use each call ends with all steps that are due (fabric_unlock), and a service thread
 * takes those that come due later or come from another process.  It is started by the first of
 * them, so that a program of one process whose packets are not lost has no thread but its own.
 *
 * In a simulation nothing happens by itself: the clock stands until fabric_set_clock(), and each
 * packet and each event waits for fabric_step(), which chooses one of them by the seed.  Packets of
 * one queue pair keep their order, as on a path of InfiniBand; all other orders may come.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fabric.h"

/* Steps are chosen among so many of the oldest. */
#define CHOICE      16
#define FAULTS      64
#define PER_MILLION 1000000

/* A call that is to fail, or an event that is to be lost. */
struct fault {
    char call[48];
    int64_t calls_left; /* before it */
    int64_t times;      /* how often, then; -1: always */
    int64_t struck;     /* how often it has */
    int number;         /* errno */
    bool used;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned generation;
    fabric_time clock; /* of a simulation */
    uint64_t random;
    struct fabric_timer **heap; /* from 1 */
    unsigned timers, heap_size;
    uint64_t order;
    struct fabric_list flight;  /* packets that may arrive */
    struct fabric_list delayed; /* those that may not yet, by time */
    unsigned flying;
    int64_t counts[FABRIC_KINDS];
    uint64_t digest; /* of the steps of a simulation */
    int64_t overruns, misuses;
    bool thread, running;
    fabric_time thread_until; /* when the service thread wakes by itself */

    /* Faults of the wire: chances in a million, and what no packet crosses. */
    int64_t loss, duplicate, delay, reorder, late, corrupt, forge;
    int64_t delay_ns, completion_delay_ns;
    int64_t rate, queue_ns;   /* bytes a second (0: any); a packet that waited longer is lost */
    int64_t cm_response_ns;   /* 0: that of the connection manager itself */
    int64_t lost_messages[6]; /* so many of each are to be lost; -1: all */
    fabric_time line_free;    /* when the packets before have left, at this rate */
    int64_t harmed;           /* packets that a fault of the wire has struck */
    int64_t completions_stay; /* in the queue, when their queue pair is destroyed */
    int64_t meanwhile;        /* the chance of a step while a call of the data path is made */
    bool blocked[FABRIC_DEVICES][FABRIC_DEVICES];
    fabric_time paused[FABRIC_DEVICES]; /* until when a device holds back what it sends */
    struct fault faults[FAULTS];
    unsigned fault_count; /* places that were ever used */
} world = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .random = 1,
    .flight = {&world.flight, &world.flight},
    .delayed = {&world.delayed, &world.delayed},
    .thread_until = UINT64_MAX,
};

bool fabric_is_stepped;
struct fabric_list fabric_late_notes = {&fabric_late_notes, &fabric_late_notes};
struct fabric_list fabric_contexts = {&fabric_contexts, &fabric_contexts};
struct fabric_list fabric_qps = {&fabric_qps, &fabric_qps};

/* ---- clock and chance ------------------------------------------------------------------------ */

fabric_time fabric_now(void)
{
    struct timespec now;

    if (fabric_is_stepped)
        return world.clock;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (fabric_time)now.tv_sec * 1000 * FABRIC_MS + (fabric_time)now.tv_nsec;
}

/* SplitMix64, by Sebastiano Vigna, which is in the public domain. */
uint64_t fabric_random(void)
{
    uint64_t bits = world.random += 0x9e3779b97f4a7c15u;

    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

static bool chance(int64_t in_a_million)
{
    return in_a_million > 0 && (int64_t)(fabric_random() % PER_MILLION) < in_a_million;
}

/* The same, of a packet that is sent. */
static bool strikes(int64_t in_a_million)
{
    bool struck = chance(in_a_million);

    world.harmed += struck;
    return struck;
}

/* ---- timers: a heap, the earliest at its top ------------------------------------------------- */

static bool earlier(const struct fabric_timer *one, const struct fabric_timer *other)
{
    return one->due != other->due ? one->due < other->due : one->order < other->order;
}

static void heap_put(unsigned place, struct fabric_timer *timer)
{
    world.heap[place] = timer;
    timer->place = place;
}

static void heap_rise(unsigned place, struct fabric_timer *timer)
{
    while (place > 1 && earlier(timer, world.heap[place / 2])) {
        heap_put(place, world.heap[place / 2]);
        place /= 2;
    }
    heap_put(place, timer);
}

static void heap_sink(unsigned place, struct fabric_timer *timer)
{
    unsigned child;

    while ((child = 2 * place) <= world.timers) {
        if (child < world.timers && earlier(world.heap[child + 1], world.heap[child]))
            child++;
        if (!earlier(world.heap[child], timer))
            break;
        heap_put(place, world.heap[child]);
        place = child;
    }
    heap_put(place, timer);
}

void fabric_timer_clear(struct fabric_timer *timer)
{
    unsigned place = timer->place;
    struct fabric_timer *last;

    if (!place)
        return;
    timer->place = 0;
    last = world.heap[world.timers--];
    if (last == timer)
        return;
    if (place > 1 && earlier(last, world.heap[place / 2]))
        heap_rise(place, last);
    else
        heap_sink(place, last);
}

void fabric_timer_set(struct fabric_timer *timer, fabric_time due)
{
    fabric_timer_clear(timer);
    if (world.timers + 1 >= world.heap_size) {
        unsigned size = world.heap_size ? 2 * world.heap_size : 64;
        struct fabric_timer **heap = realloc(world.heap, size * sizeof(*heap));

        if (!heap)
            abort(); /* a timer that does not ring would be a wait without an end */
        world.heap = heap;
        world.heap_size = size;
    }
    timer->due = due;
    timer->order = ++world.order;
    heap_rise(++world.timers, timer);
}

/* ---- what is on its way ---------------------------------------------------------------------- */

void fabric_enqueue(struct fabric_packet *packet)
{
    struct fabric_list *place;

    if (packet->due <= fabric_now()) {
        fabric_list_add(&world.flight, &packet->links);
        world.flying++;
        return;
    }
    /* Before the first that is due later. */
    for (place = world.delayed.next; place != &world.delayed; place = place->next)
        if (FABRIC_CONTAINER(place, struct fabric_packet, links)->due > packet->due)
            break;
    fabric_list_add(place, &packet->links);
}

static void delayed_come(void)
{
    fabric_time now;

    if (fabric_list_empty(&world.delayed))
        return;
    now = fabric_now();
    while (!fabric_list_empty(&world.delayed)) {
        struct fabric_packet *packet =
            FABRIC_CONTAINER(world.delayed.next, struct fabric_packet, links);

        if (packet->due > now)
            return;
        fabric_list_remove(&packet->links);
        fabric_list_add(&world.flight, &packet->links);
        world.flying++;
    }
}

static bool is_down(unsigned device)
{
    const struct fabric_device *there = fabric_device(device);

    return there && (there->state != IBV_PORT_ACTIVE || there->unaddressed);
}

/* A cut of this process also holds for what others have sent to it. */
static bool is_cut(const struct fabric_header *header)
{
    if (is_down(header->from_device) || is_down(header->to_device))
        return true;
    return header->from_device < FABRIC_DEVICES && header->to_device < FABRIC_DEVICES &&
           world.blocked[header->from_device][header->to_device];
}

/* A message of the connection manager that was named; its first byte is its type. */
static bool is_lost_message(const struct fabric_packet *packet)
{
    unsigned type;

    if (packet->header.opcode != FABRIC_CM) /* another one may have no bytes */
        return false;
    type = packet->bytes[0];
    if (type >= FABRIC_LENGTH(world.lost_messages) || !world.lost_messages[type])
        return false;
    if (world.lost_messages[type] > 0)
        world.lost_messages[type]--;
    world.harmed++;
    return true;
}

/* Change a bit of the data, and nothing notices: as where the sum is made anew on the way. */
static void bit_flip(struct fabric_packet *packet)
{
    uint64_t bits = fabric_random();

    if (packet->header.size && packet->header.opcode != FABRIC_CM)
        packet->bytes[(bits >> 8) % packet->header.size] ^= (unsigned char)(1u << (bits & 7));
}

/* The line is slow, and packets wait for one another: false: too many do. */
static bool line_take(struct fabric_packet *packet)
{
    fabric_time now = fabric_now(), free = world.line_free > now ? world.line_free : now;
    uint64_t bytes = sizeof(packet->header) + packet->header.size;

    if (world.queue_ns > 0 && free - now > (fabric_time)world.queue_ns)
        return false;
    world.harmed += free > now;
    world.line_free = free + bytes * 1000 * FABRIC_MS / (uint64_t)world.rate;
    packet->due = world.line_free;
    return true;
}

static void packet_route(struct fabric_packet *packet)
{
    if (packet->header.slot != packet->header.from_slot)
        fabric_wire_send(packet);
    else
        fabric_enqueue(packet);
}

static void packet_arrive(struct fabric_packet *packet)
{
    fabric_list_remove(&packet->links);
    world.flying--;
    if (!is_cut(&packet->header))
        fabric_packet_arrived(packet);
    free(packet);
}

void fabric_packet_send(struct fabric_packet *packet)
{
    struct fabric_header *header = &packet->header;
    struct fabric_packet *forged = NULL, *twin = NULL;

    header->from_slot = (uint16_t)fabric_slot();
    packet->due = 0;
    if (is_cut(header) || is_lost_message(packet) || strikes(world.loss) ||
        (world.rate > 0 && !line_take(packet))) {
        free(packet);
        return;
    }
    if (strikes(world.duplicate))
        twin = fabric_packet_copy(packet);
    if (strikes(world.delay))
        packet->due = (packet->due ? packet->due : fabric_now()) + (fabric_time)world.delay_ns;
    if (header->from_device < FABRIC_DEVICES && packet->due < world.paused[header->from_device])
        packet->due = world.paused[header->from_device];
    /* It comes first, and the true one is then taken for its repetition. */
    if (strikes(world.forge) && (forged = fabric_packet_copy(packet))) {
        bit_flip(forged);
        packet_route(forged);
    }
    if (strikes(world.corrupt))
        bit_flip(packet);
    packet_route(packet);
    if (twin)
        packet_route(twin);
}

/* The moment of the next timer or delayed packet. */
static fabric_time next_due(void)
{
    fabric_time due = world.timers ? world.heap[1]->due : UINT64_MAX;

    if (!fabric_list_empty(&world.delayed)) {
        fabric_time first = FABRIC_CONTAINER(world.delayed.next, struct fabric_packet, links)->due;

        if (first < due)
            due = first;
    }
    return due;
}

static bool timers_ring(fabric_time now)
{
    bool rang = false;

    while (world.timers && world.heap[1]->due <= now) {
        struct fabric_timer *timer = world.heap[1];

        fabric_timer_clear(timer);
        timer->ring(timer);
        rang = true;
    }
    return rang;
}

/* Ordinary use: all that is due, until nothing is. */
static void take_steps(void)
{
    if (world.running)
        return;
    world.running = true;
    do {
        while (!fabric_list_empty(&world.flight))
            packet_arrive(FABRIC_CONTAINER(world.flight.next, struct fabric_packet, links));
        delayed_come();
    } while (!fabric_list_empty(&world.flight) || (world.timers && timers_ring(fabric_now())));
    world.running = false;
}

/* ---- the lock -------------------------------------------------------------------------------- */

void fabric_lock(void)
{
    pthread_mutex_lock(&world.lock);
}

static void leave(void)
{
    fabric_time due;

    if (!fabric_is_stepped) {
        take_steps();
        due = next_due();
        if (due < world.thread_until) {
            fabric_service_start();
            world.thread_until = due;
            fabric_wire_wake();
        }
    }
}

void fabric_unlock(void)
{
    leave();
    pthread_mutex_unlock(&world.lock);
}

void fabric_release(void)
{
    pthread_mutex_unlock(&world.lock);
}

void fabric_wait(void)
{
    static const char TEXT[] = "fabric: a call waits for ever: a simulation has no other thread\n";

    leave();
    if (fabric_is_stepped) {
        (void)!write(STDERR_FILENO, TEXT, sizeof(TEXT) - 1);
        abort();
    }
    pthread_cond_wait(&world.changed, &world.lock);
}

void fabric_changed(void)
{
    pthread_cond_broadcast(&world.changed);
}

unsigned fabric_generation(void)
{
    return world.generation;
}

void fabric_born(enum fabric_kind kind)
{
    world.counts[kind]++;
}

void fabric_gone(enum fabric_kind kind)
{
    world.counts[kind]--;
}

static void *serve(void *unused)
{
    fabric_lock();
    for (;;) {
        world.thread_until = next_due();
        fabric_wire_wait(world.thread_until);
        take_steps();
    }
    return unused;
}

void fabric_service_start(void)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;

    if (world.thread || fabric_is_stepped)
        return;
    /* A signal is the program's; its handler shall not run here. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, 512 * 1024);
    world.thread = !pthread_create(&thread, &attr, serve, NULL);
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- fork: the child begins with a world of its own ------------------------------------------ */

static void fork_prepare(void)
{
    pthread_mutex_lock(&world.lock);
}

static void fork_parent(void)
{
    pthread_mutex_unlock(&world.lock);
}

static void fork_child(void)
{
    pthread_mutex_init(&world.lock, NULL);
    pthread_cond_init(&world.changed, NULL);
    world.generation++;
    world.random ^= (uint64_t)getpid() << 40;
    world.timers = 0;
    world.thread = world.running = false;
    world.thread_until = UINT64_MAX;
    world.flying = 0;
    /* What these hold is the parent's; the child's copy is forgotten, and not freed. */
    fabric_list_init(&world.flight);
    fabric_list_init(&world.delayed);
    fabric_list_init(&fabric_late_notes);
    fabric_list_init(&fabric_contexts);
    fabric_list_init(&fabric_qps);
    fabric_list_init(&fabric_ids);
    memset(world.counts, 0, sizeof(world.counts));
    fabric_wire_forget();
    fabric_registry_forget();
}

__attribute__((constructor)) static void world_begin(void)
{
    /* Where no simulation sets it, two processes shall not choose the same. */
    world.random = fabric_now() ^ (uint64_t)getpid() << 40;
    pthread_atfork(fork_prepare, fork_parent, fork_child);
}

/* ---- faults ---------------------------------------------------------------------------------- */

bool fabric_fails(const char *call)
{
    unsigned i;

    for (i = 0; i < world.fault_count; i++) {
        struct fault *fault = &world.faults[i];

        if (!fault->used || strcmp(fault->call, call) != 0 || !fault->times)
            continue;
        if (fault->calls_left > 0) {
            fault->calls_left--;
            continue;
        }
        if (fault->times > 0)
            fault->times--;
        fault->struck++;
        errno = fault->number;
        return true;
    }
    return false;
}

bool fabric_has_faults(void)
{
    return __atomic_load_n(&world.fault_count, __ATOMIC_RELAXED) != 0;
}

/*
 * After so many calls, the next ones (times; -1: all) fail with an errno.  The number of the fault,
 * from 0, for the two functions below; -1: there are too many.
 */
FABRIC_API int fabric_fault_add(const char *call, int64_t calls, int64_t times, int number)
{
    struct fault *fault;
    unsigned place = 0;
    int result = -1;

    fabric_lock();
    while (place < world.fault_count && world.faults[place].used)
        place++;
    if (place < FAULTS && strlen(call) < sizeof(world.faults[0].call)) {
        fault = &world.faults[place];
        memset(fault, 0, sizeof(*fault));
        memcpy(fault->call, call, strlen(call));
        fault->calls_left = calls;
        fault->times = times;
        fault->number = number;
        fault->used = true;
        if (place == world.fault_count)
            world.fault_count++;
        result = (int)place;
    }
    pthread_mutex_unlock(&world.lock);
    return result;
}

/* The same for who does not ask for the number. 0, or -1: too many. */
FABRIC_API int fabric_fault(const char *call, int64_t calls, int64_t times, int number)
{
    return fabric_fault_add(call, calls, times, number) < 0 ? -1 : 0;
}

/* How often a fault has struck; -1: there is no such fault. */
FABRIC_API int64_t fabric_fault_struck(int number)
{
    int64_t struck = -1;

    fabric_lock();
    if (number >= 0 && number < FAULTS && world.faults[number].used)
        struck = world.faults[number].struck;
    pthread_mutex_unlock(&world.lock);
    return struck;
}

/* Take a fault back; its number may be given again. 0, or -1: there is no such fault. */
FABRIC_API int fabric_fault_clear(int number)
{
    int result = -1;

    fabric_lock();
    if (number >= 0 && number < FAULTS && world.faults[number].used) {
        world.faults[number].used = false;
        while (world.fault_count && !world.faults[world.fault_count - 1].used)
            world.fault_count--;
        result = 0;
    }
    pthread_mutex_unlock(&world.lock);
    return result;
}

bool fabric_completions_stay(void)
{
    return world.completions_stay > 0;
}

fabric_time fabric_completion_delay(void)
{
    return world.completion_delay_ns > 0 ? (fabric_time)world.completion_delay_ns : 0;
}

fabric_time fabric_cm_response(void)
{
    return world.cm_response_ns > 0 ? (fabric_time)world.cm_response_ns : 0;
}

/* A fault that lasts, by its name: chances are in a million. 0, or -1: there is none such. */
FABRIC_API int fabric_set(const char *name, int64_t value)
{
    static const struct {
        const char *name;
        int64_t *place;
    } NAMES[] = {
        {"loss", &world.loss},
        {"duplicate", &world.duplicate},
        {"delay", &world.delay},
        {"reorder", &world.reorder},
        {"late", &world.late},
        {"delay_ns", &world.delay_ns},
        {"completion_delay_ns", &world.completion_delay_ns},
        {"corrupt", &world.corrupt},
        {"forge", &world.forge},
        {"rate", &world.rate},
        {"queue_ns", &world.queue_ns},
        {"cm_response_ns", &world.cm_response_ns},
        {"lost REQ", &world.lost_messages[0]},
        {"lost REP", &world.lost_messages[1]},
        {"lost RTU", &world.lost_messages[2]},
        {"lost REJ", &world.lost_messages[3]},
        {"lost DREQ", &world.lost_messages[4]},
        {"lost DREP", &world.lost_messages[5]},
        {"meanwhile", &world.meanwhile},
        {"completions_stay", &world.completions_stay},
    };
    unsigned i;

    for (i = 0; i < FABRIC_LENGTH(NAMES); i++)
        if (strcmp(name, NAMES[i].name) == 0) {
            fabric_lock();
            *NAMES[i].place = value;
            pthread_mutex_unlock(&world.lock);
            return 0;
        }
    return -1;
}

/* How many packets of this process a fault of the wire has lost, changed, doubled or held up. */
FABRIC_API int64_t fabric_harmed(void)
{
    int64_t harmed;

    fabric_lock();
    harmed = world.harmed;
    pthread_mutex_unlock(&world.lock);
    return harmed;
}

/* Whether packets get from one device to another. */
FABRIC_API int fabric_cut(unsigned from, unsigned to, int cut)
{
    if (from >= FABRIC_DEVICES || to >= FABRIC_DEVICES)
        return -1;
    fabric_lock();
    world.blocked[from][to] = cut;
    pthread_mutex_unlock(&world.lock);
    return 0;
}

/* What a device sends is held back until a moment, and then comes in its order. */
FABRIC_API int fabric_pause(unsigned device, uint64_t until)
{
    if (device >= FABRIC_DEVICES)
        return -1;
    fabric_lock();
    world.paused[device] = until;
    pthread_mutex_unlock(&world.lock);
    return 0;
}

/* Objects that are there, of one kind; -1: there is no such kind. */
FABRIC_API int64_t fabric_count(int kind)
{
    int64_t count;

    if (kind < 0 || kind >= FABRIC_KINDS)
        return -1;
    fabric_lock();
    count = world.counts[kind];
    pthread_mutex_unlock(&world.lock);
    return count;
}

/* ---- simulation ------------------------------------------------------------------------------ */

static void packets_forget(struct fabric_list *list)
{
    while (!fabric_list_empty(list)) {
        struct fabric_packet *packet = FABRIC_CONTAINER(list->next, struct fabric_packet, links);

        fabric_list_remove(&packet->links);
        free(packet);
    }
}

/*
 * From now on the caller takes the steps, chosen by the seed.  Faults, clock and devices are as at
 * the beginning; what was on its way is lost.
 */
FABRIC_API void fabric_stepped(uint64_t seed)
{
    struct fabric_list *item;

    fabric_lock();
    for (item = fabric_contexts.next; item != &fabric_contexts; item = item->next)
        fabric_feed_drop(&FABRIC_CONTAINER(item, struct fabric_context, links)->events, NULL);
    fabric_is_stepped = true;
    fabric_devices_anew();
    world.random = seed;
    world.clock = 1000000 * (fabric_time)FABRIC_MS;
    world.loss = world.duplicate = world.delay = world.reorder = world.late = 0;
    world.delay_ns = world.completion_delay_ns = world.cm_response_ns = 0;
    world.corrupt = world.forge = world.rate = world.queue_ns = 0;
    memset(world.lost_messages, 0, sizeof(world.lost_messages));
    world.meanwhile = world.completions_stay = 0;
    world.fault_count = 0;
    world.overruns = world.misuses = 0;
    world.digest = 0xcbf29ce484222325u;
    memset(world.blocked, 0, sizeof(world.blocked));
    memset(world.paused, 0, sizeof(world.paused));
    packets_forget(&world.flight);
    packets_forget(&world.delayed);
    world.flying = 0;
    pthread_mutex_unlock(&world.lock);
}

/* How many packets and events could come now. */
FABRIC_API unsigned fabric_pending(void)
{
    struct fabric_list *item;
    unsigned count;

    fabric_lock();
    delayed_come();
    count = world.flying;
    for (item = fabric_late_notes.next; item != &fabric_late_notes; item = item->next)
        count++;
    pthread_mutex_unlock(&world.lock);
    return count;
}

static bool same_flow(const struct fabric_header *one, const struct fabric_header *other)
{
    return one->opcode < FABRIC_DATAGRAM && other->opcode < FABRIC_DATAGRAM &&
           one->to_qpn == other->to_qpn && one->from_qpn == other->from_qpn;
}

/* The packet at a place, or the oldest of its flow. */
static struct fabric_packet *choose_packet(unsigned place)
{
    struct fabric_list *item = world.flight.next, *before;
    struct fabric_packet *packet, *other;

    while (place--)
        item = item->next;
    packet = FABRIC_CONTAINER(item, struct fabric_packet, links);
    if (chance(world.reorder))
        return packet;
    for (before = world.flight.next; before != item; before = before->next) {
        other = FABRIC_CONTAINER(before, struct fabric_packet, links);
        if (same_flow(&other->header, &packet->header))
            return other;
    }
    return packet;
}

/* The note at a place, or the oldest of its feed. */
static struct fabric_note *choose_note(unsigned place)
{
    struct fabric_list *item = fabric_late_notes.next, *before;
    struct fabric_note *note, *other;

    while (place--)
        item = item->next;
    note = FABRIC_CONTAINER(item, struct fabric_note, links);
    for (before = fabric_late_notes.next; before != item; before = before->next) {
        other = FABRIC_CONTAINER(before, struct fabric_note, links);
        if (other->feed == note->feed)
            return other;
    }
    return note;
}

/* What came, in numbers that two runs of a seed have in common. */
static void digest_add(uint64_t number)
{
    world.digest = (world.digest ^ number) * 0x100000001b3u; /* FNV-1a, of words */
}

static void digest_packet(const struct fabric_header *header)
{
    digest_add(header->opcode | (uint64_t)header->flags << 8 | (uint64_t)header->syndrome << 16);
    digest_add(header->psn | (uint64_t)header->size << 32);
}

/* A number of all steps since fabric_stepped(). */
FABRIC_API uint64_t fabric_digest(void)
{
    uint64_t digest;

    fabric_lock();
    digest = world.digest;
    pthread_mutex_unlock(&world.lock);
    return digest;
}

/* Let one packet or event come. 0: there was none. */
FABRIC_API int fabric_step(void)
{
    unsigned packets, notes = 0, place;
    struct fabric_list *item;

    fabric_lock();
    delayed_come();
    packets = world.flying < CHOICE ? world.flying : CHOICE;
    for (item = fabric_late_notes.next; item != &fabric_late_notes && notes < CHOICE;
         item = item->next)
        notes++;
    if (packets + notes == 0) {
        pthread_mutex_unlock(&world.lock);
        return 0;
    }
    place = (unsigned)(fabric_random() % (packets + notes));
    if (place < packets) {
        struct fabric_packet *packet = choose_packet(place);

        digest_packet(&packet->header);
        packet_arrive(packet);
    } else {
        digest_add(place);
        fabric_feed_give(choose_note(place - packets));
    }
    pthread_mutex_unlock(&world.lock);
    return 1;
}

void fabric_overrun(void)
{
    world.overruns++;
}

/* How many messages have found no receive since fabric_stepped(). */
FABRIC_API int64_t fabric_overruns(void)
{
    return world.overruns;
}

void fabric_misuse(void)
{
    world.misuses++;
}

/* How many calls were for queues that a thread was destroying, since fabric_stepped(). */
FABRIC_API int64_t fabric_misused(void)
{
    return world.misuses;
}

void fabric_meanwhile(void)
{
    while (fabric_is_stepped && chance(world.meanwhile) && fabric_step()) {
    }
}

/* When something comes due that is not yet; 0: nothing will. */
FABRIC_API uint64_t fabric_next_timer(void)
{
    fabric_time due;

    fabric_lock();
    due = next_due();
    pthread_mutex_unlock(&world.lock);
    return due == UINT64_MAX ? 0 : due;
}

FABRIC_API uint64_t fabric_clock(void)
{
    return fabric_now();
}

/* Let time pass in a simulation; the timers ring that are then due. */
FABRIC_API void fabric_set_clock(uint64_t now)
{
    fabric_lock();
    if (fabric_is_stepped && now > world.clock) {
        world.clock = now;
        timers_ring(now);
    }
    pthread_mutex_unlock(&world.lock);
}

/* Bits of the simulation's chance, for the caller's own choices. */
FABRIC_API uint64_t fabric_dice(void)
{
    uint64_t bits;

    fabric_lock();
    bits = fabric_random();
    pthread_mutex_unlock(&world.lock);
    return bits;
}
