"""The compiled base class of exporter.c."""

class BufferExporter:
    """Exports the memoryview that `_exported()` returns."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
