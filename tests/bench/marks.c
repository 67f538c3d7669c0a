/* Says where a measurement begins and ends, for instructions.c.
 *
 * A Python program calls bench_start() and bench_stop() by way of ctypes.  Into a program that is
 * not to be changed this library is loaded before all others (LD_PRELOAD), and stands in front of a
 * few functions: with BENCH_START=rdma_create_id:1 and BENCH_STOP=ibv_get_cq_event:500 the
 * measurement begins with the first call of the one, and ends with the 500th call of the other.
 * That costs a call some ten instructions.
 *
 * At its end the time that it took and the maps of the process are written to BENCH_WINDOW.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "marks.h"

#define TEXT(...)     TEXT_OF(__VA_ARGS__)
#define TEXT_OF(...)  #__VA_ARGS__
#define EXECUTE(kind) __asm__ volatile(".byte " TEXT(MARK_BYTES(kind))::: "memory")

static struct timespec begun;

void bench_job(void)
{
    EXECUTE(MARK_JOB);
}

void bench_start(void)
{
    clock_gettime(CLOCK_MONOTONIC, &begun);
    EXECUTE(MARK_START);
}

static void tell(long long nanoseconds)
{
    char buffer[4096];
    const char *name = getenv("BENCH_WINDOW");
    FILE *told = name != NULL ? fopen(name, "w") : NULL;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (told == NULL || maps < 0) {
        perror("marks: BENCH_WINDOW");
        _exit(1);
    }
    fprintf(told, "%lld\n", nanoseconds);
    for (ssize_t size; (size = read(maps, buffer, sizeof buffer)) > 0;)
        fwrite(buffer, 1, (size_t)size, told);
    close(maps);
    if (fclose(told) != 0) {
        perror("marks: BENCH_WINDOW");
        _exit(1);
    }
}

void bench_stop(void)
{
    struct timespec now;
    EXECUTE(MARK_STOP);
    clock_gettime(CLOCK_MONOTONIC, &now);
    tell((now.tv_sec - begun.tv_sec) * 1000000000LL + now.tv_nsec - begun.tv_nsec);
}

/* The functions that a measurement can begin or end with. */

struct watched {
    const char *name;
    void *function;
    long calls, start, stop;
};

static long wanted(const char *variable, const char *name)
{
    const char *text = getenv(variable);
    size_t length = strlen(name);
    if (text == NULL || strncmp(text, name, length) != 0 || text[length] != ':')
        return 0;
    return atol(text + length + 1);
}

static void look_up(struct watched *watched)
{
    watched->function = dlsym(RTLD_NEXT, watched->name);
    if (watched->function == NULL) {
        fprintf(stderr, "marks: no %s: %s\n", watched->name, dlerror());
        _exit(1);
    }
    watched->start = wanted("BENCH_START", watched->name);
    watched->stop = wanted("BENCH_STOP", watched->name);
}

static void *called(struct watched *watched)
{
    if (watched->function == NULL)
        look_up(watched);
    watched->calls++;
    if (watched->calls == watched->start)
        bench_start();
    if (watched->calls == watched->stop)
        bench_stop();
    return watched->function;
}

#define WATCH(call, parameters, ...)                                                               \
    int call parameters                                                                            \
    {                                                                                              \
        static struct watched watched = {.name = #call};                                           \
        int(*function) parameters;                                                                 \
        *(void **)&function = called(&watched);                                                    \
        return function(__VA_ARGS__);                                                              \
    }

WATCH(ibv_get_cq_event, (struct ibv_comp_channel * channel, struct ibv_cq **cq, void **cq_context),
      channel, cq, cq_context)
WATCH(rdma_create_id,
      (struct rdma_event_channel * channel, struct rdma_cm_id **id, void *context,
       enum rdma_port_space ps),
      channel, id, context, ps)
WATCH(rdma_disconnect, (struct rdma_cm_id * id), id)
