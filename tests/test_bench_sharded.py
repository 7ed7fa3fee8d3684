"""The benchmark of several devices, small: times device by device, bytes of collectives, results of every way."""

import dataclasses
import functools
import json
import types

import numpy as np
import pytest

from benchmarks import bench_sharded, measure, sharded_decode
from benchmarks.collective_bytes import received_bytes
from models.presets import preset

large = functools.partial(pytest.param, marks=pytest.mark.large)


def test_the_events_of_each_device_are_cut_into_its_own_calls():
    one = [(0.0, 2e3), (1e3, 5e3), (9e3, 1e3), (20e3, 1e3), (21e3, 1e3), (22e3, 4e3)]
    other = [(3e3, 4e3), (22e3, 7e3)]
    busy, spans = measure.call_times([one, other], 2)
    np.testing.assert_array_equal(busy, [[7, 6], [4, 7]])  # what overlaps counts once
    np.testing.assert_array_equal(spans, [[10, 6], [4, 7]])
    with pytest.raises(RuntimeError, match="3 device events in 2 equal calls"):
        measure.call_times([one, [*other, (30e3, 1e3)]], 2)
    with pytest.raises(RuntimeError, match="0 device events"):
        measure.call_times([[]], 2)


def test_each_collective_brings_its_share_of_the_result():
    program = """
    %g = f32[8,1,1024]{2,1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={2}
    %h = (bf16[2,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(%b), dimensions={0}
    %t = (s32[2,5]{1,0}, s32[2,5]{1,0}, s32[2,5]{1,0}, s32[2,5]{1,0}) all-to-all(%c, %d, %e, %f)
    %v = (f32[4,8]{1,0}, f32[4,8]{1,0}) all-to-all-start(%i), dimensions={0}
    %r = pred[40]{0} all-reduce(%k), to_apply=%or
    %u = f32[8]{0} fusion(%all-gather), calls=%x, metadata={op_name="all-gather"}
    """
    gathers, swapped, reduced = 8 * 1024 * 4 + 8 * 64 * 2, 4 * 10 * 4 + 32 * 4, 40
    assert received_bytes(program, 4) == 0.75 * (gathers + swapped + 2 * reduced)
    assert received_bytes(program, 1) == 0


@pytest.mark.parametrize(
    ("chosen", "ways"),
    [
        (["--proposals", "0", "--mixes", "unfiltered"], ["all-gather", "all-to-all", "winners"]),
        large(["--proposals", "0", "--mixes", "filtered"], ["all-gather", "all-to-all", "candidates"]),
        large(["--proposals", "3", "--drafts", "points"], ["all-gather", "all-to-all"]),
        large(["--proposals", "3", "--drafts", "law"], ["all-gather", "all-to-all"]),
    ],
)
def test_every_way_has_the_tokens_of_one_device_and_the_expected_traffic(chosen, ways, capsys):
    sizes = "--devices 2 --batch 8 --vocab 1000 --width 64 --calls 2 --only sample verify --no-write"
    bench_sharded.main([*sizes.split(), *chosen])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["case"].split(", ")[-1] for row in rows] == ways
    for row in rows:
        assert row["case"].startswith("2 x cpu B=8 K=") and row["num_differing"] == 0
        # Beside what stands for the logits there are at most the results of 8 rows, for all devices.
        assert 0 <= row["received_bytes"] - row["expected_bytes"] <= 8 * 16 * 4
    assert rows[1]["received_bytes"] < 0.6 * rows[0]["received_bytes"]
    assert rows[1]["peak_bytes"] < 0.7 * rows[0]["peak_bytes"]


@pytest.mark.large
def test_steps_of_both_ways_draw_the_same_tokens_on_both_axes():
    small = dict(
        vocab_size=1000, width=32, num_layers=1, num_heads=2, num_kv_heads=2, head_size=8, mlp_width=32
    )
    config = dataclasses.replace(preset("qwen2.5-7b"), joined_projections=True, **small)
    options = types.SimpleNamespace(decode_batch=[4], prefix=5, calls=2, ways=sharded_decode.DEFAULT)
    rows: list[dict] = []
    attempt = lambda case, measure_row: rows.append({"case": case, **measure_row()})
    sharded_decode.run(config, "tiny", "4 x cpu", 4, 1e9, options, attempt)
    assert [row["case"].split(", ")[-1] for row in rows] == ["replicated", "batch-sharded"]
    assert all(row["what"] == "decode step, data=2, tensor=2" and row["num_differing"] == 0 for row in rows)


def test_rows_that_differ_are_counted():
    found = {"tokens": np.array([[1, 2], [3, 4], [5, 6]]), "count": np.array([1, 2, 2])}
    other = {"tokens": np.array([[1, 2], [3, 5], [5, 6]]), "count": np.array([1, 1, 1])}
    assert bench_sharded._num_differing(found, found) == 0
    assert bench_sharded._num_differing(found, other) == 2
