"""Registered memory: arenas and pools of the library, and registrations of callers' buffers."""

from aiordma.memory.arena import Arena
from aiordma.memory.cache import CacheStats, RegistrationCache
from aiordma.memory.pool import BufferPool
from aiordma.memory.remote import RemoteRegion

__all__ = ["Arena", "BufferPool", "CacheStats", "RegistrationCache", "RemoteRegion"]
