/*
 * Versions of symbols.  The parts of rdma-core call each other under a version of their own, whose
 * number changes when their structs do; a program that uses such a call asks for the number of the
 * rdma-core that it was linked with.  libibverbs.map has the numbers, and the macros below
 * give a function all of them.
 */
#ifndef FABRIC_VERSIONS_H
#define FABRIC_VERSIONS_H

#define FABRIC_VERSION(name, number)                                                               \
    extern __typeof__(name) name##_##number __attribute__((alias(#name), visibility("default")));  \
    __asm__(".symver " #name "_" #number ", " #name "@IBVERBS_PRIVATE_" #number)

/* rdma-core 57, 59, 64 and 65 changed it from 34, which rdma-core 34 had brought. */
#define FABRIC_PRIVATE(name)                                                                       \
    FABRIC_VERSION(name, 34);                                                                      \
    FABRIC_VERSION(name, 57);                                                                      \
    FABRIC_VERSION(name, 59);                                                                      \
    FABRIC_VERSION(name, 64);                                                                      \
    FABRIC_VERSION(name, 65)

#endif
