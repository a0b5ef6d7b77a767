"""Stands in for torchvision, of which pip's own index has no CPU wheel: SGLang imports it, text needs none.

Every name is a class that refuses to work; submodules are made of the same.
"""

import sys
from types import ModuleType

__version__ = "0.0"


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(metaclass=_Names):
    """Anything of torchvision."""

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Nobody should."""
        raise RuntimeError("torchvision is a stand-in here")


def __getattr__(name: str) -> type[StandIn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn


for _path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = ModuleType(f"torchvision.{_path}")
    _module.__dict__["__getattr__"] = __getattr__
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    if "." not in _path:
        globals()[_path] = _module
    else:
        _parent, _, _name = _module.__name__.rpartition(".")
        setattr(sys.modules[_parent], _name, _module)
