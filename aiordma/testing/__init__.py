"""Helpers for testing programs that speak RDMA."""
