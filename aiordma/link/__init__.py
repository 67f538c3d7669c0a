"""Shared by messages, streams and datagrams: finding a peer, and the adapter's objects."""
