/*
 * What a program can ask an adapter and its port: limits, the tables of GIDs and P_Keys, and the
 * files of sysfs that a kernel would have for them.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"
#include "versions.h"

/* The header's macro checks a call in a program; here is the function that it calls in the end. */
#undef ibv_query_port

enum {
    DEFAULT_PKEY = 0xffff,
    MESSAGE_LOG = 31, /* of the longest message, by the specification */
    WIDTH_4X = 2,
    SPEED_EDR = 32, /* 25 Gbit/s of each lane */
    PHYSICALLY_DOWN = 3,
    PHYSICALLY_UP = 5,
    TIMEOUT_OF_SUBNET = 18,
};

/* ---- what a device is ------------------------------------------------------------------------ */

static unsigned capabilities(void)
{
    const struct fabric_profile *profile = &fabric_profile;
    unsigned flags = IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_PORT_ACTIVE_EVENT;

    if (!profile->iwarp)
        flags |= IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_RC_RNR_NAK_GEN;
    if (profile->srq)
        flags |= IBV_DEVICE_SRQ_RESIZE;
    if (profile->windows & 1)
        flags |= IBV_DEVICE_MEM_WINDOW;
    if (profile->windows & 2)
        flags |= IBV_DEVICE_MEM_WINDOW_TYPE_2A;
    if (profile->windows & 4)
        flags |= IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    if (profile->send_invalidate)
        flags |= IBV_DEVICE_MEM_MGT_EXTENSIONS;
    return flags;
}

static void device_describe(const struct fabric_device *device, struct ibv_device_attr *attr)
{
    const struct fabric_profile *profile = &fabric_profile;
    int64_t resources = (int64_t)profile->max_qp * profile->max_qp_rd_atom;
    int64_t attached = (int64_t)profile->max_mcast_grp * profile->max_mcast_qp_attach;

    memset(attr, 0, sizeof(*attr));
    memcpy(attr->fw_ver, profile->firmware, sizeof(profile->firmware));
    attr->node_guid = device->guid;
    attr->sys_image_guid = device->guid;
    attr->max_mr_size = (uint64_t)profile->max_mr_size;
    attr->page_size_cap = (uint32_t)profile->page_sizes;
    attr->vendor_id = (uint32_t)profile->vendor_id;
    attr->vendor_part_id = (uint32_t)profile->vendor_part_id;
    attr->hw_ver = (uint32_t)profile->hw_ver;
    attr->max_qp = profile->max_qp;
    attr->max_qp_wr = profile->max_qp_wr;
    attr->device_cap_flags = capabilities();
    attr->max_sge = profile->max_sge;
    attr->max_sge_rd = profile->max_sge_rd;
    attr->max_cq = profile->max_cq;
    attr->max_cqe = profile->max_cqe;
    attr->max_mr = profile->max_mr;
    attr->max_pd = profile->max_pd;
    attr->max_qp_rd_atom = profile->max_qp_rd_atom;
    attr->max_res_rd_atom = resources > INT_MAX ? INT_MAX : (int)resources;
    attr->max_qp_init_rd_atom = profile->max_qp_init_rd_atom;
    attr->atomic_cap = (enum ibv_atomic_cap)profile->atomics;
    attr->max_mw = profile->windows ? profile->max_mw : 0;
    attr->max_mcast_grp = profile->iwarp ? 0 : profile->max_mcast_grp;
    attr->max_mcast_qp_attach = profile->iwarp ? 0 : profile->max_mcast_qp_attach;
    if (!profile->iwarp)
        attr->max_total_mcast_qp_attach = attached > INT_MAX ? INT_MAX : (int)attached;
    attr->max_ah = profile->iwarp ? 0 : profile->max_ah;
    attr->max_srq = profile->srq ? profile->max_srq : 0;
    attr->max_srq_wr = profile->srq ? profile->max_srq_wr : 0;
    attr->max_srq_sge = profile->srq ? profile->max_srq_sge : 0;
    attr->max_pkeys = (uint16_t)profile->max_pkeys;
    attr->local_ca_ack_delay = (uint8_t)profile->ack_delay;
    attr->phys_port_cnt = 1;
}

FABRIC_API int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    int error = 0;

    fabric_lock();
    if (fabric_fails("ibv_query_device"))
        error = errno;
    else
        device_describe(fabric_context(context)->device, attr);
    fabric_unlock();
    return error;
}

static void odp_describe(struct ibv_odp_caps *caps)
{
    uint32_t datagrams = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
    uint32_t one_sided = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;

    if (!fabric_profile.on_demand)
        return;
    caps->general_caps = IBV_ODP_SUPPORT;
    caps->per_transport_caps.rc_odp_caps = datagrams | one_sided;
    if (fabric_profile.atomics)
        caps->per_transport_caps.rc_odp_caps |= IBV_ODP_SUPPORT_ATOMIC;
    if (fabric_profile.srq)
        caps->per_transport_caps.rc_odp_caps |= IBV_ODP_SUPPORT_SRQ_RECV;
    caps->per_transport_caps.ud_odp_caps = datagrams;
}

