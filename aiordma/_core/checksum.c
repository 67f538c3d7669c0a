/*
 * CRC32C (Castagnoli): the checksum of large messages, as iSCSI has it (RFC 3720, B.4).
 *
 * The processor's instruction takes 8 bytes.  Its result is ready after three cycles, but another
 * sum can begin in each of them.  So three adjacent blocks are summed side by side, which is three
 * times as fast (27 GB/s, where one chain reaches 9), and then joined.  Joining needs to know what
 * a sum becomes when a block of zeros follows: a linear map, for which there is a table.  Without
 * the instruction, such tables do all the work, for eight bytes at a time.
 */
#include "core.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define AIO_CRC_TARGET       __attribute__((target("sse4.2")))
#define AIO_CRC_8(crc, word) _mm_crc32_u64(crc, word)
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define AIO_CRC_TARGET       __attribute__((target("+crc")))
#define AIO_CRC_8(crc, word) __crc32cd((uint32_t)crc, word)
#endif

#define AIO_CRC_BLOCK 4096

/* The sum after so many zero bytes, by each byte of the sum before. */
static uint32_t crc_after_4[4][256], crc_after_8[4][256], crc_after_block[4][256];
static int crc_has_instruction;

static inline uint32_t crc_look_up(uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 0xFF] ^ table[1][crc >> 8 & 0xFF] ^ table[2][crc >> 16 & 0xFF] ^
           table[3][crc >> 24];
}

/* Fill a table: bit by bit for 4 zeros, and by that table for more. */
static void crc_fill(uint32_t table[4][256], int zeros)
{
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = UINT32_C(1) << bit, *row = table[bit / 8], place = 1u << bit % 8;

        for (int n = 0; zeros == 4 && n < 32; n++)
            crc = crc & 1 ? crc >> 1 ^ 0x82F63B78 : crc >> 1; /* the polynomial, reflected */
        for (int n = 0; zeros > 4 && n < zeros; n += 4)
            crc = crc_look_up(crc_after_4, crc);
        for (uint32_t value = place; value < 2 * place; value++)
            row[value] = row[value - place] ^ crc;
    }
}

/*
 * Once, when the module is loaded.  Not by pthread_once: glibc 2.34 gave it a new version, and a
 * wheel that is built there would not load where glibc is older.
 */
void aio_prepare_checksum(void)
{
    crc_fill(crc_after_4, 4);
    crc_fill(crc_after_8, 8);
    crc_fill(crc_after_block, AIO_CRC_BLOCK);
#if defined(__x86_64__)
    crc_has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
    crc_has_instruction = getauxval(AT_HWCAP) >> 7 & 1; /* HWCAP_CRC32 */
#endif
}

static inline uint32_t crc_word(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint32_t crc_by_tables(uint32_t crc, const uint8_t *at, uint64_t length)
{
    for (; length >= 8; at += 8, length -= 8)
        crc = crc_look_up(crc_after_8, crc ^ crc_word(at)) ^
              crc_look_up(crc_after_4, crc_word(at + 4));
    for (; length; at++, length--)
        crc = crc >> 8 ^ crc_after_4[3][(crc ^ *at) & 0xFF];
    return crc;
}

#ifdef AIO_CRC_8
/* The sum has 32 bits; the compiler does not know that, and would cut it after each step. */
AIO_CRC_TARGET static inline uint64_t crc_8(uint64_t crc, const uint8_t *at)
{
    uint64_t word;

    memcpy(&word, at, sizeof(word));
    return AIO_CRC_8(crc, word);
}

AIO_CRC_TARGET static uint32_t crc_by_instruction(uint32_t before, const uint8_t *at,
                                                  uint64_t length)
{
    uint64_t crc = before;

    for (; length >= 3 * AIO_CRC_BLOCK; at += 2 * AIO_CRC_BLOCK, length -= 3 * AIO_CRC_BLOCK) {
        uint64_t second = 0, third = 0;

#pragma GCC unroll 8
        for (const uint8_t *end = at + AIO_CRC_BLOCK; at < end; at += 8) {
            crc = crc_8(crc, at);
            second = crc_8(second, at + AIO_CRC_BLOCK);
            third = crc_8(third, at + 2 * AIO_CRC_BLOCK);
        }
        crc = crc_look_up(crc_after_block, (uint32_t)crc) ^ second;
        crc = crc_look_up(crc_after_block, (uint32_t)crc) ^ third;
    }
    for (; length >= 8; at += 8, length -= 8)
        crc = crc_8(crc, at);
    return crc_by_tables((uint32_t)crc, at, length); /* fewer than 8 bytes */
}
#endif

static uint32_t crc_sum(uint32_t crc, const uint8_t *data, uint64_t length)
{
#ifdef AIO_CRC_8
    if (crc_has_instruction)
        return crc_by_instruction(crc, data, length);
#endif
    return crc_by_tables(crc, data, length);
}

/* For Python; releases the interpreter lock, as large messages take milliseconds. */

static PyObject *crc_of(PyObject *args, uint32_t (*sum)(uint32_t, const uint8_t *, uint64_t))
{
    unsigned int crc;
    Py_buffer data;

    if (!PyArg_ParseTuple(args, "Iy*", &crc, &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = ~sum(~crc, data.buf, (uint64_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *module_crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    return crc_of(args, crc_sum);
}

static PyObject *module_crc32c_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    return crc_of(args, crc_by_tables);
}

static PyObject *module_crc32c_hardware(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(crc_has_instruction);
}

/* copy(to, from): memcpy of as many bytes as `from` has. */
static PyObject *module_copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer to, from;

    if (!PyArg_ParseTuple(args, "w*y*", &to, &from))
        return NULL;
    if (to.len < from.len) {
        PyErr_SetString(PyExc_ValueError, "more bytes than there is room for");
    } else {
        Py_BEGIN_ALLOW_THREADS
        memcpy(to.buf, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyMethodDef aio_checksum_functions[] = {
    {"crc32c", module_crc32c, METH_VARARGS,
     "CRC32C of what came before (0: nothing) and a buffer."},
    {"crc32c_table", module_crc32c_table, METH_VARARGS, "The same, without the instruction."},
    {"crc32c_hardware", module_crc32c_hardware, METH_NOARGS,
     "Whether the processor has the instruction."},
    {"copy", module_copy, METH_VARARGS, "Copy a buffer into another one, without the lock."},
    {NULL, NULL, 0, NULL},
};
