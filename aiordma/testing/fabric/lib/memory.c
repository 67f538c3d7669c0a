/*
 * Protection domains, memory regions, memory windows: who may touch which bytes.
 *
 * A key is 24 bits of an index, of which the lowest tells a window from a region, and 8 bits that
 * differ each time that the index is given again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fabric.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

enum {
    WINDOW = 1, /* the bit of an index */
    INDEXES = 1 << 23,
    KNOWN = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
            IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
            IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB,
    /* Bits above these are hints, which an adapter may ignore. */
    OPTIONAL = IBV_ACCESS_OPTIONAL_RANGE,
};

static struct fabric_table regions, windows;
static uint8_t variant;

/* ---- tables ---------------------------------------------------------------------------------- */

static bool table_grow(struct fabric_table *table)
{
    unsigned size = table->size ? 2 * table->size : 64;
    void **items = realloc(table->items, size * sizeof(*items));

    if (!items)
        return false;
    memset(items + table->size, 0, (size - table->size) * sizeof(*items));
    table->items = items;
    table->size = size;
    return true;
}

unsigned fabric_table_add(struct fabric_table *table, void *item, unsigned most)
{
    unsigned tries, index;

    if (table->used >= most || (table->used + 1 >= table->size && !table_grow(table)))
        return 0;
    /* Behind the last one that was given: an old number is given again as late as can be. */
    for (tries = 0; tries < table->size; tries++) {
        index = (table->next + tries) % table->size;
        if (index && !table->items[index]) {
            table->items[index] = item;
            table->used++;
            table->next = index + 1;
            return index;
        }
    }
    return 0;
}

void *fabric_table_find(struct fabric_table *table, unsigned index)
{
    return index < table->size ? table->items[index] : NULL;
}

void fabric_table_remove(struct fabric_table *table, unsigned index)
{
    table->items[index] = NULL;
    table->used--;
}

static uint32_t key_of(unsigned index, unsigned kind)
{
    return (uint32_t)(index << 1 | kind) << 8 | ++variant;
}

/* ---- protection domains ---------------------------------------------------------------------- */

FABRIC_API struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct fabric_pd *pd = NULL;

    fabric_lock();
    if (!fabric_fails("ibv_alloc_pd") && (pd = calloc(1, sizeof(*pd)))) {
        pd->context = fabric_context(context);
        pd->ibv.context = context;
        pd->context->objects++;
        fabric_born(FABRIC_PD);
    }
    fabric_unlock();
    return pd ? &pd->ibv : NULL;
}

FABRIC_API int ibv_dealloc_pd(struct ibv_pd *ibv)
{
    struct fabric_pd *pd = FABRIC_CONTAINER(ibv, struct fabric_pd, ibv);
    int error = 0;

    fabric_lock();
    if (pd->context->generation != fabric_generation()) {
        ;
    } else if (pd->users) {
        error = EBUSY;
    } else {
        pd->context->objects--;
        fabric_gone(FABRIC_PD);
        free(pd);
    }
    fabric_unlock();
    return error;
}

/* ---- regions --------------------------------------------------------------------------------- */

/* Whether the lines of /proc/self/maps have all of the range, with the permission. */
static bool is_mapped(uintptr_t first, uintptr_t end, bool to_write)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long from, to;
    char permissions[5], line[512];

    if (!maps)
        return true; /* not known; a fault of the program shows itself then */
    while (first < end && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%lx %4s", &from, &to, permissions) == 3 && from <= first &&
            first < to && permissions[0] == 'r' && (!to_write || permissions[1] == 'w'))
            first = to;
    fclose(maps);
    return first >= end;
}

/* An adapter pins the pages. They are brought in here, and it is found out whether they can be. */
static int touch_pages(uintptr_t address, size_t length, bool to_write)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = address & ~(page - 1), end = (address + length + page - 1) & ~(page - 1);

    if (!madvise((void *)first, end - first, to_write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ))
        return 0;
    /* EINVAL is also what a kernel older than 5.14 says. */
    return errno == EINVAL && is_mapped(first, end, to_write) ? 0 : EFAULT;
}

