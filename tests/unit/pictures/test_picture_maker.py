"""Who makes patches: broken pictures, workers that die or hang, and what the rollout does then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll.config.sections.roles import Role
from roll.core.errors import PictureError, RollError
from roll.core.pictures import Pictures
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import GenerateRequest, Prompt, WorkerSpec
from roll.data.chat.tokenization import TokenSequence
from roll.data.examples import Example
from roll.data.pictures.picture import EncodedPictures, Picture
from roll.data.pictures.placeholders import Grid
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupTask
from roll.runtime.pictures.examples import ExamplePictures
from roll.runtime.pictures.maker import TRIES, PictureMaker
from roll.workers.pictures.patches import Patches
from roll.workers.pictures.worker import PictureWorker
from tests.fakes import ScriptedEngine, prompt, scheduler, single_turn


class Scripted(PictureWorker):
    """Makes patches of the number that is the picture's identity."""

    def __init__(self, spec: WorkerSpec, does: Callable[[Scripted, str], Any]) -> None:
        super(PictureWorker, self).__init__(spec)
        self.does = does
        self.started = False

    async def start(self) -> None:
        self.started = True

    async def make(self, pictures: Sequence[Picture], grids: Sequence[Grid]) -> Patches:
        assert self.started
        told = self.does(self, pictures[0].identity)
        if told is not None:
            await told
        return Patches(np.array([[int(picture.identity)] for picture in pictures], np.uint8))


def seen(name: str, *numbers: int) -> Prompt:
    """A prompt with pictures of these numbers; without any if there are none."""
    if not numbers:
        return prompt(name)
    pictures = tuple(Picture(f"{name}, picture {i}", "", str(n)) for i, n in enumerate(numbers))
    encoded = EncodedPictures(pictures)
    known = Pictures(tuple(range(len(numbers))), ((1, 1, 1),) * len(numbers), encoded)
    return replace(prompt(name), pictures=known)


def nothing(worker: Scripted, number: str) -> None:
    """Make the patches at once."""


def numbers_of(pictures: Pictures | None) -> list[int]:
    return [] if pictures is None else pictures.patches.get()[:, 0].tolist()


@pytest.fixture
def make() -> Iterator[Callable[..., PictureMaker]]:
    with LocalLauncher(call_timeout_s=20) as launcher:

        def maker(does: Any = nothing, *, workers: int = 2, timeout_s: float = 20) -> PictureMaker:
            place = Placement(Role.PICTURES, pool=None, workers=workers, replaceable=True)
            cluster: Cluster[Any] = launcher.start(Scripted, place, does)
            cluster.call(PictureWorker.start)
            return PictureMaker(cluster, timeout_s)

        yield maker


def test_patches_are_made_once_and_prompts_without_pictures_need_none(make: Any) -> None:
    made: list[str] = []
    maker = make(lambda worker, number: made.append(number))

    async def both() -> tuple[Prompt, Prompt, Prompt]:
        first = await maker.prompt(seen("a", 3, 4))
        return first, await maker.prompt(first), await maker.prompt(seen("b"))

    first, again, blind = asyncio.run(both())
    assert numbers_of(first.pictures) == [3, 4]
    assert again.pictures is first.pictures
    assert blind.pictures is None
    assert made == ["3"]
    assert maker.take_metrics().values_by_name() == {"pictures/rows": 1, "pictures/broken_rows": 0}


def broken(worker: Scripted, number: str) -> None:
    raise PictureError(f"picture {number}: image file is truncated")