/* A program of an older or newer header gives the size of its own struct. */
int fabric_query_device_ex(struct ibv_context *context,
                           const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size)
{
    struct ibv_device_attr_ex full = {.comp_mask = 0};
    int error = 0;

    if (input && input->comp_mask)
        return EINVAL;
    if (size < sizeof(full.orig_attr))
        return EINVAL;
    fabric_lock();
    if (fabric_fails("ibv_query_device"))
        error = errno;
    else
        device_describe(fabric_context(context)->device, &full.orig_attr);
    fabric_unlock();
    if (error)
        return error;
    odp_describe(&full.odp_caps);
    if (fabric_profile.timestamps) {
        full.completion_timestamp_mask = UINT64_MAX;
        full.hca_core_clock = 1000 * 1000; /* kHz: nanoseconds */
    }
    full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
    full.phys_port_cnt_ex = full.orig_attr.phys_port_cnt;
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

/*
 * All of the clock is in tv_nsec, as with the adapters that have one: a program that reads only
 * that member gets it whole, and so does one that adds both.
 */
int fabric_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    uint32_t wanted = values->comp_mask;

    if (wanted & ~(uint32_t)IBV_VALUES_MASK_RAW_CLOCK)
        return EINVAL;
    if (wanted & IBV_VALUES_MASK_RAW_CLOCK) {
        fabric_lock();
        values->raw_clock.tv_sec = 0;
        values->raw_clock.tv_nsec = (long)fabric_now();
        fabric_unlock();
    }
    return 0;
}

/* ---- what a port is -------------------------------------------------------------------------- */

static enum ibv_mtu mtu_of(int bytes)
{
    enum ibv_mtu mtu = IBV_MTU_256;

    while (128 << mtu < bytes && mtu < IBV_MTU_4096)
        mtu++;
    return mtu;
}

static bool is_up(const struct fabric_device *device)
{
    return device->state == IBV_PORT_ACTIVE;
}

static void port_describe(const struct fabric_device *device, struct ibv_port_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    attr->state = device->state;
    attr->max_mtu = IBV_MTU_4096;
    attr->active_mtu = mtu_of(fabric_profile.mtu);
    attr->gid_tbl_len = (int)fabric_gid_table_length();
    attr->port_cap_flags = IBV_PORT_CM_SUP;
    attr->max_msg_sz = 1u << MESSAGE_LOG;
    attr->pkey_tbl_len = (uint16_t)fabric_pkey_table_length();
    attr->lid = device->lid;
    attr->active_width = WIDTH_4X;
    attr->active_speed = SPEED_EDR;
    attr->phys_state = is_up(device) ? PHYSICALLY_UP : PHYSICALLY_DOWN;
    if (fabric_profile.infiniband_link) {
        attr->link_layer = IBV_LINK_LAYER_INFINIBAND;
        attr->sm_lid = 1;
        attr->max_vl_num = 1;
        attr->subnet_timeout = TIMEOUT_OF_SUBNET;
        return;
    }
    attr->link_layer = IBV_LINK_LAYER_ETHERNET;
    if (!fabric_profile.iwarp) {
        attr->port_cap_flags |= IBV_PORT_IP_BASED_GIDS;
        attr->flags = IBV_QPF_GRH_REQUIRED;
    }
}

