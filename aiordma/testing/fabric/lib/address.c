/* Names: rdma_getaddrinfo() over the C library's getaddrinfo(). */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

/* rdma-core 60 and newer have it: names are resolved as they are without it. */
enum { RAI_DNS_OF_65 = 0x20 };

static int type_of(const struct rdma_addrinfo *hints, struct rdma_addrinfo *info)
{
    info->ai_port_space = hints ? hints->ai_port_space : 0;
    info->ai_qp_type = hints ? hints->ai_qp_type : 0;
    if (!info->ai_port_space)
        info->ai_port_space = info->ai_qp_type == IBV_QPT_UD ? RDMA_PS_UDP : RDMA_PS_TCP;
    if (!info->ai_qp_type)
        info->ai_qp_type =
            info->ai_port_space == RDMA_PS_UDP || info->ai_port_space == RDMA_PS_IPOIB ? IBV_QPT_UD
                                                                                       : IBV_QPT_RC;
    return 0;
}

static struct sockaddr *address_copy(const struct sockaddr *address, socklen_t length)
{
    struct sockaddr *copy = calloc(1, sizeof(struct sockaddr_storage));

    if (copy)
        memcpy(copy, address, length);
    return copy;
}

static int address_put(const struct sockaddr *address, socklen_t length, struct sockaddr **into,
                       socklen_t *into_length)
{
    if (!address || !length)
        return 0;
    *into = address_copy(address, length);
    *into_length = length;
    return *into ? 0 : EAI_MEMORY;
}

FABRIC_API void rdma_freeaddrinfo(struct rdma_addrinfo *info)
{
    while (info) {
        struct rdma_addrinfo *next = info->ai_next;

        free(info->ai_src_addr);
        free(info->ai_dst_addr);
        free(info->ai_src_canonname);
        free(info->ai_dst_canonname);
        free(info->ai_route);
        free(info->ai_connect);
        free(info);
        info = next;
    }
}

static int resolve(const char *node, const char *service, const struct rdma_addrinfo *hints,
                   struct rdma_addrinfo *info)
{
    struct addrinfo wanted = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    bool passive = hints && hints->ai_flags & RAI_PASSIVE;
    int error;

    if (hints && hints->ai_flags & RAI_FAMILY)
        wanted.ai_family = hints->ai_family;
    if (passive)
        wanted.ai_flags |= AI_PASSIVE;
    if (hints && hints->ai_flags & RAI_NUMERICHOST)
        wanted.ai_flags |= AI_NUMERICHOST;
    error = getaddrinfo(node, service, &wanted, &found);
    if (error)
        return error;
    info->ai_family = found->ai_family;
    if (passive)
        error =
            address_put(found->ai_addr, found->ai_addrlen, &info->ai_src_addr, &info->ai_src_len);
    else
        error =
            address_put(found->ai_addr, found->ai_addrlen, &info->ai_dst_addr, &info->ai_dst_len);
    freeaddrinfo(found);
    return error;
}

FABRIC_API int rdma_getaddrinfo(const char *node, const char *service,
                                const struct rdma_addrinfo *hints, struct rdma_addrinfo **found)
{
    struct rdma_addrinfo *info;
    int error = 0;

    if (!node && !service && !(hints && (hints->ai_src_addr || hints->ai_dst_addr))) {
        errno = EINVAL;
        return EAI_NONAME;
    }
    if (hints && hints->ai_flags &
                     ~(RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY | RAI_DNS_OF_65))
        return EAI_BADFLAGS;
    if (hints && ((hints->ai_qp_type == IBV_QPT_UD && hints->ai_port_space == RDMA_PS_TCP) ||
                  (hints->ai_qp_type == IBV_QPT_RC && hints->ai_port_space == RDMA_PS_UDP)))
        return EAI_SOCKTYPE;
    info = calloc(1, sizeof(*info));
    if (!info)
        return EAI_MEMORY;
    info->ai_flags = hints ? hints->ai_flags : 0;
    type_of(hints, info);
    if (node || service)
        error = resolve(node, service, hints, info);
    if (!error && hints && !info->ai_src_addr)
        error = address_put(hints->ai_src_addr, hints->ai_src_len, &info->ai_src_addr,
                            &info->ai_src_len);
    if (!error && hints && !info->ai_dst_addr)
        error = address_put(hints->ai_dst_addr, hints->ai_dst_len, &info->ai_dst_addr,
                            &info->ai_dst_len);
    if (error) {
        rdma_freeaddrinfo(info);
        return error;
    }
    if (!info->ai_family)
        info->ai_family = info->ai_dst_addr   ? info->ai_dst_addr->sa_family
                          : info->ai_src_addr ? info->ai_src_addr->sa_family
                                              : AF_INET;
    *found = info;
    return 0;
}
