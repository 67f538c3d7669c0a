/*
 * The tables of a stream's states; see stream_life.h.
 *
 * A stream whose end is near never goes back: life and input only move on, and SHUT and NOBODY
 * stay.
 */
#include "stream_life.h"

#include <assert.h>

#define L(name) AIO_STREAM_LIFE_##name
#define I(name) AIO_INPUT_##name
#define O(name) AIO_OUTPUT_##name
#define R(name) AIO_READER_##name

/* clang-format off */
static const enum aio_stream_life lives[AIO_STREAM_LIFE_COUNT][AIO_STREAM_LIFE_EVENT_COUNT] = {
    /*                   END          FLUSH        CLOSE */
    [L(POSTS)]        = {L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(OVER)]         = {L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(FLUSHING)]     = {L(FLUSHING), L(FLUSHING), L(CLOSED)},
    [L(CLOSED)]       = {L(CLOSED),   L(CLOSED),   L(CLOSED)},
};

static const enum aio_input inputs[AIO_INPUT_COUNT][AIO_INPUT_EVENT_COUNT] = {
    /*                   OPENED       REFUSE       END */
    [I(EARLY)]        = {I(OPEN),     I(ENDED),    I(ENDED)},
    [I(OPEN)]         = {I(OPEN),     I(UNWANTED), I(ENDED)},
    [I(UNWANTED)]     = {I(UNWANTED), I(UNWANTED), I(ENDED)},
    [I(ENDED)]        = {I(ENDED),    I(ENDED),    I(ENDED)},
};

static const enum aio_output outputs[AIO_OUTPUT_COUNT][AIO_OUTPUT_EVENT_COUNT] = {
    /*                   OPENED       HOLD           RELEASE   SHUT */
    [O(EARLY)]        = {O(OPEN),     O(EARLY_HELD), O(EARLY), O(SHUT)},
    [O(EARLY_HELD)]   = {O(HELD),     O(EARLY_HELD), O(EARLY), O(SHUT)},
    [O(OPEN)]         = {O(OPEN),     O(HELD),       O(OPEN),  O(SHUT)},
    [O(HELD)]         = {O(HELD),     O(HELD),       O(OPEN),  O(SHUT)},
    [O(SHUT)]         = {O(SHUT),     O(SHUT),       O(SHUT),  O(SHUT)},
};

static const enum aio_reader readers[AIO_READER_COUNT][AIO_READER_EVENT_COUNT] = {
    /*                   KEEP         DELIVER      STOP */
    [R(PYTHON)]       = {R(PYTHON),   R(PROTOCOL), R(NOBODY)},
    [R(PROTOCOL)]     = {R(PYTHON),   R(PROTOCOL), R(NOBODY)},
    [R(NOBODY)]       = {R(NOBODY),   R(NOBODY),   R(NOBODY)},
};

static const struct aio_input_rights rights_of_input[AIO_INPUT_COUNT] = {
    /*                   takes  announces */
    [I(EARLY)]        = {false, false},
    [I(OPEN)]         = {true,  true},
    [I(UNWANTED)]     = {true,  false},
    [I(ENDED)]        = {false, false},
};

static const struct aio_output_rights rights_of_output[AIO_OUTPUT_COUNT] = {
    /*                   sends  writes */
    [O(EARLY)]        = {false, false},
    [O(EARLY_HELD)]   = {false, false},
    [O(OPEN)]         = {true,  true},
    [O(HELD)]         = {true,  false},
    [O(SHUT)]         = {false, false},
};
/* clang-format on */

enum aio_stream_life stream_life_after(enum aio_stream_life life, enum aio_stream_life_event event)
{
    enum aio_stream_life next = lives[life][event];

    assert(next >= life);
    return next;
}

enum aio_input stream_input_after(enum aio_input input, enum aio_input_event event)
{
    enum aio_input next = inputs[input][event];

    assert(next >= input);
    return next;
}

enum aio_output stream_output_after(enum aio_output output, enum aio_output_event event)
{
    enum aio_output next = outputs[output][event];

    /* What is open does not become early, and what is shut stays so. */
    assert(next >= O(OPEN) || output < O(OPEN));
    assert(next == O(SHUT) || output != O(SHUT));
    return next;
}

enum aio_reader stream_reader_after(enum aio_reader reader, enum aio_reader_event event)
{
    enum aio_reader next = readers[reader][event];

    assert(next == R(NOBODY) || reader != R(NOBODY));
    return next;
}

const struct aio_input_rights *stream_input_rights(enum aio_input input)
{
    return &rights_of_input[input];
}

const struct aio_output_rights *stream_output_rights(enum aio_output output)
{
    return &rights_of_output[output];
}