int fabric_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                      size_t size)
{
    struct ibv_port_attr full;
    int error = 0;

    if (port != 1)
        return EINVAL;
    fabric_lock();
    if (fabric_fails("ibv_query_port"))
        error = errno;
    else
        port_describe(fabric_context(context)->device, &full);
    fabric_unlock();
    if (error)
        return error;
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

/* Programs of old headers call this one: their struct ends before the first of the new members. */
FABRIC_API int ibv_query_port(struct ibv_context *context, uint8_t port,
                              struct _compat_ibv_port_attr *attr)
{
    return fabric_query_port(context, port, (struct ibv_port_attr *)attr,
                             offsetof(struct ibv_port_attr, port_cap_flags2));
}

/* ---- tables of a port ------------------------------------------------------------------------ */

/* 0, or an errno. ENODATA: the table has the place, and nothing there. */
static int gid_find(struct ibv_context *context, uint32_t port, uint32_t index,
                    const struct fabric_gid **found)
{
    if (port != 1 || index >= fabric_gid_table_length())
        return EINVAL;
    *found = &fabric_context(context)->device->gids[index];
    return (*found)->used ? 0 : ENODATA;
}

FABRIC_API int ibv_query_gid(struct ibv_context *context, uint8_t port, int index,
                             union ibv_gid *gid)
{
    const struct fabric_gid *found = NULL;
    int error;

    fabric_lock();
    error =
        fabric_fails("ibv_query_gid") ? errno : gid_find(context, port, (uint32_t)index, &found);
    /* This call is older than ENODATA: a place without a GID reads as zeros. */
    if (!error || error == ENODATA)
        *gid = error ? (union ibv_gid){.raw = {0}} : found->gid;
    fabric_unlock();
    if (!error || error == ENODATA)
        return 0;
    errno = error;
    return -1;
}

static void entry_copy(const struct fabric_gid *from, uint32_t index, void *into, size_t size)
{
    /* No network device of the kernel's belongs to it: ndev_ifindex is 0. */
    struct ibv_gid_entry entry = {
        .gid = from->gid, .gid_index = index, .port_num = 1, .gid_type = (uint32_t)from->type};

    memset(into, 0, size);
    memcpy(into, &entry, size < sizeof(entry) ? size : sizeof(entry));
}

FABRIC_API int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                                 struct ibv_gid_entry *entry, uint32_t flags, size_t size)
{
    const struct fabric_gid *found = NULL;
    int error;

    if (flags)
        return EINVAL;
    fabric_lock();
    error = fabric_fails("ibv_query_gid_ex") ? errno : gid_find(context, port, index, &found);
    if (!error)
        entry_copy(found, index, entry, size);
    fabric_unlock();
    return error;
}

FABRIC_API ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                                        size_t room, uint32_t flags, size_t size)
{
    const struct fabric_device *device = fabric_context(context)->device;
    size_t count = 0;
    uint32_t i;

    if (flags || !size)
        return -EINVAL;
    fabric_lock();
    if (fabric_fails("ibv_query_gid_table")) {
        count = (size_t)errno;
        fabric_unlock();
        return -(ssize_t)count;
    }
    for (i = 0; i < FABRIC_GIDS; i++)
        count += device->gids[i].used;
    if (count > room) {
        fabric_unlock();
        return -EINVAL;
    }
    for (i = 0, count = 0; i < FABRIC_GIDS; i++)
        if (device->gids[i].used)
            entry_copy(&device->gids[i], i, (char *)entries + size * count++, size);
    fabric_unlock();
    return (ssize_t)count;
}

/* Between rdma-core's own parts; its numbers are sysfs's, in which IB and RoCE v1 are one. */
FABRIC_API int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index,
                                  int *type)
{
    const struct fabric_gid *found = NULL;
    int error;

    fabric_lock();
    error = gid_find(context, port, index, &found);
    if (!error || error == ENODATA)
        *type = !error && found->type == IBV_GID_TYPE_ROCE_V2;
    fabric_unlock();
    if (!error || error == ENODATA)
        return 0;
    errno = error;
    return -1;
}
FABRIC_PRIVATE(ibv_query_gid_type);

/* Of a full member of the default partition; the rest of the table is empty. */
static __be16 pkey_at(unsigned index)
{
    return htobe16(index ? 0 : DEFAULT_PKEY);
}

FABRIC_API int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    bool fails;

    fabric_lock();
    fails = fabric_fails("ibv_query_pkey");
    fabric_unlock();
    if (fails)
        return -1;
    if (port != 1 || index < 0 || (unsigned)index >= fabric_pkey_table_length()) {
        errno = EINVAL;
        return -1;
    }
    *pkey = pkey_at((unsigned)index);
    return 0;
}

FABRIC_API int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
    unsigned i;

    for (i = 0; port == 1 && i < fabric_pkey_table_length(); i++)
        if (pkey_at(i) == pkey)
            return (int)i;
    errno = EINVAL;
    return -1;
}

/* ---- sysfs ----------------------------------------------------------------------------------- */

FABRIC_API const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

static int print_guid(char *into, size_t size, const uint8_t bytes[8])
{
    return snprintf(into, size, "%02x%02x:%02x%02x:%02x%02x:%02x%02x", bytes[0], bytes[1], bytes[2],
                    bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]);
}