def test_a_broken_picture_is_named_once_and_never_tried_again(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def fails(worker: Scripted, number: str) -> None:
        tried.append(number)
        broken(worker, number)

    maker = make(fails)

    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(PictureError, match=r"a:1 is left out: picture 7: .* truncated"):
                await maker.prompt(seen("a:1", 7))

    asyncio.run(twice())
    assert tried == ["7"]
    assert caplog.text.count("a:1 is left out") == 1
    assert maker.take_metrics().values_by_name()["pictures/broken_rows"] == 2


def test_a_picture_that_takes_too_long_is_left_out_and_its_worker_replaced(make: Any) -> None:
    def slow(worker: Scripted, number: str) -> Any:
        return asyncio.sleep(60) if number == "9" else None

    maker = make(slow, workers=1, timeout_s=0.2)

    async def both() -> Prompt:
        with pytest.raises(PictureError, match=r"took longer than 0.2 s"):
            await maker.prompt(seen("slow", 9))
        return await maker.prompt(seen("quick", 1))

    assert numbers_of(asyncio.run(both()).pictures) == [1]


def test_a_worker_that_dies_is_replaced_and_its_row_tried_again(make: Any) -> None:
    deaths: list[int] = []
    maker: PictureMaker

    def dies(worker: Scripted, number: str) -> Any:
        if number == "13" or (number == "5" and not deaths):
            deaths.append(worker.spec.rank)
            return asyncio.to_thread(maker.cluster.end, worker.spec.rank)
        return None

    maker = make(dies, workers=1)

    async def all_of_them() -> list[list[int]]:
        found = await asyncio.gather(*(maker.prompt(seen(f"p{n}", n)) for n in (1, 5, 6)))
        with pytest.raises(PictureError, match=f"killed {TRIES} workers"):
            await maker.prompt(seen("killer", 13))
        return [numbers_of(one.pictures) for one in [*found, await maker.prompt(seen("last", 2))]]

    assert asyncio.run(all_of_them()) == [[1], [5], [6], [2]]
    assert len(deaths) == 1 + TRIES


def test_no_row_is_to_blame_for_workers_that_died_without_work(make: Any) -> None:
    maker: PictureMaker = make()
    for rank in range(2):
        maker.cluster.end(rank)

    async def three() -> list[list[int]]:
        found = await asyncio.gather(*(maker.prompt(seen(f"p{n}", n)) for n in (1, 5, 6)))
        return [numbers_of(one.pictures) for one in found]

    assert asyncio.run(three()) == [[1], [5], [6]]
    assert maker.cluster.lost == frozenset()


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_a_worker_is_started_though_the_row_that_waited_for_it_is_cancelled(
    make: Any, pause_s: float
) -> None:
    maker: PictureMaker = make(workers=1)
    maker.cluster.end(0)

    async def two() -> Prompt:
        first = asyncio.ensure_future(maker.prompt(seen("cancelled", 1)))
        while maker.cluster.lost and not maker._restarts:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(pause_s)  # the new worker is on its way, or there
        return await maker.prompt(seen("next", 5))

    assert numbers_of(asyncio.run(two()).pictures) == [5]


def test_requests_and_samples_have_the_pictures_of_their_prompt(make: Any) -> None:
    maker = make()
    asked: list[GenerateRequest] = []

    def turns(request: GenerateRequest) -> int:
        asked.append(request)
        return 1

    run = single_turn(
        ScriptedEngine(turns=turns), with_patches=maker.prompt, greedy_baseline=True
    ).run
    group = asyncio.run(run(GroupTask(seen("a", 3, 4), 0)))
    assert len(asked) == 2
    assert {request.id.endswith("greedy") for request in asked} == {True, False}
    for request in asked:
        assert numbers_of(request.pictures) == [3, 4]
    assert group.baseline is not None
    for scored in (*group.samples, group.baseline):
        assert scored.sample.prompt is group.prompt
    assert numbers_of(group.prompt.pictures) == [3, 4]


def test_prompts_with_broken_pictures_are_replaced_and_the_step_goes_on(make: Any) -> None:
    maker = make(lambda worker, number: broken(worker, number) if number == "7" else None)
    rows = iter([seen(f"p{i}", 7 if i % 4 == 1 else i) for i in range(100)])
    run = single_turn(ScriptedEngine(), with_patches=maker.prompt).run
    of = scheduler(rows, run, groups=4)
    result = asyncio.run(of.collect(0))
    assert [group.prompt.id for group in result.groups] == ["p0", "p2", "p3", "p4"]
    assert result.stats.rejected["broken picture"] >= 1
    assert of.prompts.replaced[0] == "p1"  # type: ignore[attr-defined]


def test_a_step_without_sound_pictures_says_so(make: Any) -> None:
    maker = make(broken)
    rows = iter([seen(f"p{i}", 7) for i in range(100)])
    of = scheduler(rows, single_turn(ScriptedEngine(), with_patches=maker.prompt).run)
    with pytest.raises(RollError, match="x broken picture"):
        asyncio.run(of.collect(0))


def test_a_group_that_waits_in_a_checkpoint_gets_its_patches_again(make: Any) -> None:
    maker = make()
    data = {one.id: one for one in (seen("a", 3), seen("b"))}
    run = single_turn(ScriptedEngine(), with_patches=maker.prompt).run

    async def there_and_back() -> list[Group]:
        groups = [await run(GroupTask(one, 0)) for one in data.values()]
        rows = [to_plain(group) for group in groups]
        for row in rows:
            for sample in row["samples"]:
                sample["written"] = sample["written"]()
        made = await maker.prompts(data[row["prompt"]] for row in rows)
        return [from_plain(row, made.__getitem__) for row in rows]

    first, second = asyncio.run(there_and_back())
    assert numbers_of(first.prompt.pictures) == [3]
    assert all(scored.sample.prompt is first.prompt for scored in first.samples)
    assert second.prompt.pictures is None


def example_of(name: str, *numbers: int, tokens: tuple[int, ...] = (1, 2)) -> Example:
    return Example(name, (TokenSequence(tokens, ((1, 2),), seen(name, *numbers).pictures),))


def test_rows_of_validation_are_not_counted_and_not_those_of_training(make: Any) -> None:
    maker = make(lambda worker, number: broken(worker, number) if number == "7" else None)
    training, held_out = example_of("t:1", 3), example_of("val/t:1", 3, tokens=(5, 6))
    with LoopThread("pictures of a test") as loop:
        pictures = ExamplePictures(maker, loop)
        pictures.begin([training, example_of("t:2")])
        found = pictures.made([held_out, example_of("val/t:2", 7)], counted=False)
        assert [None if one is None else one.id for one in found] == ["val/t:1", None]
        [plain, one] = pictures.made([example_of("t:2"), training])
    assert plain == example_of("t:2")
    assert one == training
    assert one is not None
    assert numbers_of(one.sequences[0].pictures) == [3]
    assert maker.take_metrics().values_by_name() == {"pictures/rows": 1, "pictures/broken_rows": 0}