static int region_check(const struct fabric_pd *pd, uintptr_t address, size_t length,
                        unsigned access)
{
    unsigned to_write = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

    if (access & ~(unsigned)(KNOWN | OPTIONAL))
        return EINVAL;
    /* A right of the peer to change bytes is none without the same of this side. */
    if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) &&
        !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if ((access & IBV_ACCESS_ZERO_BASED && !fabric_profile.zero_based) ||
        (access & IBV_ACCESS_ON_DEMAND && !fabric_profile.on_demand))
        return EOPNOTSUPP;
    if (access & IBV_ACCESS_MW_BIND && !fabric_profile.windows)
        return EINVAL;
    if (!length || address + length < address || (int64_t)length > fabric_profile.max_mr_size)
        return EINVAL;
    if (access & IBV_ACCESS_ON_DEMAND)
        return 0;
    return touch_pages(address, length, access & to_write);
}

static struct ibv_mr *region_new(struct ibv_pd *ibv_pd, void *address, size_t length, uint64_t iova,
                                 unsigned access, const char *call)
{
    struct fabric_pd *pd = FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv);
    struct fabric_mr *mr = NULL;
    unsigned index = 0;
    int error;

    error = region_check(pd, (uintptr_t)address, length, access);
    fabric_lock();
    if (!error && fabric_fails(call))
        error = errno;
    if (!error && pd->context->generation != fabric_generation())
        error = EBADF;
    if (!error && !(mr = calloc(1, sizeof(*mr))))
        error = ENOMEM;
    if (!error && !(index = fabric_table_add(&regions, mr,
                                             (unsigned)fabric_profile.max_mr < INDEXES
                                                 ? (unsigned)fabric_profile.max_mr
                                                 : INDEXES)))
        error = ENOMEM;
    if (error) {
        free(mr);
        fabric_unlock();
        errno = error;
        return NULL;
    }
    mr->ibv = (struct ibv_mr){.context = ibv_pd->context,
                              .pd = ibv_pd,
                              .addr = address,
                              .length = length,
                              .handle = index};
    mr->ibv.lkey = mr->ibv.rkey = key_of(index, 0);
    mr->pd = pd;
    mr->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
    mr->access = access;
    pd->users++;
    pd->context->objects++;
    fabric_born(FABRIC_MR);
    fabric_unlock();
    return &mr->ibv;
}

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

FABRIC_API struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    return region_new(pd, addr, length, (uintptr_t)addr, (unsigned)access, "ibv_reg_mr");
}

FABRIC_API struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length,
                                          uint64_t iova, int access)
{
    return region_new(pd, addr, length, iova, (unsigned)access, "ibv_reg_mr");
}

FABRIC_API struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
                                           uint64_t iova, unsigned access)
{
    return region_new(pd, addr, length, iova, access, "ibv_reg_mr");
}

FABRIC_API struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
                                            uint64_t iova, int fd, int access)
{
    errno = EOPNOTSUPP;
    return NULL;
}

FABRIC_API int ibv_dereg_mr(struct ibv_mr *ibv)
{
    struct fabric_mr *mr = FABRIC_CONTAINER(ibv, struct fabric_mr, ibv);
    int error = 0;

    fabric_lock();
    if (mr->pd->context->generation != fabric_generation()) {
        ;
    } else if (mr->windows) {
        error = EBUSY;
    } else {
        fabric_table_remove(&regions, mr->ibv.handle);
        mr->pd->users--;
        mr->pd->context->objects--;
        fabric_gone(FABRIC_MR);
        free(mr);
    }
    fabric_unlock();
    return error;
}

/* Returns a value of enum ibv_rereg_mr_err_code, or 0. */
FABRIC_API int ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *ibv_pd, void *addr,
                            size_t length, int access)
{
    struct fabric_mr *mr = FABRIC_CONTAINER(ibv, struct fabric_mr, ibv);
    struct fabric_pd *pd = mr->pd;
    unsigned rights = flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned)access : mr->access;
    int error = 0;

    if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED ||
        (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!length || !addr)) ||
        (flags & IBV_REREG_MR_CHANGE_PD && !ibv_pd)) {
        errno = EINVAL;
        return IBV_REREG_MR_ERR_INPUT;
    }
    if (flags & IBV_REREG_MR_CHANGE_PD)
        pd = FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv);
    if (flags & IBV_REREG_MR_CHANGE_TRANSLATION)
        error = region_check(pd, (uintptr_t)addr, length, rights);
    else
        error = region_check(pd, (uintptr_t)mr->ibv.addr, mr->ibv.length, rights);
    fabric_lock();
    if (!error && mr->windows)
        error = EBUSY;
    if (!error) {
        mr->pd->users--;
        pd->users++;
        mr->pd = pd;
        mr->ibv.pd = &pd->ibv;
        mr->access = rights;
        if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
            mr->ibv.addr = addr;
            mr->ibv.length = length;
            mr->iova = rights & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)addr;
        }
        /* Other rights alone leave the keys that peers have been told. */
        if (flags != IBV_REREG_MR_CHANGE_ACCESS)
            mr->ibv.lkey = mr->ibv.rkey = key_of(mr->ibv.handle, 0);
    }
    fabric_unlock();
    errno = error;
    return error ? IBV_REREG_MR_ERR_CMD : 0;
}

