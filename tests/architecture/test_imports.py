"""Import rules that a contract on packages cannot express: they hold for modules that do not exist yet."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.source_tree import imports_of, is_in, shipped_modules

ALLOWED_IMPORTERS = {
    "grpc": ("common.rpc", "gateway.rpc", "gateway.app", "worker.rpc", "worker.app", "client", "bench"),
    "grpc_health": ("common.rpc", "gateway.rpc", "gateway.app", "worker.rpc", "worker.app", "client"),
    "redis": ("gateway.store",),
    "torch": ("worker.model", "worker.kernels", "worker.cache.storage", "worker.cache.swap", "bench"),
    "triton": ("worker.kernels.triton",),
    "numba": ("worker.kernels",),
    "protos": ("common.rpc", "gateway.rpc", "worker.rpc", "client"),
    "tests": (),
}


@pytest.mark.parametrize("package", ALLOWED_IMPORTERS)
def test_only_the_named_packages_import_it(package: str) -> None:
    importers = {
        name
        for name, tree in shipped_modules().items()
        if any(is_in(imported, (package,)) for imported in imports_of(tree))
    }
    strangers = {name for name in importers if not is_in(name, ALLOWED_IMPORTERS[package])}
    assert strangers == set()


@pytest.mark.parametrize("module", ["common.types", "common.errors", "common.clock"])
def test_the_words_need_the_standard_library_only(module: str) -> None:
    imported = {name.split(".")[0] for name in imports_of(shipped_modules()[module])}
    assert imported - sys.stdlib_module_names <= {"common"}


def test_only_apps_and_launchers_import_concrete_engines_and_stores() -> None:
    concrete = ("worker.model", "worker.engine.loop", "gateway.store")
    wiring = ("worker.app", "gateway.app", "bench", "worker.model", "gateway.store")
    offenders = {
        (name, imported)
        for name, tree in shipped_modules().items()
        if not is_in(name, wiring)
        for imported in imports_of(tree)
        if is_in(imported, concrete) and imported != "worker.model.config"
    }
    assert {pair for pair in offenders if not pair[0].startswith("worker.kernels")} == set()
