/* What plugins of QEMU's have in common: the interface, the marks of marks.h, and their output.
 *
 * Three instructions that do nothing, NOPs with a displacement that no compiler makes, tell a plugin
 * what to count (marks.c executes them):
 *
 *   MARK_START  all counts are zero from here
 *   MARK_STOP   the counts are written
 *   MARK_JOB    what follows belongs to the next program
 *
 * Debian has no package with QEMU's header for plugins; the few declarations here are those of
 * version 1 of that interface, which QEMU 7.2 has.
 */

#ifndef PLUGIN_H
#define PLUGIN_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "marks.h"

#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info; /* not looked at */
enum { QEMU_PLUGIN_INLINE_ADD_U64 = 0, QEMU_PLUGIN_CB_NO_REGS = 0, QEMU_PLUGIN_MEM_RW = 3 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*callback)(qemu_plugin_id_t id,
                                                            struct qemu_plugin_tb *tb));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *insn, int operation,
                                                void *pointer, uint64_t value);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn,
                                            void (*callback)(unsigned int cpu, void *data),
                                            int flags, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn,
                                      void (*callback)(unsigned int cpu,
                                                       qemu_plugin_meminfo_t info, uint64_t vaddr,
                                                       void *data),
                                      int flags, int kinds, void *data);
unsigned int qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t info);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info);

EXPORTED int qemu_plugin_version = 1;

/* The file of the plugin's argument out=FILE. */
static FILE *output;
/* Of each plugin: called with each block of instructions that QEMU translates. */
static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);

/* Calls `marked`, with the kind of the mark as its data, whenever the guest executes `insn`, if that
 * is a mark. */
static inline void call_if_mark(struct qemu_plugin_insn *insn,
                                void (*marked)(unsigned int cpu, void *data))
{
    static const unsigned char mark[] = {MARK_BYTES(0)};
    unsigned char bytes[sizeof mark];
    if (qemu_plugin_insn_size(insn) != sizeof mark)
        return;
    memcpy(bytes, qemu_plugin_insn_data(insn), sizeof bytes);
    uintptr_t kind = bytes[MARK_PLACE];
    bytes[MARK_PLACE] = 0;
    if (memcmp(bytes, mark, sizeof mark) == 0)
        qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, QEMU_PLUGIN_CB_NO_REGS, (void *)kind);
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info *info, int count,
                                 char **words)
{
    (void)info;
    static const char name[] = "out=";
    for (int i = 0; i < count; i++)
        if (strncmp(words[i], name, strlen(name)) == 0)
            output = fopen(words[i] + strlen(name), "wb");
    if (output == NULL) {
        perror("plugin: out=FILE");
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}

#endif
