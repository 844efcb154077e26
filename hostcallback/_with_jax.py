"""Calls a function once JAX is imported, without importing JAX."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


def once_jax_is_imported(function: Callable[[], object], needs: str) -> None:
    """Calls `function` now if JAX is imported, else when its import ends, which then raises the exceptions.

    `needs` is a module that imports JAX and that `function` needs. If JAX is imported by that module, `function` is
    called at the end of that module's import, because the module is incomplete before.
    """
    if "jax" in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _JaxFinder(function, needs))


class _JaxFinder(MetaPathFinder):
    # Finds jax through the other finders. It stays until jax is executed, because some programs only look jax up.

    def __init__(self, function: Callable[[], object], needs: str) -> None:
        self._function = function
        self._needs = needs

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("jax", self._needs):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _JaxLoader(spec.loader, lambda: self._after(name))
        return spec

    def _after(self, name: str) -> None:
        if name == "jax" and self._needs in sys.modules:  # it imports JAX, and is incomplete
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._function()


class _JaxLoader(Loader):
    def __init__(self, loader: Any, after: Callable[[], None]) -> None:
        self._loader = loader
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._after()