/* ---- windows --------------------------------------------------------------------------------- */

struct ibv_mw *fabric_alloc_mw(struct ibv_pd *ibv_pd, enum ibv_mw_type type)
{
    struct fabric_pd *pd = FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv);
    struct fabric_mw *mw = NULL;
    unsigned index = 0;
    int error = 0;

    if (!fabric_profile.windows)
        error = EOPNOTSUPP;
    else if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
        error = EINVAL;
    else if (!(fabric_profile.windows & (type == IBV_MW_TYPE_1 ? 1 : 6)))
        error = EOPNOTSUPP;
    fabric_lock();
    if (!error && fabric_fails("ibv_alloc_mw"))
        error = errno;
    if (!error && (!(mw = calloc(1, sizeof(*mw))) ||
                   !(index = fabric_table_add(&windows, mw, (unsigned)fabric_profile.max_mw))))
        error = ENOMEM;
    if (error) {
        free(mw);
        fabric_unlock();
        errno = error;
        return NULL;
    }
    mw->ibv =
        (struct ibv_mw){.context = ibv_pd->context, .pd = ibv_pd, .handle = index, .type = type};
    mw->ibv.rkey = key_of(index, WINDOW);
    mw->pd = pd;
    pd->users++;
    pd->context->objects++;
    fabric_born(FABRIC_MW);
    fabric_unlock();
    return &mw->ibv;
}

static void window_unbind(struct fabric_mw *mw)
{
    if (mw->mr)
        mw->mr->windows--;
    mw->mr = NULL;
    mw->qp = NULL;
    mw->length = 0;
}

int fabric_dealloc_mw(struct ibv_mw *ibv)
{
    struct fabric_mw *mw = FABRIC_CONTAINER(ibv, struct fabric_mw, ibv);

    fabric_lock();
    if (mw->pd->context->generation == fabric_generation()) {
        window_unbind(mw);
        fabric_table_remove(&windows, mw->ibv.handle);
        mw->pd->users--;
        mw->pd->context->objects--;
        fabric_gone(FABRIC_MW);
        free(mw);
    }
    fabric_unlock();
    return 0;
}

int fabric_bind(struct fabric_qp *qp, struct fabric_mw *mw, uint32_t rkey,
                const struct ibv_mw_bind_info *info)
{
    unsigned access = info->mw_access_flags;
    struct fabric_mr *mr;

    if (mw->pd != qp->pd)
        return EPERM;
    if (rkey >> 8 != mw->ibv.rkey >> 8)
        return EINVAL;
    /* A window of type 2 has to be invalidated before it is bound again. */
    if (mw->ibv.type == IBV_MW_TYPE_2 && mw->mr)
        return EINVAL;
    if (info->length) {
        mr = FABRIC_CONTAINER(info->mr, struct fabric_mr, ibv);
        if (mr->pd != qp->pd || !(mr->access & IBV_ACCESS_MW_BIND))
            return EPERM;
        if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) &&
            !(mr->access & IBV_ACCESS_LOCAL_WRITE))
            return EPERM;
        if (info->addr < mr->iova || info->addr - mr->iova > mr->ibv.length ||
            info->length > mr->ibv.length - (info->addr - mr->iova))
            return EINVAL;
    }
    window_unbind(mw);
    mw->ibv.rkey = rkey;
    if (!info->length)
        return 0;
    mw->mr = mr;
    mr->windows++;
    mw->address = info->addr;
    mw->length = info->length;
    mw->access = access;
    mw->qp = mw->ibv.type == IBV_MW_TYPE_2 ? qp : NULL;
    return 0;
}

bool fabric_invalidate(struct fabric_qp *qp, uint32_t rkey)
{
    struct fabric_mw *mw = NULL;

    if (rkey >> 8 & WINDOW)
        mw = fabric_table_find(&windows, rkey >> 9);
    if (!mw || mw->ibv.rkey != rkey || mw->ibv.type != IBV_MW_TYPE_2 || mw->pd != qp->pd ||
        !mw->mr || mw->qp != qp)
        return false;
    window_unbind(mw);
    return true;
}

