"""Frames arrive as they were sent, however their bytes come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.torchrun.remote.wire import Decoder, encode

FRAMES = st.lists(
    st.tuples(
        st.sampled_from("01"),
        st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers() | st.binary(max_size=3000).map(str)),
    ),
    max_size=5,
)


@given(frames=FRAMES, order=st.randoms(), cut=st.integers(1, 2000), banner=st.text(max_size=20))
def test_frames_of_several_sources_come_out_whole_and_in_order(
    frames: list[tuple[str, dict[str, object]]], order: object, cut: int, banner: str
) -> None:
    lines: dict[str, list[bytes]] = {source: [] for source in "01"}
    for source, frame in frames:
        lines[source] += encode({"by": source, "said": frame}, source).splitlines(keepends=True)
    mixed = b"".join(line.encode("utf-8", "replace") + b"\n" for line in banner.splitlines())
    while any(lines.values()):
        source = order.choice([source for source in lines if lines[source]])  # type: ignore[attr-defined]
        mixed += lines[source].pop(0)
    decoder = Decoder()
    found = [frame for start in range(0, len(mixed), cut) for frame in decoder.feed(mixed[start : start + cut])]
    for each in "01":
        assert [f["said"] for f in found if f["by"] == each] == [said for source, said in frames if source == each]


@given(st.binary(max_size=20_000))
def test_no_line_is_longer_than_srun_keeps_together(data: bytes) -> None:
    assert all(len(line) < 1024 for line in encode({"data": str(data)}, "node-17").splitlines(keepends=True))
