"""Turns on shared devices, with roles that only write down when they come and go."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sections.roles import Role
from roll.distributed.colocation import Colocation, Resident

TRAIN, INFER, REFERENCE = Role.ACTOR_TRAIN, Role.ACTOR_INFER, Role.REFERENCE


class Devices:
    """What lies on each device: role -> `all` or `weights`."""

    def __init__(self, **places: set[int]) -> None:
        self.places = {Role(name): frozenset(places[name]) for name in places}
        self.held: dict[Role, str] = {}
        self.log: list[str] = []

    def move(self, role: Role, what: str | None) -> None:
        self.log.append(f"{role} {what or 'off'}")
        if what is None:
            del self.held[role]
        else:
            self.held[role] = what

    def drop(self, role: Role) -> None:
        self.log.append(f"{role} dropped")
        del self.held[role]

    def start(self, colocation: Colocation, role: Role) -> None:
        assert not self.neighbours(role), "a role starts on devices that are not free"
        self.held[role] = "all"
        colocation.add(
            role,
            Resident(
                self.places[role],
                partial(self.move, role, "all"),
                partial(self.move, role, None),
                partial(self.move, role, "weights") if role == INFER else None,
                partial(self.drop, role) if role == INFER else None,
            ),
        )

    def neighbours(self, role: Role) -> dict[Role, str]:
        return {
            other: what
            for other, what in self.held.items()
            if other != role and self.places[other] & self.places[role]
        }


def started(enabled: bool = True, **places: set[int]) -> tuple[Devices, Colocation]:
    devices, colocation = Devices(**places), Colocation(enabled)
    for role in devices.places:
        if enabled:
            devices.start(colocation, role)
        else:
            colocation.add(role, Resident(devices.places[role], pytest.fail, pytest.fail))
    devices.log.clear()
    return devices, colocation


def test_roles_that_start_one_after_the_other_find_their_devices_free() -> None:
    devices, colocation = started(actor_infer={0}, actor_train={0}, reference={0})
    assert devices.held == {}
    assert colocation.loaded == set()


def test_a_step_on_one_gpu_moves_each_role_on_and_off_in_this_order() -> None:
    devices, colocation = started(actor_infer={0}, actor_train={0}, reference={0})
    with colocation.push(TRAIN, INFER):
        assert devices.held == {TRAIN: "all", INFER: "weights"}
    with colocation.use(INFER):
        assert devices.held == {INFER: "all"}
    with colocation.use(REFERENCE):
        assert devices.held == {REFERENCE: "all"}
    with colocation.use(TRAIN), colocation.use(TRAIN):
        assert devices.held == {TRAIN: "all"}
    with colocation.push(TRAIN, INFER):
        pass
    with colocation.use(TRAIN):  # a checkpoint
        assert devices.held == {TRAIN: "all"}
    assert devices.log == [
        "actor_train all",
        "actor_infer weights",
        "actor_train off",
        "actor_infer all",
        "actor_infer off",
        "reference all",
        "reference off",
        "actor_train all",
        "actor_infer weights",
        "actor_infer off",
    ]


def test_weights_are_dropped_only_where_new_ones_follow() -> None:
    devices, colocation = started(actor_infer={0}, actor_train={0}, reference={0})
    with colocation.use(INFER):
        pass
    with colocation.renewing(INFER), colocation.use(REFERENCE), colocation.use(TRAIN):
        pass
    with colocation.push(TRAIN, INFER):
        pass
    with colocation.use(TRAIN):  # a checkpoint
        pass
    moves = [move for move in devices.log if move.startswith(INFER)]
    dropped = ["actor_infer all", "actor_infer dropped"]
    assert moves == [*dropped, "actor_infer weights", "actor_infer off"]


def test_beside_each_other_only_a_sender_on_the_device_of_a_receiver_gives_back() -> None:
    freed: list[str] = []
    for device, expected in ((0, ["freed"]), (1, [])):
        colocation = Colocation(enabled=False, beside=True)
        colocation.add(
            TRAIN,
            Resident(frozenset({0}), pytest.fail, pytest.fail, free=lambda: freed.append("freed")),
        )
        colocation.add(INFER, Resident(frozenset({device}), pytest.fail, pytest.fail))
        with colocation.use(TRAIN), colocation.use(INFER):
            assert freed == []
        with colocation.push(TRAIN, INFER):
            assert freed == expected
        freed.clear()


def test_a_push_to_an_engine_that_is_all_there_frees_the_shared_device_first() -> None:
    devices, colocation = started(actor_infer={0, 1}, actor_train={0})
    with colocation.use(INFER):
        pass
    devices.log.clear()
    with colocation.push(TRAIN, INFER):
        pass
    assert devices.log == ["actor_infer off", "actor_train all", "actor_infer weights"]


def test_a_trainer_gives_back_what_it_reserves_before_weights_enter_beside_it() -> None:
    """After a step it is there already, with the memory of activations reserved for itself."""
    for shared in (True, False):
        devices, colocation = started(actor_infer={0 if shared else 1}, actor_train={0})
        [name] = colocation.parts(TRAIN)
        free = partial(devices.log.append, "free")
        colocation.residents[name] = replace(colocation.residents[name], free=free)
        with colocation.use(TRAIN):
            devices.log.clear()
        with colocation.push(TRAIN, INFER):
            pass
        assert devices.log == ["free"] * shared + ["actor_infer weights"]


def test_a_push_between_devices_of_their_own_leaves_both_as_they_are() -> None:
    devices, colocation = started(actor_infer={1}, actor_train={0}, reference={0})
    with colocation.use(INFER), colocation.use(TRAIN):
        pass
    devices.log.clear()
    with colocation.push(TRAIN, INFER):
        pass
    assert devices.log == []


def test_nothing_moves_when_it_is_not_enabled() -> None:
    _, colocation = started(enabled=False, actor_infer={0}, actor_train={0})
    with colocation.push(TRAIN, INFER), colocation.use(INFER), colocation.use(TRAIN):
        pass


PLACES = st.sets(st.integers(0, 3), min_size=1)


@given(
    infer=PLACES,
    train=PLACES,
    reference=PLACES,
    order=st.lists(st.sampled_from(["push", TRAIN, INFER, REFERENCE]), max_size=12),
)
def test_a_role_in_use_never_shares_a_device(
    infer: set[int], train: set[int], reference: set[int], order: list[str | Role]
) -> None:
    devices, colocation = started(actor_infer=infer, actor_train=train, reference=reference)
    for what in order:
        if isinstance(what, Role):
            with colocation.use(what):
                assert devices.held[what] == "all"
                assert not devices.neighbours(what)
        else:
            with colocation.push(TRAIN, INFER):
                assert devices.held[TRAIN] == "all"
                assert INFER in devices.held
                assert devices.neighbours(TRAIN).items() <= {INFER: "weights"}.items()
                assert REFERENCE not in devices.neighbours(INFER)
