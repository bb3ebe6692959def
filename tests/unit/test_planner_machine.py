"""Devices, links and calibration files: what is known, what is not, what is refused."""

import pytest

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import preset
from lit_gpt_dist.planner import calibration as calibrations
from lit_gpt_dist.planner.activations import widths
from lit_gpt_dist.planner.calibration import Calibration
from lit_gpt_dist.planner.compute import Rates, micro_seconds
from lit_gpt_dist.planner.estimate import estimate
from lit_gpt_dist.planner.hardware import DEVICES, GIB, Link, device_by_name, link_by_name
from lit_gpt_dist.planner.job import Job

RATES = Rates(((768.0, 600e12), (2048.0, 700e12)), 400e12, 4e12, 20e-6, 2e-6)
CURVE = ((1e6, 18e9), (25e6, 231e9), (100e6, 276e9))


@pytest.mark.parametrize(
    ("driver_name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4080", "rtx4080"),
    ],
)
def test_devices_are_known_by_the_drivers_names(driver_name, key):
    assert device_by_name(driver_name) is DEVICES[key]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H200 NVL",
        "NVIDIA L40",
        "NVIDIA A10G",
        "x86_64",
    ],
)
def test_a_device_that_is_only_similar_has_no_peak(name):
    assert device_by_name(name).peak_flops is None


def test_memory_can_be_given_for_an_unknown_device():
    assert device_by_name("NVIDIA Something", 24).memory_bytes == 24 * GIB


def test_links_are_words_or_numbers():
    assert link_by_name("nvlink", DEVICES["h100"]).bandwidth == 450e9
    assert link_by_name("pcie4", DEVICES["l40s"]).kind == "pcie"
    assert link_by_name("12.5", DEVICES["l40s"]).bandwidth == 12.5e9


@pytest.mark.parametrize("name", ["nvlnk", "-3", "nan", "inf", "0"])
def test_any_other_link_is_refused(name):
    with pytest.raises(UserError, match="link"):
        link_by_name(name, DEVICES["h100"])


def test_nvlink_is_refused_where_the_device_has_none():
    with pytest.raises(UserError, match="pcie4"):
        link_by_name("nvlink", DEVICES["rtx4090"])


def test_a_measured_link_is_slower_for_small_messages():
    link = Link("measured", 276e9, "measured", "", CURVE)
    assert link.bandwidth_at(1e3) == 18e9
    assert link.bandwidth_at(13e6) == pytest.approx((18e9 + 231e9) / 2)
    assert link.bandwidth_at(1e12) == 276e9


def test_a_calibration_survives_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_GPT_DIST_CACHE", str(tmp_path))
    made = Calibration("NVIDIA H200", RATES, 50e9, {2: CURVE}, "nccl", "2026-01-01", {"torch": "2"})
    calibrations.save(made, calibrations.calibration_path(made.device))
    assert calibrations.find("h200") == made
    assert calibrations.find("NVIDIA H200") == made
    assert calibrations.find("h100") is None


