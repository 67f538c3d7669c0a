/* A plugin of QEMU's that counts every instruction, by its address; profile.py reads what it
 * writes.
 *
 * At MARK_STOP (plugin.h) 'S', how many counts there are, and pairs of address and count are
 * written; at MARK_JOB 'J' and 0.
 *
 * All numbers have 64 bits.  Addresses are virtual: what tells one process from another is that
 * they have different maps, or the same program.
 *
 * With -icount a repeated string instruction is translated to run once for each repetition, so that
 * the counts are those that the guest's clock is made of.
 */

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

struct counter {
    uint64_t address;
    uint64_t count;
};

/* Translated code has the address of a counter in it: counters never move, and are never freed. */
enum { CHUNK = 1 << 16 };
static struct counter **chunks;
static size_t used;
/* Where the counter of an address is: its number plus 1, or 0. */
static uint32_t *table;
static size_t table_size;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static struct counter *counter_at(size_t number)
{
    return &chunks[number / CHUNK][number % CHUNK];
}

static size_t place(uint64_t address)
{
    size_t at = (size_t)(address * 0x9E3779B97F4A7C15u) & (table_size - 1);
    while (table[at] != 0 && counter_at(table[at] - 1)->address != address)
        at = (at + 1) & (table_size - 1);
    return at;
}

static void grow(void)
{
    free(table);
    table_size = table_size != 0 ? 2 * table_size : 1 << 20;
    table = calloc(table_size, sizeof *table);
    if (table == NULL)
        fail("instructions: no memory");
    for (size_t number = 0; number < used; number++)
        table[place(counter_at(number)->address)] = (uint32_t)(number + 1);
}

static struct counter *counter_of(uint64_t address)
{
    if (2 * used >= table_size)
        grow();
    size_t at = place(address);
    if (table[at] == 0) {
        if (used % CHUNK == 0) {
            chunks = realloc(chunks, (used / CHUNK + 1) * sizeof(struct counter *));
            if (chunks == NULL || (chunks[used / CHUNK] = calloc(CHUNK, sizeof **chunks)) == NULL)
                fail("instructions: no memory");
        }
        counter_at(used)->address = address;
        table[at] = (uint32_t)++used;
    }
    return counter_at(table[at] - 1);
}

static void write_all(const void *data, size_t size)
{
    if (fwrite(data, 1, size, output) != size)
        fail("instructions: cannot write");
}

static void head(uint64_t kind, uint64_t number)
{
    uint64_t words[2] = {kind, number};
    write_all(words, sizeof words);
}

static void marked(unsigned int cpu, void *data)
{
    (void)cpu;
    size_t number = 0;
    switch ((uintptr_t)data) {
    case MARK_START:
        for (size_t i = 0; i < used; i++)
            counter_at(i)->count = 0;
        return;
    case MARK_JOB:
        head('J', 0);
        break;
    case MARK_STOP:
        for (size_t i = 0; i < used; i++)
            number += counter_at(i)->count != 0;
        head('S', number);
        for (size_t i = 0; i < used; i++)
            if (counter_at(i)->count != 0)
                write_all(counter_at(i), sizeof(struct counter));
        break;
    }
    if (fflush(output) != 0)
        fail("instructions: cannot write");
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(tb); i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        struct counter *counter = counter_of(qemu_plugin_insn_vaddr(insn));
        qemu_plugin_register_vcpu_insn_exec_inline(insn, QEMU_PLUGIN_INLINE_ADD_U64,
                                                   &counter->count, 1);
        call_if_mark(insn, marked);
    }
}
