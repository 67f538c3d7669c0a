"""The constants of pyverbs, flat: `e` has those of libibverbs, `ce` those of librdmacm.

pyverbs 44 has each name twice in `pyverbs.enums` and `pyverbs.cm_enums`: by itself, and as a member
of its enum.  Version 65 has members alone, in modules with other names; 56 has all four modules.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

try:
    import pyverbs.libibverbs_enums as verbs_enums
    import pyverbs.librdmacm_enums as cm_enums
except ImportError:
    import pyverbs.cm_enums as cm_enums
    import pyverbs.enums as verbs_enums


def _flat(module: ModuleType) -> SimpleNamespace:
    names = dict(vars(module))
    for kind in vars(module).values():
        names.update(getattr(kind, "__members__", {}))
    return SimpleNamespace(**names)


e = _flat(verbs_enums)
ce = _flat(cm_enums)
