from __future__ import annotations

import pytest

from common.errors import InvalidRequestError, NotFoundError, UnavailableError
from common.types import Reason
from common.window import Window
from gateway.placement.fleet import Fleet
from gateway.placement.worker import WorkerState
from tests.support.scripted_worker import MODEL
from tests.unit.gateway.fakes import FakeClock, FakeSession, served


def test_no_model_is_known_before_a_worker_is() -> None:
    fleet = Fleet(FakeClock().monotonic, "")
    with pytest.raises(UnavailableError) as caught:
        fleet.find_model(MODEL)
    assert caught.value.reason is Reason.NO_WORKERS
    assert caught.value.retry_after_s is not None
    assert not fleet.is_ready


def test_models_are_found_by_name_or_by_being_the_only_one() -> None:
    fleet = Fleet(FakeClock().monotonic, "")
    first, second = served(), served(model="other")
    fleet.add(FakeSession("w1", limits=first.limits), first)
    assert fleet.find_model("") is fleet.find_model(MODEL) is first
    fleet.add(FakeSession("w2", limits=second.limits), second)
    assert fleet.find_model("other") is second
    with pytest.raises(InvalidRequestError, match="bytes, other"):
        fleet.find_model("")
    with pytest.raises(NotFoundError, match="served: bytes, other") as caught:
        fleet.find_model("third")
    assert caught.value.reason is Reason.UNKNOWN_MODEL


def test_the_default_model_is_the_configured_one() -> None:
    fleet = Fleet(FakeClock().monotonic, "other")
    for worker_id, model in (("w1", served()), ("w2", served(model="other"))):
        fleet.add(FakeSession(worker_id, limits=model.limits), model)
    assert fleet.find_model("").limits.model == "other"


def test_a_model_without_workers_stays_known_and_its_absence_is_timed() -> None:
    clock = FakeClock()
    fleet = Fleet(clock.monotonic, "")
    session = FakeSession()
    fleet.add(session, served())
    clock.now += 50
    assert fleet.unserved_s(MODEL) == 0
    session.state = WorkerState.DRAINING
    fleet.refresh()
    clock.now += 2
    fleet.remove("w1", 1)
    clock.now += 3
    assert (fleet.unserved_s(MODEL), fleet.num_ready(MODEL), fleet.is_ready) == (5, 0, False)
    assert fleet.find_model(MODEL).limits.model == MODEL
    fleet.add(FakeSession(epoch=2), served())
    assert (fleet.unserved_s(MODEL), fleet.num_ready(MODEL), fleet.is_ready) == (0, 1, True)


def test_one_session_for_each_start_of_a_worker() -> None:
    fleet = Fleet(FakeClock().monotonic, "")
    old, new = FakeSession(epoch=1), FakeSession(epoch=2)
    assert fleet.add(old, served())
    assert not fleet.add(FakeSession(epoch=1), served())
    assert fleet.add(new, served())
    assert not fleet.add(FakeSession(epoch=1), served())
    fleet.remove("w1", 1)  # the old session ends after the new one began
    assert fleet.session("w1", 2) is new
    assert fleet.session("w1", 1) is None


@pytest.mark.parametrize(("num_tokens", "fits"), [(79, True), (80, False), (95, False)])
def test_prompt_and_one_token_must_fit_the_largest_pool(num_tokens: int, fits: bool) -> None:
    fleet = Fleet(FakeClock().monotonic, "")
    for worker_id, num_blocks in (("small", 2), ("large", 5)):
        model = served(num_blocks=num_blocks)
        fleet.add(FakeSession(worker_id, limits=model.limits), model)
    if fits:
        fleet.check_fits(served(), num_tokens, None)
        return
    with pytest.raises(InvalidRequestError, match=r"needs 6 KV blocks of 16 tokens.* has 5") as caught:
        fleet.check_fits(served(), num_tokens, None)
    assert caught.value.reason is Reason.NEVER_FITS


@pytest.mark.parametrize(("own", "window"), [(None, Window(20, 4)), (Window(20), None), (Window(40), Window(20, 4))])
def test_a_window_that_fits_makes_every_length_fit_and_holds_no_more_credit(
    own: Window | None, window: Window | None
) -> None:
    """The pool of 5 blocks of 16 tokens holds a window of 20, sinks, and a chunk of 8: 4 blocks."""
    fleet = Fleet(FakeClock().monotonic, "")
    model = served(num_blocks=5, windows=(own,), max_chunk_tokens=8)
    fleet.add(FakeSession(limits=model.limits), model)
    fleet.check_fits(model, 100_000, window)
    most = 16 * (3 if window is None else 4)
    for num_tokens in (1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 100_000):
        needed = fleet.num_credit_tokens(MODEL, num_tokens, window)
        assert needed == (num_tokens if num_tokens <= most else most)


def test_a_window_that_does_not_fit_is_refused() -> None:
    fleet = Fleet(FakeClock().monotonic, "")
    model = served(num_blocks=5, max_chunk_tokens=8)
    fleet.add(FakeSession(limits=model.limits), model)
    fleet.check_fits(model, 79, Window(90))
    with pytest.raises(InvalidRequestError, match=r"needs 6 KV blocks of 16 tokens.* has 5"):
        fleet.check_fits(model, 80, Window(90))


def test_layers_that_see_everything_bound_the_length() -> None:
    """Two block tables: one grows, the other holds a window of 20 in at most 3 blocks of 16."""
    fleet = Fleet(FakeClock().monotonic, "")
    model = served(num_blocks=10, windows=(None, Window(20)), max_chunk_tokens=8)
    fleet.add(FakeSession(limits=model.limits), model)
    assert [fleet.num_credit_tokens(MODEL, n, None) for n in (16, 32, 48, 64, 112, 500)] == [32, 64, 96, 112, 160, 160]
    fleet.check_fits(model, 7 * 16 - 1, None)
    with pytest.raises(InvalidRequestError, match=r"needs 11 KV blocks"):
        fleet.check_fits(model, 7 * 16, None)


def test_changes_are_told() -> None:
    told: list[bool] = []
    fleet = Fleet(FakeClock().monotonic, "", lambda: told.append(fleet.is_ready))
    fleet.add(FakeSession(), served())
    fleet.remove("w1", 1)
    assert told == [True, False]