void fabric_windows_of_qp_gone(struct fabric_qp *qp)
{
    unsigned i;

    for (i = 1; i < windows.size; i++) {
        struct fabric_mw *mw = windows.items[i];

        if (mw && mw->qp == qp)
            window_unbind(mw);
    }
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/*
 * An adapter holds the pages of a region, whatever the program does with its mapping.  Here the
 * bytes are copied by way of the mapping, and a program that unmaps a region in use ends with
 * SIGSEGV, as a device would never tell it.  With AIORDMA_FABRIC_PINNED=1 they go by way of
 * /proc/self/mem, which writes to protected pages, too, and fails where none are; that takes ten
 * times as long.
 */
static int own_memory(void)
{
    static unsigned generation;
    static int fd = -1, wanted = -1;

    if (wanted < 0)
        wanted = getenv("AIORDMA_FABRIC_PINNED") != NULL;
    if (!wanted)
        return -1;
    if (fd >= 0 && generation != fabric_generation()) {
        close(fd); /* it is the parent's memory */
        fd = -1;
    }
    if (fd < 0) {
        fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
        if (fd >= 0 && fd <= 2) { /* one of the standard streams, which a program has closed */
            int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);

            close(fd);
            fd = moved;
        }
        generation = fabric_generation();
    }
    return fd;
}

void fabric_memory_write(void *where, const void *from, size_t length)
{
    int fd = fabric_is_stepped ? -1 : own_memory();

    if (!length)
        return;
    if (fd < 0)
        memcpy(where, from, length);
    else
        (void)!pwrite(fd, from, length, (off_t)(uintptr_t)where);
}

void fabric_memory_read(void *into, const void *where, size_t length)
{
    int fd = fabric_is_stepped ? -1 : own_memory();

    if (!length)
        return;
    if (fd < 0)
        memcpy(into, where, length);
    else if (pread(fd, into, length, (off_t)(uintptr_t)where) != (ssize_t)length)
        memset(into, 0, length);
}

/* ---- access ---------------------------------------------------------------------------------- */

static struct fabric_mr *region_find(uint32_t key)
{
    struct fabric_mr *mr;

    if (key >> 8 & WINDOW)
        return NULL;
    mr = fabric_table_find(&regions, key >> 9);
    return mr && mr->ibv.lkey == key ? mr : NULL;
}

static enum fabric_fault region_reach(const struct fabric_mr *mr, uint64_t address, uint64_t length,
                                      void **where)
{
    if (address < mr->iova || address - mr->iova > mr->ibv.length ||
        length > mr->ibv.length - (address - mr->iova))
        return FABRIC_NO_BYTES;
    *where = (char *)mr->ibv.addr + (address - mr->iova);
    return FABRIC_FINE;
}

enum fabric_fault fabric_local(struct fabric_pd *pd, uint32_t lkey, uint64_t address,
                               uint64_t length, unsigned access, void **where)
{
    struct fabric_mr *mr;

    *where = NULL;
    if (!length)
        return FABRIC_FINE;
    mr = region_find(lkey);
    if (!mr || mr->pd != pd)
        return FABRIC_NO_KEY;
    if ((mr->access & access) != access)
        return FABRIC_NO_RIGHT;
    return region_reach(mr, address, length, where);
}

enum fabric_fault fabric_remote(struct fabric_qp *qp, uint32_t rkey, uint64_t address,
                                uint64_t length, unsigned access, void **where)
{
    struct fabric_mr *mr;
    struct fabric_mw *mw;

    *where = NULL;
    if (!((unsigned)qp->attr.qp_access_flags & access))
        return FABRIC_NO_RIGHT;
    /* The key of an operation of no bytes is not looked at. */
    if (!length)
        return FABRIC_FINE;
    if (rkey >> 8 & WINDOW) {
        mw = fabric_table_find(&windows, rkey >> 9);
        if (!mw || mw->ibv.rkey != rkey || !mw->mr || mw->pd != qp->pd || (mw->qp && mw->qp != qp))
            return FABRIC_NO_KEY;
        if (!(mw->access & access))
            return FABRIC_NO_RIGHT;
        if (address < mw->address || address - mw->address > mw->length ||
            length > mw->length - (address - mw->address))
            return FABRIC_NO_BYTES;
        return region_reach(mw->mr, address, length, where);
    }
    mr = region_find(rkey);
    if (!mr || mr->pd != qp->pd)
        return FABRIC_NO_KEY;
    if (!(mr->access & access))
        return FABRIC_NO_RIGHT;
    return region_reach(mr, address, length, where);
}
