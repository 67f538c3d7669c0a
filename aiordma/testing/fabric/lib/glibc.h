/*
 * Old versions of symbols, for the wheel.
 *
 * It is for C libraries from 2.17 on, and built on a newer one.  Since these functions have moved
 * there from libpthread into libc they have a newer version too, and a program that is linked with
 * it runs with no older library.  The old version is the same function.  setup.py has the compiler
 * read this file before each of the others; a build by hand does without it.
 */
#if defined(__gnu_linux__) && defined(__x86_64__)
#define FABRIC_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__gnu_linux__) && defined(__aarch64__)
#define FABRIC_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif

#ifdef FABRIC_OLD
FABRIC_OLD(pthread_attr_setstacksize);
FABRIC_OLD(pthread_create);
FABRIC_OLD(pthread_once);
FABRIC_OLD(pthread_sigmask);
#endif
