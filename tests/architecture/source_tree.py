"""The project's own Python files and what they import, read without running them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("common", "gateway", "worker", "client", "launcher", "bench")


@functools.cache
def shipped_modules() -> dict[str, ast.Module]:
    """Dotted name to syntax tree of every module that is shipped, generated ones left out."""
    modules = {}
    for package in SHIPPED:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = ast.parse(path.read_text(), str(path))
    return modules


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, wherever the statement stands; `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the packages or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)
