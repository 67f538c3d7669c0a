/* Ends the program where a call has failed. */
#ifndef AIORDMA_BENCH_CHECK_H
#define AIORDMA_BENCH_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define check(ok, what)                                                                            \
    do {                                                                                           \
        if (!(ok)) {                                                                               \
            perror(what);                                                                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#endif
