"""Between file descriptors and coroutines; this folder knows asyncio, and nothing of RDMA."""
