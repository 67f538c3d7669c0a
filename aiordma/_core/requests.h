/*
 * The frames of requests, and how much of its grant a side has taken, without Python.
 * requests/wire.py has the other frames, and their errors.
 */
#ifndef AIORDMA_REQUESTS_H
#define AIORDMA_REQUESTS_H

#include "protocol.h"

#define AIO_REQUEST_HEADER  16
#define AIO_REQUEST_MAGIC   0xA5
#define AIO_REQUEST_VERSION 1
/* Bit of the immediate that says that a body belongs to an answer: numbers are below it. */
#define AIO_ANSWER_BODY 0x80000000u

/* Kinds of frames that are processed in C; of the others Python knows. */
enum aio_request_kind { AIO_REQUEST = 1, AIO_ANSWER = 2 };

struct aio_request_header {
    uint8_t kind;
    uint8_t flags;
    uint32_t number;
    uint64_t argument; /* of a REQUEST: microseconds that are left, 0 for no limit */
};

static inline void request_pack(uint8_t *to, const struct aio_request_header *header)
{
    to[0] = AIO_REQUEST_MAGIC;
    to[1] = AIO_REQUEST_VERSION;
    to[2] = header->kind;
    to[3] = header->flags;
    for (int i = 0; i < 4; i++)
        to[4 + i] = (uint8_t)(header->number >> (24 - 8 * i));
    for (int i = 0; i < 8; i++)
        to[8 + i] = (uint8_t)(header->argument >> (56 - 8 * i));
}

/*
 * Whether a message of `length` bytes is a REQUEST or an ANSWER with its body, which is all that is
 * processed in C; then its header is in `header`.
 */
static inline int request_parse(const uint8_t *from, uint64_t length,
                                struct aio_request_header *header)
{
    if (length < AIO_REQUEST_HEADER || from[0] != AIO_REQUEST_MAGIC ||
        from[1] != AIO_REQUEST_VERSION || (from[2] != AIO_REQUEST && from[2] != AIO_ANSWER) ||
        from[3])
        return 0;
    *header = (struct aio_request_header){
        .kind = from[2],
        .number = aio_read32(from + 4),
        .argument = aio_read64(from + 8),
    };
    return header->number < AIO_ANSWER_BODY;
}

/* The argument of a REQUEST with so many seconds left: at least 1, as 0 means no limit. */
static inline uint64_t request_microseconds(double seconds)
{
    if (seconds >= 1e12)
        return UINT64_C(1000000000000000000);
    return seconds > 1e-6 ? (uint64_t)(seconds * 1e6) : 1;
}

/* What the peer has granted, and how much of it the calls of this side have taken. */
struct aio_grant {
    uint64_t most_calls;
    uint64_t most_bytes;
    uint64_t calls;
    uint64_t bytes;
};

/* Whether a call of `size` bytes may go out; one that is alone may exceed the bytes. */
static inline int grant_fits(const struct aio_grant *grant, uint64_t size)
{
    return grant->calls < grant->most_calls &&
           (!grant->calls || grant->bytes + size <= grant->most_bytes);
}

static inline void grant_take(struct aio_grant *grant, uint64_t size)
{
    grant->calls++;
    grant->bytes += size;
}

static inline void grant_give_back(struct aio_grant *grant, uint64_t size)
{
    grant->calls--;
    grant->bytes -= size;
}

#endif