def test_the_cache_folder_follows_its_environment_variables(monkeypatch):
    monkeypatch.delenv("LIT_GPT_DIST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(calibrations.cache_folder()) == "/somewhere/lit_gpt_dist"
    monkeypatch.setenv("LIT_GPT_DIST_CACHE", "/elsewhere")
    assert str(calibrations.cache_folder()) == "/elsewhere"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', "not json"])
def test_a_damaged_calibration_is_named_and_not_used(tmp_path, content):
    path = tmp_path / "calibration-x.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"calibration-x\.json"):
        calibrations.load(path)


def test_a_calibration_replaces_the_assumed_mfu():
    model = preset("gpt2-124m")
    job = Job(model, DEVICES["h200"], micro_batch=32, global_batch=32, execution="compiled",
              calibration=Calibration("NVIDIA H200", RATES))  # fmt: skip
    found = estimate(job, "single")
    timed = micro_seconds(model, 32, 1024, widths("bf16-mixed"), RATES, "compiled", "none")
    assert found.times.compute > timed.total
    assert found.mfu != pytest.approx(job.mfu)


def test_small_shapes_are_bound_by_launches_and_a_graph_removes_them():
    model = preset("baby", vocab_size=160)
    times = [micro_seconds(model, 4, 256, widths("bf16-mixed"), RATES, how, "none") for how in ("eager", "graph")]
    assert times[0].total == times[0].launches
    assert times[1].launches == 0
    assert times[1].total < times[0].total / 2


def test_a_further_micro_batch_takes_its_time_and_the_adding_of_its_gradients():
    fields = dict(micro_batch=16, execution="graph", calibration=Calibration("NVIDIA H200", RATES))
    once, twice = (
        estimate(Job(preset("gpt2-124m"), DEVICES["h200"], global_batch=16 * n, **fields), "single").times.step
        for n in (1, 2)
    )
    micro = micro_seconds(preset("gpt2-124m"), 16, 1024, widths("bf16-mixed"), RATES, "graph", "none")
    added = 3 * 4 * preset("gpt2-124m").parameters() / RATES.copy_bandwidth
    assert twice - once == pytest.approx(micro.total + added)


def test_recomputation_repeats_all_products_of_a_block_but_the_last():
    model = preset("gpt2-124m")
    once, cheap, again = (
        micro_seconds(model, 8, 1024, widths("bf16-mixed"), RATES, "graph", kind)
        for kind in ("none", "selective", "full")
    )
    block = 12 * model.width**2  # 3 for queries, keys and values, 1 for their output, 4 up, 4 down
    repeated = 2 * 8 * 1024 * model.layers * (block - 4 * model.width**2) / RATES.matmul_at(model.width)
    assert again.products - once.products == pytest.approx(repeated)
    assert (cheap.products, cheap.attention) == (once.products, once.attention)
    assert once.traffic < cheap.traffic == again.traffic


@pytest.mark.parametrize("calibration", [None, Calibration("NVIDIA H200", RATES)], ids=["assumed", "calibrated"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_in_some_blocks_takes_their_share_of_the_time(kind, calibration):
    fields = dict(micro_batch=8, global_batch=8, execution="graph", calibration=calibration)

    def seconds(**asked):
        return estimate(Job(preset("gpt2-124m"), DEVICES["h200"], **fields, **asked), "single").times.compute

    none, every = seconds(), seconds(recompute=kind)
    assert seconds(recompute=kind, recompute_blocks=12) == every
    assert seconds(recompute=kind, recompute_blocks=3) == pytest.approx(none + (every - none) / 4)


def test_gathers_take_the_bandwidth_of_gathers_where_it_was_measured():
    slower = tuple((size, rate / 2) for size, rate in CURVE)
    measured = Calibration("NVIDIA H200", None, None, {2: CURVE}, "nccl", "now", all_gather={2: slower})
    link = calibrations.from_json(calibrations.to_json(measured), "here").link(2)
    assert (link.bandwidth_at(1e6), link.gather_bandwidth_at(1e6)) == (18e9, 9e9)
    older = calibrations.to_json(measured)
    del older["all_gather"]
    assert calibrations.from_json(older, "here").link(2).gather_bandwidth_at(1e6) == 18e9


def test_what_hides_behind_compute_on_a_fast_link_takes_its_time_from_it():
    fields = dict(
        devices=2, global_batch=32, micro_batch=16, execution="graph", calibration=Calibration("NVIDIA H200", RATES)
    )
    for link, free in (("nvlink", False), ("pcie4", True)):
        job = Job(
            preset("big", context=1024, vocab_size=50_304),
            DEVICES["h200"],
            link=link_by_name(link, DEVICES["h200"]),
            ddp_overlap=True,
            **fields,
        )
        times = estimate(job, "ddp").times
        hidden = times.communication - times.exposed
        assert hidden > 0
        assert times.slowed == (0.0 if free else pytest.approx(hidden))
        assert times.step == pytest.approx(times.compute + times.exposed + times.slowed)


def test_the_link_of_a_calibration_is_that_of_as_many_ranks():
    made = Calibration("NVIDIA H200", None, None, {2: CURVE, 4: ((1e6, 9e9),)}, "nccl", "now")
    assert made.link(2).bandwidth == 276e9
    assert made.link(8).bandwidth == 9e9
    assert Calibration("NVIDIA H200").link(2) is None
