"""The door to the kernels: everything outside this package reaches them through a `Backend`."""

from __future__ import annotations

from worker.kernels.program import (
    AttentionShape,
    Backend,
    Epilogue,
    LayerCache,
    Linear,
    Program,
    Rows,
    StepSizes,
    StepTables,
)

BACKENDS = ("reference", "cpu")


def load_backend(name: str) -> Backend:
    """The backend of that name; imports nothing of the others.

    Raises ValueError for an unknown name.
    """
    if name == "reference":
        from worker.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        from worker.kernels.cpu.backend import CpuBackend

        return CpuBackend()
    raise ValueError(f"unknown kernel backend {name!r}, allowed: {', '.join(BACKENDS)}")


__all__ = [
    "BACKENDS",
    "AttentionShape",
    "Backend",
    "Epilogue",
    "LayerCache",
    "Linear",
    "Program",
    "Rows",
    "StepSizes",
    "StepTables",
    "load_backend",
]
