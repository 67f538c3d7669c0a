/* What marks.c tells instructions.c: instructions of seven bytes that do nothing. */

#ifndef MARKS_H
#define MARKS_H

/* Macros: the assembler knows no enumerators. */
#define MARK_START 1
#define MARK_STOP  2
#define MARK_JOB   3

/* nopl 0x4f4941kk(%rax) */
#define MARK_BYTES(kind) 0x0f, 0x1f, 0x80, kind, 0x41, 0x49, 0x4f
#define MARK_PLACE       3

#endif
