"""What stands between file descriptors and coroutines; knows asyncio, and nothing of RDMA."""
