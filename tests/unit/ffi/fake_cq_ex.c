/*
 * An extended completion queue without a device: three completions, the second of them failed,
 * with a timestamp and all other fields.  It stops at the second call of start_poll after the last
 * completion with an error of its own.
 */

#include <errno.h>
#include <infiniband/verbs.h>

enum { COUNT = 3 };
static int taken, starts_at_the_end, misread;
static uint64_t fields;

static int start(struct ibv_cq_ex *queue, struct ibv_poll_cq_attr *attr)
{
    (void)attr;
    if (taken == COUNT)
        return starts_at_the_end++ ? EIO : ENOENT;
    queue->wr_id = 100u + (unsigned int)taken;
    queue->status = taken == 1 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS;
    return 0;
}

/* As the driver of Soft-RoCE in rdma-core 44: the end of the poll then takes one too many. */
static int next(struct ibv_cq_ex *queue)
{
    (void)queue;
    taken++;
    return ENOENT;
}

static void end(struct ibv_cq_ex *queue)
{
    (void)queue;
    taken++;
}

/* A driver leaves the function of a field that was not asked for unset. */
static uint64_t asked(uint64_t field, uint64_t value)
{
    misread += !(fields & field);
    return value;
}

#define FIELD(type, name, value)                                                                   \
    static type name(struct ibv_cq_ex *queue)                                                      \
    {                                                                                              \
        (void)queue;                                                                               \
        return (type)(value);                                                                      \
    }

FIELD(enum ibv_wc_opcode, opcode, IBV_WC_RECV)
FIELD(uint32_t, vendor_err, 77)
FIELD(uint32_t, byte_len, 4096)
FIELD(__be32, imm_data, 0x01020304)
FIELD(uint32_t, qp_num, 17)
FIELD(uint32_t, src_qp, 18)
FIELD(unsigned int, wc_flags, IBV_WC_WITH_IMM)
FIELD(uint32_t, slid, 19)
FIELD(uint8_t, sl, 2)
FIELD(uint8_t, path_bits, 3)
FIELD(uint64_t, timestamp, asked(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, 0x1122334455667788u + (unsigned int)taken))
FIELD(uint16_t, cvlan, asked(IBV_WC_EX_WITH_CVLAN, 42))
FIELD(uint32_t, flow_tag, asked(IBV_WC_EX_WITH_FLOW_TAG, 43))
FIELD(uint64_t, wallclock, asked(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, 1700000000000000000u + (unsigned int)taken))

static struct ibv_cq_ex queue = {
    .start_poll = start,
    .next_poll = next,
    .end_poll = end,
    .read_opcode = opcode,
    .read_vendor_err = vendor_err,
    .read_byte_len = byte_len,
    .read_imm_data = imm_data,
    .read_qp_num = qp_num,
    .read_src_qp = src_qp,
    .read_wc_flags = wc_flags,
    .read_slid = slid,
    .read_sl = sl,
    .read_dlid_path_bits = path_bits,
    .read_completion_ts = timestamp,
    .read_cvlan = cvlan,
    .read_flow_tag = flow_tag,
    .read_completion_wallclock_ns = wallclock,
};

struct ibv_cq_ex *made(uint64_t wanted)
{
    taken = starts_at_the_end = misread = 0;
    fields = wanted;
    return &queue;
}

int misreads(void)
{
    return misread;
}
