/*
 * A library that is loaded before all others (LD_PRELOAD) and writes down what a program asks of
 * libibverbs and librdmacm, and what it gets: a line for each call, completion and event.
 *
 * Two adapters give different addresses, keys and numbers to what is the same.  So each object has
 * a name, by its kind and the order in which lines mention it, and an address is a distance from
 * the beginning of its region.  Fields that the manuals leave undefined are left out.  A poll that
 * finds nothing is no line, because how often a program polls is chance.
 *
 * The programs have one thread, and so no lock is here.
 */
#include "recorder.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OBJECTS = 4096, LINE = 8192 };

__thread int depth;

static int out = -1;
static bool muted;
static char line[LINE];
static size_t used;

static struct object objects[OBJECTS];
static unsigned object_count, numbers[KINDS];

/* Keys and numbers of queue pairs lead to objects; the newest comes first. */
static struct pointer {
    uint32_t number;
    struct object *object;
} keys[OBJECTS], qpns[OBJECTS];
static unsigned key_count, qpn_count;

static const char *const kind_names[] = {"ctx", "pd", "mr",     "mw", "channel", "cq",  "srq",
                                         "qp",  "ah", "events", "id", "addr",    "port"};

void *real(const char *name, const char *version)
{
    void *found = dlvsym(RTLD_NEXT, name, version);
    if (!found)
        found = dlsym(RTLD_NEXT, name);
    if (!found) {
        fprintf(stderr, "recorder: no function %s\n", name);
        abort();
    }
    return found;
}

/* ---- for the programs -------------------------------------------------------------------- */

RECORDED int recorder_open(const char *path)
{
    out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    return out < 0 ? errno : 0;
}

RECORDED void recorder_mute(int yes)
{
    muted = yes;
}

/* A line of the program's own: what is in its memory, for one. */
RECORDED void recorder_note(const char *text)
{
    if (begin("note")) {
        say(" %s", text);
        end();
    }
}

/* ---- the line ---------------------------------------------------------------------------- */

bool begin(const char *call)
{
    if (depth || muted || out < 0)
        return false;
    used = 0;
    say("%s", call);
    return true;
}

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + used, LINE - 1 - used, format, arguments);
    va_end(arguments);
    if (length > 0)
        used += (size_t)length < LINE - 1 - used ? (size_t)length : LINE - 2 - used;
}

void end(void)
{
    int kept = errno;
    line[used++] = '\n';
    if (write(out, line, used) != (ssize_t)used)
        abort();
    errno = kept;
}

void end_code(int code)
{
    say(" -> %s", errno_name(code));
    end();
}

void end_errno(int code)
{
    say(" -> %s", code ? errno_name(errno) : "0");
    end();
}

void end_object(enum kind kind, const void *created)
{
    if (created) {
        say(" -> ");
        say_name(kind, (uintptr_t)created);
    } else {
        say(" -> %s", errno_name(errno));
    }
    end();
}

const char *errno_name(int code)
{
    static char text[24];
    const char *name = code < -1 ? strerrorname_np(-code) : code ? strerrorname_np(code) : "0";
    if (name && code >= 0)
        return name;
    if (name && code < -1)
        snprintf(text, sizeof(text), "-%s", name);
    else
        snprintf(text, sizeof(text), "%d", code);
    return text;
}

const char *text_of(unsigned value, const char *const *names, unsigned count)
{
    static char text[24];
    if (value < count && names[value])
        return names[value];
    snprintf(text, sizeof(text), "%u", value);
    return text;
}

void say_flags(const char *title, unsigned value, const char *const *names, unsigned count)
{
    say(" %s=", title);
    const char *between = "";
    for (unsigned bit = 0; bit < 32; bit++) {
        if (value & 1u << bit) {
            if (bit < count && names[bit])
                say("%s%s", between, names[bit]);
            else
                say("%sbit%u", between, bit);
            between = "|";
        }
    }
    if (!value)
        say("0");
}

/* Padding is zeros, and told by its length alone. */
void say_bytes(const void *bytes, size_t length)
{
    const unsigned char *byte = bytes;
    size_t padding = 0;
    if (!byte)
        length = 0;
    while (padding < length && !byte[length - 1 - padding])
        padding++;
    say("%zu:", length);
    for (size_t i = 0; i < length - padding; i++)
        say("%02x", byte[i]);
    if (padding)
        say("+%zux00", padding);
}

/* ---- names ------------------------------------------------------------------------------- */

struct object *object(enum kind kind, uint64_t value)
{
    for (unsigned i = object_count; i-- > 0;)
        if (objects[i].kind == kind && objects[i].value == value && !objects[i].gone)
            return &objects[i];
    if (object_count == OBJECTS)
        abort();
    struct object *fresh = &objects[object_count++];
    *fresh = (struct object){.kind = kind, .value = value};
    return fresh;
}

/* The address may be that of another object soon. */
void forget(enum kind kind, uint64_t value)
{
    object(kind, value)->gone = true;
}

static void say_object(struct object *named)
{
    if (!named->number)
        named->number = ++numbers[named->kind];
    say("%s%u", kind_names[named->kind], named->number);
}

void say_name(enum kind kind, uint64_t value)
{
    if (value)
        say_object(object(kind, value));
    else
        say("none");
}

static void note_number(struct pointer *table, unsigned *count, uint32_t number,
                        struct object *about)
{
    if (*count == OBJECTS)
        abort();
    table[(*count)++] = (struct pointer){number, about};
}

static struct object *find_number(const struct pointer *table, unsigned count, uint32_t number)
{
    while (count-- > 0)
        if (table[count].number == number)
            return table[count].object;
    return NULL;
}

void note_key(uint32_t key, struct object *about)
{
    note_number(keys, &key_count, key, about);
}

void note_qpn(uint32_t number, struct object *about)
{
    note_number(qpns, &qpn_count, number, about);
}

struct object *find_qpn(uint32_t number)
{
    return find_number(qpns, qpn_count, number);
}

void say_key(uint32_t key, uint64_t address)
{
    struct object *about = find_number(keys, key_count, key);
    if (!about) {
        say("?");
        return;
    }
    say_object(about);
    say("%+lld", (long long)(address - about->base));
}

void say_key_name(uint32_t key)
{
    struct object *about = find_number(keys, key_count, key);
    if (about)
        say_object(about);
    else
        say("?");
}

void say_qpn(uint32_t number)
{
    struct object *about = find_qpn(number);
    if (about)
        say_object(about);
    else
        say("%s", number == 0xffffff ? "multicast" : number ? "other" : "0");
}

void say_address(const struct sockaddr *address)
{
    if (!address) {
        say("none");
        return;
    }
    uint16_t port = 0;
    if (address->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, address, sizeof(v4));
        port = v4.sin_port;
        if (v4.sin_addr.s_addr)
            say_name(ADDRESS, v4.sin_addr.s_addr);
        else
            say("any4");
    } else if (address->sa_family == AF_INET6) {
        struct sockaddr_in6 v6;
        uint64_t parts[2];
        memcpy(&v6, address, sizeof(v6));
        memcpy(parts, &v6.sin6_addr, sizeof(parts));
        port = v6.sin6_port;
        if (parts[0] | parts[1])
            say_name(ADDRESS, parts[0] ^ parts[1]);
        else
            say("any6");
    } else {
        say("family%u", address->sa_family);
        return;
    }
    say(":");
    if (port)
        say_name(PORT, port);
    else
        say("any");
}