/* A file of a table: its number is at the end of the name. -1 and errno. */
static int print_entry(const struct fabric_device *device, const char *file, char *into,
                       size_t size)
{
    unsigned index;
    int end = 0;

    if (sscanf(file, "ports/1/gids/%u%n", &index, &end) == 1 && !file[end]) {
        char first[24];

        if (index >= fabric_gid_table_length())
            goto none;
        print_guid(first, sizeof(first), &device->gids[index].gid.raw[0]);
        return snprintf(into, size, "%s:%02x%02x:%02x%02x:%02x%02x:%02x%02x", first,
                        device->gids[index].gid.raw[8], device->gids[index].gid.raw[9],
                        device->gids[index].gid.raw[10], device->gids[index].gid.raw[11],
                        device->gids[index].gid.raw[12], device->gids[index].gid.raw[13],
                        device->gids[index].gid.raw[14], device->gids[index].gid.raw[15]);
    }
    if (sscanf(file, "ports/1/gid_attrs/types/%u%n", &index, &end) == 1 && !file[end]) {
        if (index >= fabric_gid_table_length())
            goto none;
        if (!device->gids[index].used) {
            errno = EINVAL; /* as reading that file of the kernel's fails */
            return -1;
        }
        return snprintf(into, size, "%s",
                        device->gids[index].type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2"
                                                                         : "IB/RoCE v1");
    }
    if (sscanf(file, "ports/1/pkeys/%u%n", &index, &end) == 1 && !file[end] &&
        index < fabric_pkey_table_length())
        return snprintf(into, size, "0x%04x", be16toh(pkey_at(index)));
none:
    errno = ENOENT;
    return -1;
}

/* As snprintf(); -1 and errno. */
static int print_file(const struct fabric_device *device, const char *file, char *into, size_t size)
{
    const struct fabric_profile *profile = &fabric_profile;
    struct ibv_port_attr port;

    port_describe(device, &port);
    if (!strcmp(file, "node_type"))
        return snprintf(into, size, profile->iwarp ? "4: RNIC" : "1: CA");
    if (!strcmp(file, "node_guid") || !strcmp(file, "sys_image_guid"))
        return print_guid(into, size, (const uint8_t *)&device->guid);
    if (!strcmp(file, "node_desc"))
        return snprintf(into, size, "%s", device->ibv.name);
    if (!strcmp(file, "fw_ver"))
        return snprintf(into, size, "%s", profile->firmware);
    if (!strcmp(file, "hw_rev"))
        return snprintf(into, size, "0x%x", (unsigned)profile->hw_ver);
    if (!strcmp(file, "ibdev"))
        return snprintf(into, size, "%s", device->ibv.name);
    if (!strcmp(file, "abi_version"))
        return snprintf(into, size, "1");
    if (!strcmp(file, "ports/1/state"))
        return snprintf(into, size, is_up(device) ? "4: ACTIVE" : "1: DOWN");
    if (!strcmp(file, "ports/1/phys_state"))
        return snprintf(into, size, is_up(device) ? "5: LinkUp" : "3: Disabled");
    if (!strcmp(file, "ports/1/link_layer"))
        return snprintf(into, size, profile->infiniband_link ? "InfiniBand" : "Ethernet");
    if (!strcmp(file, "ports/1/rate"))
        return snprintf(into, size, "100 Gb/sec (4X EDR)");
    if (!strcmp(file, "ports/1/lid"))
        return snprintf(into, size, "0x%x", port.lid);
    if (!strcmp(file, "ports/1/lid_mask_count"))
        return snprintf(into, size, "%d", port.lmc);
    if (!strcmp(file, "ports/1/sm_lid"))
        return snprintf(into, size, "0x%x", port.sm_lid);
    if (!strcmp(file, "ports/1/sm_sl"))
        return snprintf(into, size, "%d", port.sm_sl);
    if (!strcmp(file, "ports/1/cap_mask"))
        return snprintf(into, size, "0x%08x", port.port_cap_flags);
    return print_entry(device, file, into, size);
}

/* What of a path is below a folder; NULL: it is elsewhere. */
static const char *below(const char *path, const char *folder)
{
    size_t length = strlen(folder);

    return !strncmp(path, folder, length) && path[length] == '/' ? path + length + 1 : NULL;
}

static int read_real(const char *path, char *into, size_t size)
{
    FILE *file = fopen(path, "re");
    size_t length;
    bool failed;

    if (!file)
        return -1;
    length = fread(into, 1, size, file);
    failed = ferror(file);
    fclose(file);
    return failed ? -1 : (int)length;
}

/* Its length, without the newline at the end; -1 and errno. A zero follows if there is room. */
FABRIC_API int ibv_read_sysfs_file(const char *folder, const char *name, char *into, size_t size)
{
    const char *file = NULL;
    unsigned number;
    int length = -1;
    char *path;

    if (asprintf(&path, "%s/%s", folder, name) < 0)
        return -1;
    fabric_lock();
    for (number = 0; number < fabric_device_count() && !file; number++) {
        struct fabric_device *device = fabric_device(number);

        file = below(path, device->ibv.ibdev_path);
        if (!file)
            file = below(path, device->ibv.dev_path);
        if (file)
            length = print_file(device, file, into, size);
    }
    fabric_unlock();
    if (!file)
        length = read_real(path, into, size);
    free(path);
    if (length > (int)size)
        length = (int)size;
    if (length > 0 && into[length - 1] == '\n')
        length--;
    if (length >= 0 && (size_t)length < size)
        into[length] = '\0';
    return length;
}
