/* A plugin of QEMU's that counts the bytes that the processor loads and stores; moved.py reads what
 * it writes.
 *
 * At MARK_STOP (plugin.h) a line with four numbers is written: bytes that programs have loaded and
 * stored since MARK_START, and bytes that the kernel has.  All programs and the kernel are one count
 * each: there is one CPU.  At MARK_JOB a line with nothing is written.
 *
 * A repeated string instruction, and one with a vector register, is one access for each of its
 * steps, so that the bytes are those that the instruction moves.
 */

#include "plugin.h"

/* Linux gives programs the lower half. */
static const uint64_t KERNEL = (uint64_t)1 << 63;

struct count {
    uint64_t loaded, stored;
};

static struct count programs, kernel;

static void marked(unsigned int cpu, void *data)
{
    (void)cpu;
    switch ((uintptr_t)data) {
    case MARK_START:
        programs = kernel = (struct count){0};
        return;
    case MARK_JOB:
        fputs("\n", output);
        break;
    case MARK_STOP:
        fprintf(output, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", programs.loaded,
                programs.stored, kernel.loaded, kernel.stored);
        break;
    }
    fflush(output);
}

static void accessed(unsigned int cpu, qemu_plugin_meminfo_t info, uint64_t vaddr, void *data)
{
    (void)cpu, (void)vaddr;
    struct count *count = data;
    *(qemu_plugin_mem_is_store(info) ? &count->stored : &count->loaded) +=
        (uint64_t)1 << qemu_plugin_mem_size_shift(info);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        struct count *count = qemu_plugin_insn_vaddr(insn) < KERNEL ? &programs : &kernel;
        qemu_plugin_register_vcpu_mem_cb(insn, accessed, QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_MEM_RW,
                                         count);
        call_if_mark(insn, marked);
    }
}
