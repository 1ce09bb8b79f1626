"""The workers that this gateway has sessions with, and the models that they serve; no I/O."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import InvalidRequestError, NotFoundError, UnavailableError
from common.types import ModelLimits, Reason
from common.window import Window, num_held_blocks
from gateway.placement.model import ServedModel
from gateway.placement.worker import WorkerSession, WorkerState

_RETRY_S = 2.0  # a worker that starts needs about this long to be seen


class Fleet:
    """Owner of the sessions' registry. A model stays known when its last worker leaves: its requests may wait."""

    def __init__(
        self, monotonic: Callable[[], float], default_model: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`monotonic`: seconds that never go back; `on_change` is told of every change."""
        self._monotonic = monotonic
        self._default_model = default_model
        self._on_change = on_change
        self._sessions: dict[str, WorkerSession] = {}
        self._models: dict[str, ServedModel] = {}
        self._unserved_since: dict[str, float] = {}  # models without a ready worker

    def __repr__(self) -> str:
        sessions = {worker_id: session.state.value for worker_id, session in self._sessions.items()}
        return f"Fleet({sessions}, models={sorted(self._models)})"

    def add(self, session: WorkerSession, model: ServedModel) -> bool:
        """Registers an open session. False, and no change, if a session with this start (or a later one) is there."""
        known = self._sessions.get(session.worker_id)
        if known is not None and known.epoch >= session.epoch:
            return False
        self._sessions[session.worker_id] = session
        self._models[model.limits.model] = model
        self.refresh()
        return True

    def remove(self, worker_id: str, epoch: int) -> None:
        """Forgets a session that is over, unless a later one took its place."""
        known = self._sessions.get(worker_id)
        if known is not None and known.epoch == epoch:
            del self._sessions[worker_id]
            self.refresh()

    def refresh(self) -> None:
        """Looks at the sessions' states again; to be called after one has changed."""
        served = {s.limits.model for s in self._sessions.values() if s.state is WorkerState.READY}
        now = self._monotonic()
        for name in self._models:
            if name in served:
                self._unserved_since.pop(name, None)
            else:
                self._unserved_since.setdefault(name, now)
        self._on_change()

    def session(self, worker_id: str, epoch: int) -> WorkerSession | None:
        """The session with this start of a worker, if it can still answer."""
        session = self._sessions.get(worker_id)
        return session if session is not None and session.epoch == epoch else None

    def latest(self, worker_id: str) -> WorkerSession | None:
        """The session with a worker, whichever start of it."""
        return self._sessions.get(worker_id)

    @property
    def sessions(self) -> tuple[WorkerSession, ...]:
        """All registered sessions."""
        return tuple(self._sessions.values())

    @property
    def is_ready(self) -> bool:
        """Whether some worker takes requests."""
        return any(session.state is WorkerState.READY for session in self._sessions.values())

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """All known models, by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    def num_ready(self, model: str) -> int:
        """Workers that take requests for a model."""
        return sum(s.state is WorkerState.READY and s.limits.model == model for s in self._sessions.values())

    def unserved_s(self, model: str) -> float:
        """Seconds since the last worker of a known model left; 0 while there is one."""
        since = self._unserved_since.get(model)
        return 0.0 if since is None else self._monotonic() - since

    def find_model(self, name: str) -> ServedModel:
        """The model of that name; empty for the default one.

        Raises UnavailableError(NO_WORKERS) while no model is known at all, NotFoundError(UNKNOWN_MODEL) for another
        name, InvalidRequestError if the name is empty and there is no default.
        """
        if not self._models:
            raise UnavailableError("no worker is connected yet", retry_after_s=_RETRY_S)
        wanted = name or self._default_model
        if not wanted:
            if len(self._models) > 1:
                known = ", ".join(sorted(self._models))
                raise InvalidRequestError.of_field("model", f"is empty, and several models are served: {known}")
            wanted = next(iter(self._models))
        model = self._models.get(wanted)
        if model is None:
            known = ", ".join(sorted(self._models))
            raise NotFoundError(
                f"model: {wanted[:100]!r} is not served here; served: {known}", reason=Reason.UNKNOWN_MODEL
            )
        return model

    def check_fits(self, model: ServedModel, num_prompt_tokens: int, window: Window | None) -> None:
        """Raises InvalidRequestError(NEVER_FITS) if no worker's whole pool can hold the prompt and one more token, as
        far as they are held together with this window of the request's own."""
        best = max(self._limits(model.limits.model) or [model.limits], key=lambda it: it.max_kv_tokens(window))
        if num_prompt_tokens + 1 > best.max_kv_tokens(window):
            windows = best.narrowed(window)
            needed = num_held_blocks(windows, num_prompt_tokens + 1, 1, best.block_size)
            raise InvalidRequestError(
                f"prompt of {num_prompt_tokens} tokens needs {needed} KV blocks of {best.block_size} tokens to begin; "
                f"the largest worker has {best.num_blocks}",
                reason=Reason.NEVER_FITS,
            )

    def num_credit_tokens(self, model: str, num_tokens: int, window: Window | None) -> int:
        """Tokens in the blocks that a request of so many tokens holds at a time at most, in the largest pool: never
        more than that has, so that the credit can be had at all."""
        pools = self._limits(model)
        if not pools:
            return num_tokens
        best = max(pools, key=lambda it: it.num_blocks * it.block_size)
        held = best.num_held_blocks(num_tokens, window)
        is_plain = held == -(-num_tokens // best.block_size)
        return num_tokens if is_plain else held * best.block_size

    def _limits(self, model: str) -> list[ModelLimits]:
        """What the connected workers of a model allow."""
        return [s.limits for s in self._sessions.values() if s.limits.model == model]
