/*
 * A clock that stands still, for programs that are simulated: it is preloaded.
 *
 * While `simulated_now` is not zero, the clocks of the process tell that moment, and descriptors of
 * timerfd_create(2) become readable when simulated_advance() passes the moment that was set.  All
 * else, and each process that is not simulated, has the clocks of the kernel.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { ALARMS = 1024, SECOND = 1000 * 1000 * 1000, YIELD = 2000 };

/* 2026-01-01, where the virtual calendar begins. */
static const uint64_t CALENDAR = 1767225600u;

uint64_t simulated_now; /* nanoseconds; 0: nothing is simulated */

static struct alarm {
    bool used;
    uint64_t due, every; /* due: 0: not set */
} alarms[ALARMS];        /* by descriptor */

int clock_gettime(clockid_t clock, struct timespec *time)
{
    uint64_t seconds = simulated_now / SECOND;

    if (!simulated_now || clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID)
        return (int)syscall(SYS_clock_gettime, clock, time);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        seconds += CALENDAR;
    time->tv_sec = (time_t)seconds;
    time->tv_nsec = (long)(simulated_now % SECOND);
    return 0;
}

int timerfd_create(int clock, int flags)
{
    int fd;

    if (!simulated_now)
        return (int)syscall(SYS_timerfd_create, clock, flags);
    fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd >= ALARMS) {
        close(fd);
        errno = EMFILE;
        return -1;
    }
    if (fd >= 0)
        alarms[fd] = (struct alarm){.used = true};
    return fd;
}

static uint64_t in_ns(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * SECOND + (uint64_t)time->tv_nsec;
}

static void alarm_ring(int fd)
{
    uint64_t one = 1;

    alarms[fd].due = alarms[fd].every ? alarms[fd].due + alarms[fd].every : 0;
    (void)!write(fd, &one, sizeof(one));
}

int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old)
{
    struct alarm *alarm;
    uint64_t count;

    if (!simulated_now || fd < 0 || fd >= ALARMS || !alarms[fd].used)
        return (int)syscall(SYS_timerfd_settime, fd, flags, value, old);
    alarm = &alarms[fd];
    alarm->due = in_ns(&value->it_value);
    alarm->every = in_ns(&value->it_interval);
    if (alarm->due && !(flags & TFD_TIMER_ABSTIME))
        alarm->due += simulated_now;
    (void)!read(fd, &count, sizeof(count)); /* what rang before is forgotten */
    if (alarm->due && alarm->due <= simulated_now)
        alarm_ring(fd);
    return 0;
}

/* The descriptor may be given again for something else. */
int close(int fd)
{
    if (fd >= 0 && fd < ALARMS)
        alarms[fd].used = false;
    return (int)syscall(SYS_close, fd);
}

void simulated_advance(uint64_t now);

/* A thread that polls gives the processor away: meanwhile time passes. */
int sched_yield(void)
{
    if (!simulated_now)
        return (int)syscall(SYS_sched_yield);
    simulated_advance(simulated_now + YIELD);
    return 0;
}

/* The moment of the first alarm; 0: none is set. */
uint64_t simulated_due(void)
{
    uint64_t due = 0;
    int fd;

    for (fd = 0; fd < ALARMS; fd++)
        if (alarms[fd].used && alarms[fd].due && (!due || alarms[fd].due < due))
            due = alarms[fd].due;
    return due;
}

void simulated_advance(uint64_t now)
{
    int fd;

    simulated_now = now;
    for (fd = 0; fd < ALARMS; fd++)
        if (alarms[fd].used && alarms[fd].due && alarms[fd].due <= now)
            alarm_ring(fd);
}
