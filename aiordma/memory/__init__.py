"""Registered memory: arenas and pools of the library, and registrations of callers' buffers."""

from aiordma.memory.cache import RegistrationCache

__all__ = ["RegistrationCache"]
