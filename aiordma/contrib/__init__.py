"""Other packages over RDMA: each module needs the package of its name, and nothing else does."""
