/*
 * The rules by which a READ, WRITE or atomic may be posted, once, for C and, by `_core.admit`, for
 * Python, which turns the answer into an exception.
 *
 * An access that an adapter refuses costs both sides the connection.  The rules refuse it before,
 * by what this side knows of both memories; they are no protection from a hostile peer.
 */
#ifndef AIORDMA_ADMISSION_H
#define AIORDMA_ADMISSION_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

enum aio_admission {
    AIO_ADMITTED,
    AIO_REFUSED_OUTSIDE,   /* not all of it is inside the peer's memory */
    AIO_REFUSED_RIGHT,     /* the peer does not give the right */
    AIO_REFUSED_ALIGNMENT, /* an atomic is of 8 bytes, at a multiple of 8 */
    AIO_REFUSED_OWNER,     /* it is not the peer's memory; see connection_admission */
    AIO_REFUSED_REVOKED,   /* the peer has said that the exposure has ended */
};

static inline enum aio_admission admission_of_remote(uint64_t addr, uint64_t size, uint64_t rights,
                                                     uint64_t offset, uint64_t length,
                                                     uint64_t right)
{
    if (length > size || offset > size - length)
        return AIO_REFUSED_OUTSIDE;
    if (right & ~rights)
        return AIO_REFUSED_RIGHT;
    if (right & IBV_ACCESS_REMOTE_ATOMIC && (length != 8 || (addr + offset) % 8))
        return AIO_REFUSED_ALIGNMENT;
    return AIO_ADMITTED;
}

/* Whether the adapter may use registered memory of this side, to write to it or only to read it. */
static inline bool local_is_admitted(uint32_t access, bool lands)
{
    return !lands || access & IBV_ACCESS_LOCAL_WRITE;
}

#endif
