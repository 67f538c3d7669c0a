/*
 * Alarms: timerfd, which Python has from 3.13 on only.
 *
 * One descriptor for all timers of a loop; loop/timers.py says why.
 */
#include "core.h"

#include <math.h>
#include <sys/timerfd.h>

static PyObject *alarm_open(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);

    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

/* Rounded up, so that what is due at `time` is due when the descriptor becomes readable. */
static struct timespec timespec_of(double time)
{
    double seconds;
    long rest = (long)ceil(modf(time, &seconds) * 1e9);

    if (rest == 1000000000)
        return (struct timespec){.tv_sec = (time_t)seconds + 1, .tv_nsec = 0};
    return (struct timespec){.tv_sec = (time_t)seconds, .tv_nsec = rest};
}

static PyObject *alarm_set(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct itimerspec at = {{0, 0}, {0, 0}};
    double when, every = 0;
    int fd;

    if (!PyArg_ParseTuple(args, "id|d", &fd, &when, &every))
        return NULL;
    at.it_value = timespec_of(when);
    at.it_interval = timespec_of(every);
    if (timerfd_settime(fd, TFD_TIMER_ABSTIME, &at, NULL))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyMethodDef aio_alarm_functions[] = {
    {"alarm_open", alarm_open, METH_NOARGS,
     "A descriptor that becomes readable at a time; timerfd_create(2)."},
    {"alarm_set", alarm_set, METH_VARARGS,
     "Have a descriptor become readable at a time of time.monotonic(), and not before; then again "
     "after so many seconds each, if they are given."},
    {NULL, NULL, 0, NULL},
};
