"""What messages, streams and datagrams share: finding a peer, and the adapter's objects."""
