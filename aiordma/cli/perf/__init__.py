"""`aiordma perf`: how fast the wire is, and how fast Python is on it."""
