/*
 * CRC32C (Castagnoli): the checksum of large messages, as iSCSI has it (RFC 3720, B.4).
 *
 * The processor's instruction takes 8 bytes, and its result is there after three cycles; a new sum
 * can begin in each.  So three blocks that lie one behind the other are summed at a time, and then
 * combined: to shift a sum over the bytes of a block is a linear map, for which there are tables. A
 * processor without the instruction has eight tables, for eight bytes at a time.
 */
#include "core.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

#define AIO_CRC_POLY  0x82F63B78u /* bits reflected */
#define AIO_CRC_LONG  8192        /* bytes of a block; a power of two, as the next */
#define AIO_CRC_SHORT 256

#if defined(__x86_64__) || defined(__aarch64__)
#define AIO_CRC_INSTRUCTION 1
#else
#define AIO_CRC_INSTRUCTION 0
#endif

static struct {
    int hardware;
    uint32_t bytes[8][256]; /* sum of a byte with so many zeros behind it */
    uint32_t over_long[4][256];
    uint32_t over_short[4][256];
} aio_crc;

/* Product of two polynomials modulo the one of the sum; a is not 0. */
static uint32_t aio_crc_times(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (uint32_t bit = 1u << 31;; bit >>= 1) {
        if (a & bit) {
            product ^= b;
            if (!(a & (bit - 1)))
                return product;
        }
        b = b & 1 ? b >> 1 ^ AIO_CRC_POLY : b >> 1;
    }
}

/* Fill the tables that shift a sum over `bytes` bytes, a power of two. */
static void aio_crc_shifts(uint32_t table[4][256], uint32_t bytes)
{
    uint32_t power = 1u << 30; /* x */

    for (uint32_t bits = 1; bits < 8 * bytes; bits *= 2)
        power = aio_crc_times(power, power);
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 0; b < 256; b++)
            table[k][b] = aio_crc_times(power, b << 8 * k);
}

/*
 * Fill the tables, once, when the module is loaded.  Not by pthread_once: glibc 2.34 gave it a new
 * version, and a wheel that is built there would not load where glibc is older.
 */
void aio_prepare_checksum(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;

        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ AIO_CRC_POLY : crc >> 1;
        aio_crc.bytes[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t before = aio_crc.bytes[k - 1][b];

            aio_crc.bytes[k][b] = before >> 8 ^ aio_crc.bytes[0][before & 0xFF];
        }
    aio_crc_shifts(aio_crc.over_long, AIO_CRC_LONG);
    aio_crc_shifts(aio_crc.over_short, AIO_CRC_SHORT);
#if defined(__x86_64__)
    aio_crc.hardware = !!__builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
    aio_crc.hardware = !!(getauxval(AT_HWCAP) & HWCAP_CRC32);
#endif
}

static uint32_t aio_crc_by_table(uint32_t crc, const uint8_t *at, uint64_t length)
{
    for (; length >= 8; at += 8, length -= 8) {
        crc ^=
            (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        crc = aio_crc.bytes[7][crc & 0xFF] ^ aio_crc.bytes[6][crc >> 8 & 0xFF] ^
              aio_crc.bytes[5][crc >> 16 & 0xFF] ^ aio_crc.bytes[4][crc >> 24] ^
              aio_crc.bytes[3][at[4]] ^ aio_crc.bytes[2][at[5]] ^ aio_crc.bytes[1][at[6]] ^
              aio_crc.bytes[0][at[7]];
    }
    for (; length; at++, length--)
        crc = crc >> 8 ^ aio_crc.bytes[0][(crc ^ *at) & 0xFF];
    return crc;
}

#if AIO_CRC_INSTRUCTION
/*
 * In assembly, so that no file needs options that the rest must not have.  The instruction of
 * x86-64 reads memory by itself.
 */
static inline uint64_t aio_crc_8(uint64_t crc, const uint8_t *at)
{
#if defined(__x86_64__)
    __asm__("crc32q %1, %0" : "+r"(crc) : "m"(*(const uint8_t (*)[8])at));
#else
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(value));
#endif
    return crc;
}

static inline uint64_t aio_crc_1(uint64_t crc, uint8_t value)
{
#if defined(__x86_64__)
    __asm__("crc32b %b1, %0" : "+r"(crc) : "q"(value));
#else
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(value));
#endif
    return crc;
}

static inline uint64_t aio_crc_over(uint32_t table[4][256], uint64_t crc)
{
    return table[0][crc & 0xFF] ^ table[1][crc >> 8 & 0xFF] ^ table[2][crc >> 16 & 0xFF] ^
           table[3][crc >> 24 & 0xFF];
}

static uint32_t aio_crc_by_instruction(uint32_t before, const uint8_t *at, uint64_t length)
{
    static const uint32_t sizes[] = {AIO_CRC_LONG, AIO_CRC_SHORT};
    uint64_t crc = before;

    for (; length && ((uintptr_t)at & 7); at++, length--)
        crc = aio_crc_1(crc, *at);
    for (int k = 0; k < 2; k++) {
        const uint32_t size = sizes[k];
        uint32_t (*over)[256] = k ? aio_crc.over_short : aio_crc.over_long;

        for (; length >= 3 * (uint64_t)size;
             at += 2 * (uint64_t)size, length -= 3 * (uint64_t)size) {
            uint64_t second = 0, third = 0;

            for (const uint8_t *end = at + size; at < end; at += 64) {
#pragma GCC unroll 8
                for (int i = 0; i < 64; i += 8) {
                    crc = aio_crc_8(crc, at + i);
                    second = aio_crc_8(second, at + size + i);
                    third = aio_crc_8(third, at + 2 * size + i);
                }
            }
            crc = aio_crc_over(over, crc) ^ second;
            crc = aio_crc_over(over, crc) ^ third;
        }
    }
    for (; length >= 8; at += 8, length -= 8)
        crc = aio_crc_8(crc, at);
    for (; length; at++, length--)
        crc = aio_crc_1(crc, *at);
    return (uint32_t)crc;
}
#endif

/* Whether the processor has the instruction. */
static int crc32c_hardware(void)
{
    return aio_crc.hardware;
}

/* As the next, without the instruction. */
static uint32_t crc32c_table(uint32_t crc, const void *data, uint64_t length)
{
    return ~aio_crc_by_table(~crc, data, length);
}

/* The sum of the bytes before, which is 0 for none, and of these bytes. */
static uint32_t crc32c(uint32_t crc, const void *data, uint64_t length)
{
#if AIO_CRC_INSTRUCTION
    if (crc32c_hardware())
        return ~aio_crc_by_instruction(~crc, data, length);
#endif
    return crc32c_table(crc, data, length);
}

/* For Python; releases the interpreter lock, as large messages take milliseconds. */

static PyObject *sum_of(PyObject *args, uint32_t (*sum)(uint32_t, const void *, uint64_t))
{
    unsigned int crc;
    Py_buffer data;

    if (!PyArg_ParseTuple(args, "Iy*", &crc, &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = sum(crc, data.buf, (uint64_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *module_crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    return sum_of(args, crc32c);
}

static PyObject *module_crc32c_table(PyObject *Py_UNUSED(module), PyObject *args)
{
    return sum_of(args, crc32c_table);
}

static PyObject *module_crc32c_hardware(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(crc32c_hardware());
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
