/* A call of a libibverbs that is newer than the installed library: port 1 has 800 Gb/s, and the
   driver does not tell that of port 3. */

#include <errno.h>
#include <stdint.h>

struct ibv_context;

int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed)
{
    if (port_num == 3)
        return EOPNOTSUPP;
    if (context == 0 || port_num != 1)
        return EINVAL;
    *port_speed = 8000;
    return 0;
}
