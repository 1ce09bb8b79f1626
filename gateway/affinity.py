"""What this gateway's requests leave in the workers' prefix caches, told from how they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.live import LiveRequest
from gateway.placement.scoring import CachedPrefixes, Prefix
from gateway.placement.worker import TokensEvent, WorkerSession
from gateway.queueing.queue import Claim


class Affinity:
    """Owner of the beliefs about workers' caches."""

    def __init__(self) -> None:
        self._cached = CachedPrefixes()

    def add(self, session: WorkerSession) -> None:
        """A worker can be sent to."""
        self._cached.add(session.worker_id, session.epoch, session.limits)

    def remove(self, worker_id: str, epoch: int) -> None:
        """A start of a worker is gone."""
        self._cached.remove(worker_id, epoch)

    def believed(self, live: LiveRequest, workers: Iterable[str]) -> Mapping[str, int]:
        """How many leading blocks of a request's input each of these workers should have cached."""
        return self._cached.believed(live.prefix, workers)

    def submitted(self, live: LiveRequest, claim: Claim) -> None:
        """A worker is to compute a request's input."""
        live.belief = self._cached.note(claim.worker_id, claim.worker_epoch, live.prefix)

    def heard(self, live: LiveRequest, claim: Claim, event: TokensEvent) -> None:
        """With its first tokens a worker says what it found cached; with the last ones it has all of them."""
        if event.token_ids and live.belief is not None:
            if event.cached_prompt_tokens < len(live.request.prompt_token_ids):  # else more may have been found
                self._cached.correct(live.belief, event.cached_prompt_tokens)
            live.belief = None
        if event.finish_reason is not None and live.has_filled_blocks(len(event.token_ids)):
            tokens = (*live.request.prompt_token_ids, *live.output_token_ids, *event.token_ids)
            self._cached.note(claim.worker_id, claim.worker_epoch, Prefix(tokens, live.request.prefix_salt))
