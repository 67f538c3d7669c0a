/*
 * Profiles: what adapter the fabric is like.
 *
 * The values below are the standard's: an adapter that does all that the books allow, with the
 * limits of a large one.  The file that AIORDMA_FABRIC_PROFILE names changes some of them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fabric.h"

#define VARIABLE "AIORDMA_FABRIC_PROFILE"

struct fabric_profile fabric_profile = {
    .name = "standard",
    .device = "fab",
    .firmware = "1.0.0",
    /* Its first byte says that no registry has given it: it is nobody's. */
    .vendor_id = 0x02fab0,
    .vendor_part_id = 1,
    .hw_ver = 1,
    .gid_versions = 3,
    .mtu = 4096,
    .page_sizes = (int)0xfffff000u, /* each power of two from 4 KiB on */

    .max_mr_size = INT64_MAX,
    .max_qp = 65000,
    .max_qp_wr = 16384,
    .max_sge = 30,
    .max_sge_rd = 30,
    .max_cq = 1 << 24,
    .max_cqe = 4194303,
    .max_mr = 1 << 20,
    .max_pd = 1 << 23,
    .max_qp_rd_atom = 16,
    .max_qp_init_rd_atom = 16,
    .max_ah = 1 << 24,
    .max_mw = 1 << 20,
    .max_srq = 1 << 20,
    .max_srq_wr = 16384,
    .max_srq_sge = 30,
    .max_mcast_grp = 8192,
    .max_mcast_qp_attach = 240,
    .max_pkeys = 128,
    .max_inline = 512,
    .comp_vectors = 4,
    .ack_delay = 15,

    .atomics = 1,
    .windows = 1 | 4, /* of the two kinds of type 2 an adapter has only one */
    .send_invalidate = 1,
    .immediate = 1,
    .solicited = 1,
    .zero_based = 1,
    .resize_cq = 1,
    .srq = 1,
    .extended_cq = 1,
    .extended_qp = 1,
    .timestamps = 1,
};

/* ---- what a line may say --------------------------------------------------------------------- */

struct member {
    const char *name;
    size_t offset;
    size_t size; /* of a string; 4 or 8 of a number */
    bool is_string;
    int64_t least, most;
};

#define TEXT(member)                                                                               \
    {#member,                                                                                      \
     offsetof(struct fabric_profile, member),                                                      \
     sizeof(((struct fabric_profile *)NULL)->member),                                              \
     true,                                                                                         \
     0,                                                                                            \
     0}
#define NUMBER(member, least, most)                                                                \
    {#member,                                                                                      \
     offsetof(struct fabric_profile, member),                                                      \
     sizeof(((struct fabric_profile *)NULL)->member),                                              \
     false,                                                                                        \
     least,                                                                                        \
     most}
#define YES_OR_NO(member) NUMBER(member, 0, 1)

static const struct member MEMBERS[] = {
    TEXT(name),
    TEXT(device),
    TEXT(firmware),
    NUMBER(vendor_id, 0, 0xffffff),
    NUMBER(vendor_part_id, 0, INT_MAX),
    NUMBER(hw_ver, 0, INT_MAX),
    YES_OR_NO(iwarp),
    YES_OR_NO(infiniband_link),
    NUMBER(gid_versions, 1, 3),
    NUMBER(mtu, 256, 4096),
    NUMBER(page_sizes, 0, UINT32_MAX),

    NUMBER(max_mr_size, 1, INT64_MAX),
    NUMBER(max_qp, 1, FABRIC_QPS),
    NUMBER(max_qp_wr, 1, INT_MAX),
    NUMBER(max_sge, 1, FABRIC_SGES),
    NUMBER(max_sge_rd, 1, FABRIC_SGES),
    NUMBER(max_cq, 1, INT_MAX),
    NUMBER(max_cqe, 1, INT_MAX),
    NUMBER(max_mr, 1, INT_MAX),
    NUMBER(max_pd, 1, INT_MAX),
    NUMBER(max_qp_rd_atom, 0, 255),
    NUMBER(max_qp_init_rd_atom, 0, 255),
    NUMBER(max_ah, 0, INT_MAX),
    NUMBER(max_mw, 0, INT_MAX),
    NUMBER(max_srq, 0, INT_MAX),
    NUMBER(max_srq_wr, 0, INT_MAX),
    NUMBER(max_srq_sge, 0, FABRIC_SGES),
    NUMBER(max_mcast_grp, 0, INT_MAX),
    NUMBER(max_mcast_qp_attach, 0, INT_MAX),
    NUMBER(max_pkeys, 1, UINT16_MAX),
    NUMBER(max_inline, 0, FABRIC_INLINE),
    NUMBER(comp_vectors, 1, INT_MAX),
    NUMBER(retry_timeout_min, 0, 31),
    NUMBER(ack_delay, 0, 31),

    NUMBER(atomics, 0, 2),
    NUMBER(windows, 0, 7),
    YES_OR_NO(send_invalidate),
    YES_OR_NO(immediate),
    YES_OR_NO(solicited),
    YES_OR_NO(zero_based),
    YES_OR_NO(on_demand),
    YES_OR_NO(resize_cq),
    YES_OR_NO(srq),
    YES_OR_NO(extended_cq),
    YES_OR_NO(extended_qp),
    YES_OR_NO(timestamps),

    NUMBER(cqe_round_up, 0, 2),
    YES_OR_NO(wr_round_up),
    YES_OR_NO(arm_tells_missed),
    YES_OR_NO(overrun_is_silent),
    YES_OR_NO(read_needs_write),
    YES_OR_NO(vendor_errors),
    YES_OR_NO(no_comm_established),
    YES_OR_NO(no_last_wqe),
    YES_OR_NO(no_timewait),
    YES_OR_NO(no_qp_errors),
    YES_OR_NO(local_faults_flush),
    YES_OR_NO(receive_faults_operational),
    YES_OR_NO(failures_unsolicited),
    YES_OR_NO(posts_negative),
    YES_OR_NO(srq_fixed),
    YES_OR_NO(sent_is_done),
    YES_OR_NO(completions_stay),
};

