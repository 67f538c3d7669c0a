/*
 * What the files of the recorder share: the line that is being written, and the names of objects.
 */
#ifndef RECORDER_H
#define RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#define RECORDED __attribute__((visibility("default")))

enum kind { CONTEXT, PD, MR, MW, CHANNEL, CQ, SRQ, QP, AH, EVENTS, ID, ADDRESS, PORT, KINDS };

/* A thing whose number differs from adapter to adapter, and which has a name therefore. */
struct object {
    enum kind kind;
    uint64_t value;  /* its address, or its number */
    unsigned number; /* of its name; 0: no line has named it */
    bool gone;
    uint64_t base; /* of memory: the address that stands for its first byte */
};

/* The function of the library, behind ours of the same name. */
void *real(const char *name, const char *version);
#define REAL(name, version)                                                                        \
    ({                                                                                             \
        static __typeof__(&name) found;                                                            \
        if (!found)                                                                                \
            found = (__typeof__(&name))real(#name, version);                                       \
        found;                                                                                     \
    })

/* The library calls itself, too: only the outermost call is the program's. */
extern __thread int depth;
#define INSIDE(expression)                                                                         \
    ({                                                                                             \
        depth++;                                                                                   \
        __auto_type result_ = (expression);                                                        \
        depth--;                                                                                   \
        result_;                                                                                   \
    })

/* A line begins; false: it is not to be written. */
bool begin(const char *call);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_name(enum kind kind, uint64_t value);
void say_bytes(const void *bytes, size_t length);
void say_flags(const char *title, unsigned value, const char *const *names, unsigned count);
void say_address(const struct sockaddr *address);
void say_key(uint32_t key, uint64_t address);
void say_key_name(uint32_t key);
void say_qpn(uint32_t number);
/* The line ends with what the call returned; errno is kept. */
void end(void);
void end_code(int code);  /* 0 or an errno */
void end_errno(int code); /* 0, or -1 and errno */
void end_object(enum kind kind, const void *object);

struct object *object(enum kind kind, uint64_t value);
void forget(enum kind kind, uint64_t value);
void note_key(uint32_t key, struct object *object);
void note_qpn(uint32_t number, struct object *object);
/* NULL: nobody has made a queue pair of that number. */
struct object *find_qpn(uint32_t number);

const char *errno_name(int code);
const char *text_of(unsigned value, const char *const *names, unsigned count);
#define TEXT(value, names)         text_of((unsigned)(value), names, sizeof(names) / sizeof(*names))
#define FLAGS(title, value, names) say_flags(title, value, names, sizeof(names) / sizeof(*names))

/* Put our functions into a context that the program has come by. */
void see_context(struct ibv_context *context);

#endif
