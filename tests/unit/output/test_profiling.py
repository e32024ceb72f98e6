"""The timeline of a recorded step: every span once, and none over another in its track."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from roll.core.timing import Span, SpanRecorder
from roll.pipeline.profiling import chrome_trace

MOMENTS = st.integers(0, 30)
SPANS = st.lists(
    st.tuples(st.sampled_from("ab"), MOMENTS, MOMENTS).map(
        lambda drawn: Span(drawn[0], float(min(drawn[1:])), float(max(drawn[1:])))
    )
)


@given(spans=st.dictionaries(st.sampled_from(["driver", "actor_train[0]", "x[3]"]), SPANS))
def test_every_span_is_there_once_and_none_overlaps_another_in_its_track(
    spans: dict[str, list[Span]],
) -> None:
    events = json.loads(json.dumps(chrome_trace(spans)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(spans)
    found = defaultdict(list)
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            found[names[event["pid"]]].append((event["name"], begin_s, end_s))
            tracks[event["pid"], event["tid"]].append((begin_s, end_s))
    for name, own in spans.items():
        assert sorted(found[name]) == sorted((s.name, s.begin_s, s.end_s) for s in own)
    for times in tracks.values():
        ordered = sorted(times)
        assert all(one[1] <= next_[0] for one, next_ in pairwise(ordered))


def test_a_recorder_notes_only_while_it_is_on() -> None:
    recorder = SpanRecorder()
    with recorder.noted("before"):
        pass
    recorder.begin()
    with recorder.noted("one"), recorder.noted("two"):
        pass
    spans = recorder.end()
    assert [span.name for span in spans] == ["two", "one"]
    two, one = spans
    assert one.begin_s <= two.begin_s <= two.end_s <= one.end_s
    with recorder.noted("after"):
        pass
    assert recorder.end() == []
