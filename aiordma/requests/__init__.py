"""Requests and answers over the messages of a connection; knows nothing of RDMA."""
