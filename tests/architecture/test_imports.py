"""Import rules that a contract on packages cannot express: they hold for modules that do not exist yet."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.source_tree import imports_of, is_in, shipped_modules

ALLOWED_IMPORTERS = {
    "grpc": ("common.rpc", "gateway.rpc", "gateway.app", "worker.rpc", "worker.app", "client", "bench"),
    "grpc_health": ("common.rpc", "gateway.rpc", "gateway.app", "worker.rpc", "worker.app", "client"),
    "redis": ("gateway.store",),
    "hiredis": ("gateway.store",),
    "torch": ("worker.model", "worker.kernels", "worker.cache.storage", "worker.cache.swap", "bench"),
    "triton": ("worker.kernels.triton",),
    "numba": ("worker.kernels",),
    "protos": ("common.rpc", "gateway.rpc", "worker.rpc", "client", "bench.raw_client"),
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


@pytest.mark.parametrize(
    "concrete",
    ["worker.model.runner", "worker.model.weights", "worker.engine.loop", "gateway.store.redis_queue"],
)
def test_only_the_apps_import_what_they_put_together(concrete: str) -> None:
    assert concrete in shipped_modules()
    importers = {name for name, tree in shipped_modules().items() if concrete in imports_of(tree)}
    allowed = ("worker.app", "gateway.app", "bench", concrete.rpartition(".")[0])
    assert {name for name in importers if not is_in(name, allowed)} == set()
