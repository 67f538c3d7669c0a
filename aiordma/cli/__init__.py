"""The commands: `aiordma ...` and `python -m aiordma ...`."""
