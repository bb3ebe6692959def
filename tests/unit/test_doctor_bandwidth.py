"""Bandwidth words against the formula sheet's check values."""

import pytest

from lit_gpt_dist.doctor.bandwidth import algorithm_bandwidth, bus_bandwidth, bus_factor, sweep_sizes

ELEMENTS = 104_857_600


def test_all_reduce_of_400_mib_in_2_14_ms_on_4_is_196_and_294_gb_per_second():
    assert algorithm_bandwidth(4 * ELEMENTS, 2.14e-3) / 1e9 == pytest.approx(196, abs=0.5)
    busbw = bus_bandwidth("all_reduce", 4 * ELEMENTS, 2.14e-3, 4)
    assert busbw / 1e9 == pytest.approx(294, abs=0.5)
    assert busbw / 2**30 == pytest.approx(273.8, abs=0.9)  # the sheet truncates to 273 GiB/s


def test_reduce_scatter_counts_the_whole_input_and_reaches_310_gb_per_second():
    whole_input = 4 * 4 * ELEMENTS
    assert bus_bandwidth("reduce_scatter", whole_input, 4.06e-3, 4) / 1e9 == pytest.approx(310, abs=0.5)


def test_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 2) == 1.0
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 8) == 1.0


def test_an_all_reduce_moves_what_a_reduce_scatter_and_an_all_gather_move():
    assert bus_factor("all_reduce", 8) == bus_factor("reduce_scatter", 8) + bus_factor("all_gather", 8)


def test_a_sweep_includes_both_ends():
    assert sweep_sizes(1024, 20_000) == [1024, 4096, 16_384, 20_000]
    assert sweep_sizes(1024, 1024) == [1024]
