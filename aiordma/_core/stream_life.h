/*
 * The states of a stream, as tables: what each part of it may do, and which event leads where.
 *
 * A stream has four states.  They are independent of one another, because the two directions of a
 * stream end by themselves, and neither depends on who reads.  stream.c asks these tables what is
 * allowed; tests/unit/core/test_stream_life.py drives a stream through each pair of a state and an
 * event.
 */
#ifndef AIORDMA_STREAM_LIFE_H
#define AIORDMA_STREAM_LIFE_H

#include <stdbool.h>

/*
 * The queue pair.
 * - POSTS: requests are posted.
 * - OVER: nothing is posted any more, because a post has failed or the end has begun.
 * - FLUSHING: the queue pair enters the error state; receives that come back are only counted.
 * - CLOSED: the queue pair may be gone.
 */
enum aio_stream_life {
    AIO_STREAM_LIFE_POSTS,
    AIO_STREAM_LIFE_OVER,
    AIO_STREAM_LIFE_FLUSHING,
    AIO_STREAM_LIFE_CLOSED,
    AIO_STREAM_LIFE_COUNT
};
enum aio_stream_life_event {
    AIO_STREAM_LIFE_EVENT_END,
    AIO_STREAM_LIFE_EVENT_FLUSH,
    AIO_STREAM_LIFE_EVENT_CLOSE,
    AIO_STREAM_LIFE_EVENT_COUNT
};

/*
 * What comes from the peer.
 * - EARLY: the connection is not open on this side; every word is Python's.
 * - OPEN: data are taken as they come, and the room that is read goes back to the peer.
 * - UNWANTED: this side reads no more, which the peer does not know yet; no room goes back.
 * - ENDED: the peer has said its end, or the stream was given up early; every word is Python's.
 */
enum aio_input {
    AIO_INPUT_EARLY,
    AIO_INPUT_OPEN,
    AIO_INPUT_UNWANTED,
    AIO_INPUT_ENDED,
    AIO_INPUT_COUNT
};
enum aio_input_event {
    AIO_INPUT_EVENT_OPENED,
    AIO_INPUT_EVENT_REFUSE,
    AIO_INPUT_EVENT_END,
    AIO_INPUT_EVENT_COUNT
};

/*
 * What goes to the peer.  While Python has bytes that go first, or a reason to raise, it holds:
 * then a `write` leaves everything to it.
 * - EARLY, EARLY_HELD: the connection is not open on this side.
 * - OPEN: a `write` sends what there is room for.
 * - HELD: only Python sends.
 * - SHUT: nothing is sent any more.
 */
enum aio_output {
    AIO_OUTPUT_EARLY,
    AIO_OUTPUT_EARLY_HELD,
    AIO_OUTPUT_OPEN,
    AIO_OUTPUT_HELD,
    AIO_OUTPUT_SHUT,
    AIO_OUTPUT_COUNT
};
enum aio_output_event {
    AIO_OUTPUT_EVENT_OPENED,
    AIO_OUTPUT_EVENT_HOLD,
    AIO_OUTPUT_EVENT_RELEASE,
    AIO_OUTPUT_EVENT_SHUT,
    AIO_OUTPUT_EVENT_COUNT
};

/*
 * Who gets the bytes that arrive while no task waits for them.
 * - PYTHON: the stream is told, and reads.
 * - PROTOCOL: the protocol's data_received is called with them.
 * - NOBODY: they are dropped.
 */
enum aio_reader { AIO_READER_PYTHON, AIO_READER_PROTOCOL, AIO_READER_NOBODY, AIO_READER_COUNT };
enum aio_reader_event {
    AIO_READER_EVENT_KEEP,
    AIO_READER_EVENT_DELIVER,
    AIO_READER_EVENT_STOP,
    AIO_READER_EVENT_COUNT
};

struct aio_input_rights {
    bool takes;     /* data and limits, without Python */
    bool announces; /* room and credits to the peer */
};

struct aio_output_rights {
    bool sends;  /* data */
    bool writes; /* a `write` sends; where not, Python is told of room */
};

enum aio_stream_life stream_life_after(enum aio_stream_life life, enum aio_stream_life_event event);
enum aio_input stream_input_after(enum aio_input input, enum aio_input_event event);
enum aio_output stream_output_after(enum aio_output output, enum aio_output_event event);
enum aio_reader stream_reader_after(enum aio_reader reader, enum aio_reader_event event);
const struct aio_input_rights *stream_input_rights(enum aio_input input);
const struct aio_output_rights *stream_output_rights(enum aio_output output);

#endif
