"""A User-Mode Linux kernel with RDMA devices, and rdma-core for it: files, and no code.

``python -m aiordma.testing.softroce`` finds them here.
"""
