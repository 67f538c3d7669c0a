"""A program's view of many connections: servers."""