/* ---- the file -------------------------------------------------------------------------------- */

void fabric_refuse(const char *format, ...)
{
    va_list args;

    fputs("aiordma fabric: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    /* The handlers of a program's end could use what is not there. */
    _exit(2);
}

struct place { /* of a line, for the sentence that refuses it */
    const char *path;
    unsigned number;
};

/* Without the blanks at both ends, which are cut off in place. */
static char *trim(char *text)
{
    char *end;

    text += strspn(text, " \t\r\n");
    end = text + strlen(text);
    while (end > text && strchr(" \t\r\n", end[-1]))
        end--;
    *end = '\0';
    return text;
}

/* Cut off a comment; a # within quotes is none. */
static void cut_comment(char *line)
{
    bool quoted = false;

    for (; *line; line++) {
        if (*line == '"')
            quoted = !quoted;
        if (*line == '#' && !quoted) {
            *line = '\0';
            return;
        }
    }
}

static void set_text(const struct member *member, char *value, const struct place *place)
{
    size_t length = strlen(value);

    if (length >= 2 && value[0] == '"' && value[length - 1] == '"') {
        value[length - 1] = '\0';
        value++;
    }
    if (!*value || strchr(value, '"') || strlen(value) >= member->size)
        fabric_refuse("%s:%u: %s is a text of 1 to %zu characters", place->path, place->number,
                      member->name, member->size - 1);
    strcpy((char *)&fabric_profile + member->offset, value);
}

static void set_number(const struct member *member, const char *value, const struct place *place)
{
    void *into = (char *)&fabric_profile + member->offset;
    char *end;
    int64_t number;

    errno = 0;
    number = strtoll(value, &end, 0);
    if (errno || end == value || *end || number < member->least || number > member->most)
        fabric_refuse("%s:%u: %s is a number from %lld to %lld, and not %s", place->path,
                      place->number, member->name, (long long)member->least,
                      (long long)member->most, *value ? value : "nothing");
    if (member->size == sizeof(int64_t))
        *(int64_t *)into = number;
    else
        *(int *)into = (int)number;
}

static void take_line(char *line, const struct place *place)
{
    char *name, *value;
    unsigned i;

    cut_comment(line);
    name = trim(line);
    if (!*name)
        return;
    value = strchr(name, '=');
    if (!value)
        fabric_refuse("%s:%u: this line is not `name = value`", place->path, place->number);
    *value++ = '\0';
    name = trim(name);
    value = trim(value);
    for (i = 0; i < FABRIC_LENGTH(MEMBERS); i++) {
        if (strcmp(name, MEMBERS[i].name))
            continue;
        if (MEMBERS[i].is_string)
            set_text(&MEMBERS[i], value, place);
        else
            set_number(&MEMBERS[i], value, place);
        return;
    }
    fabric_refuse("%s:%u: an adapter's profile has nothing of the name '%s'", place->path,
                  place->number, name);
}

/* What no single line can get wrong. */
static void check_whole(const char *path)
{
    const struct fabric_profile *profile = &fabric_profile;

    if (profile->mtu & (profile->mtu - 1))
        fabric_refuse("%s: mtu is 256, 512, 1024, 2048 or 4096, and not %d", path, profile->mtu);
    if (profile->iwarp && profile->infiniband_link)
        fabric_refuse("%s: iWARP has no link layer of InfiniBand", path);
    if (profile->iwarp && profile->atomics)
        fabric_refuse("%s: iWARP has no atomics; write atomics = 0, too", path);
}

void fabric_profile_load(void)
{
    static bool loaded;
    struct place place = {getenv(VARIABLE), 0};
    size_t room = 0;
    char *line = NULL;
    FILE *file;

    if (loaded || !place.path || !*place.path)
        return;
    loaded = true;
    file = fopen(place.path, "re");
    if (!file)
        fabric_refuse("%s: the profile %s cannot be opened: %s", VARIABLE, place.path,
                      strerror(errno));
    while (getline(&line, &room, file) >= 0) {
        place.number++;
        take_line(line, &place);
    }
    if (ferror(file))
        fabric_refuse("%s: the profile %s cannot be read: %s", VARIABLE, place.path,
                      strerror(errno));
    free(line);
    fclose(file);
    check_whole(place.path);
}
