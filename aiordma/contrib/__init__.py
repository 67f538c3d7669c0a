"""Other packages over RDMA: each module needs the package of its name, nothing else does."""
