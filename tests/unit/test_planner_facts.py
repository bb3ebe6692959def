"""Every check value of the project's formula sheet, one test a line. Tolerances are the digits the sheet prints."""

import pytest

from lit_gpt_dist.model.flops import model_flops_utilization
from lit_gpt_dist.planner import communication as comm
from lit_gpt_dist.planner import korthikanti, memory, running, time
from lit_gpt_dist.planner.compute import RECOMPUTE_FACTOR
from lit_gpt_dist.planner.hardware import DEVICES

BILLION, GB = 1e9, 1e9
HALF_PERCENT = 0.005  # the sheet prints three digits


def close(expected: float):
    return pytest.approx(expected, rel=HALF_PERCENT)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_mixed_adam_state_of_7b_is_112_gb():
    assert memory.mixed_adam_state_bytes(7 * BILLION) / GB == close(112.0)


def test_rough_activations_of_32_layers_are_30_1_gb():
    assert korthikanti.rough_activation_bytes(32, 4, 4096, 4096) / GB == close(30.1)


def test_recomputed_activations_are_4_3_gb_and_totals_142_1_and_116_3_gb():
    kept = korthikanti.rough_activation_bytes(32, 4, 4096, 4096) / GB
    borders = korthikanti.border_activation_bytes(32, 4, 4096, 4096) / GB
    assert borders == close(4.3)
    assert (112 + kept, 112 + borders) == (close(142.1), close(116.3))


def test_exact_layer_activations_are_0_956_gb():
    assert korthikanti.layer_activation_bytes(1, 2048, 4096, 32) / GB == close(0.956)


def test_flash_attention_removes_the_second_term():
    assert korthikanti.layer_activation_bytes(1, 2048, 4096, 32, flash=True) == 34 * 2048 * 4096


def test_tensor_parallel_activations_divide_24_of_34_and_the_scores():
    s, b, h, a, t = 2048, 1, 4096, 32, 4
    assert korthikanti.layer_activation_bytes(b, s, h, a, tensor=t) == close(
        s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    )


def test_tensor_and_sequence_parallel_activations_divide_everything():
    whole = korthikanti.layer_activation_bytes(1, 2048, 4096, 32)
    assert korthikanti.layer_activation_bytes(1, 2048, 4096, 32, tensor=4, sequence_parallel=True) == close(whole / 4)
    selective = korthikanti.layer_activation_bytes(1, 2048, 4096, 32, flash=True, tensor=4, sequence_parallel=True)
    assert selective == close(2048 * 4096 * 34 / 4)


def test_fp32_master_state_of_1_2b_is_19_2_gb_and_4_8_gb_on_4():
    assert memory.master_state_bytes(1.2 * BILLION) / GB == close(19.2)
    assert memory.master_state_bytes(1.2 * BILLION, 4) / GB == close(4.8)


def test_this_projects_state_is_16_bytes_a_parameter():
    assert sum(memory.state_bytes_per_parameter("bf16-mixed", "adamw")) == 16
    assert sum(memory.state_bytes_per_parameter("32-true", "adamw")) == 16


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_of_7_5b_on_64_is_120_31_4_16_6_1_9_gb(stage, gigabytes):
    # the sheet (and the paper's figure) print one decimal: 1.875 is shown as 1.9
    assert memory.zero_state_bytes(7.5 * BILLION, 64, stage) / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("stage", "each", "gigabytes"), [(0, 16, 8.04), (1, 7, 3.52), (2, 5.5, 2.76), (3, 4, 2.01)])
def test_zero_on_4_cards_is_16_7_5_5_4_bytes_and_8_04_3_52_2_76_2_01_gb(stage, each, gigabytes):
    assert memory.zero_state_bytes(1, 4, stage) == close(each)
    assert memory.zero_state_bytes(502.2e6, 4, stage) / GB == close(gigabytes)


def test_largest_model_at_12_bytes_on_8_80_gb_cards_is_6_67_16_24_6_53_3_b():
    card = 80 * GB
    found = [
        memory.largest_model_parameters(card, 12),
        memory.largest_model_parameters(card, 5),
        memory.largest_model_parameters(card, 2, 10, 8),
        memory.largest_model_parameters(card, 0, 12, 8),
    ]
    assert [value / BILLION for value in found] == [close(6.67), close(16), close(24.6), close(53.3)]


def test_largest_model_at_12_bytes_on_4_32_gb_cards_is_2_67_and_10_7_b():
    assert memory.largest_model_parameters(32 * GB, 12) / BILLION == close(2.67)
    assert memory.largest_model_parameters(32 * GB, 0, 12, 4) / BILLION == close(10.7)


def test_largest_ddp_model_keeping_30_percent_is_1_75_b_of_40_gb_and_3_5_b_of_80_gb():
    assert memory.largest_ddp_model_parameters(40 * GB) / BILLION == close(1.75)
    assert memory.largest_ddp_model_parameters(80 * GB) / BILLION == close(3.5)


# ---- communication --------------------------------------------------------------------------------------------------

NVLINK, PCIE = 600 * GB, 25 * GB
DDP_BYTES, DDP_EACH_BYTES, FSDP_BYTES = 1.51, 24.11, 36.16
PSI = 502.2e6


def three_volumes():
    return [
        comm.ddp_bytes(PSI, 4, 2),
        comm.ddp_bytes(PSI, 4, 2, accumulate=16, no_sync=False),
        comm.fsdp_bytes(PSI, 4, 2, 2, accumulate=16),
    ]


def test_one_rank_all_reduces_nothing():
    assert comm.all_reduce_seconds(1e9, 1, NVLINK) == 0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = comm.reduce_scatter_seconds(1e9, 4, PCIE) + comm.all_gather_seconds(1e9, 4, PCIE)
    assert comm.all_reduce_seconds(1e9, 4, PCIE) == pytest.approx(parts)


def test_ddp_of_502_2m_on_4_sends_1_51_gb():
    assert three_volumes()[0] / GB == close(1.51)


def test_ddp_without_no_sync_over_16_sends_24_11_gb():
    assert three_volumes()[1] / GB == close(24.11)


def test_fsdp_synchronising_all_16_sends_36_16_gb():
    assert three_volumes()[2] / GB == close(36.16)


def test_the_three_take_2_5_40_2_60_3_ms_on_nvlink_and_60_3_964_2_1446_3_ms_on_pcie():
    # the sheet rounds 2.511 to 2.5
    assert [size / NVLINK * 1e3 for size in three_volumes()] == [pytest.approx(2.5, abs=0.05), close(40.2), close(60.3)]
    assert [size / PCIE * 1e3 for size in three_volumes()] == [close(60.3), close(964.2), close(1446.3)]


def test_their_shares_of_6_42_s_are_0_04_0_63_0_94_and_0_94_15_02_22_53_percent():
    for link, shares in ((NVLINK, (0.04, 0.63, 0.94)), (PCIE, (0.94, 15.02, 22.53))):
        found = [100 * size / link / 6.42 for size in three_volumes()]
        assert found == [pytest.approx(value, abs=0.005) for value in shares]


def test_fsdp_with_bf16_weights_and_fp32_gradients_sends_what_ddp_sends_in_fp32():
    assert comm.fsdp_bytes(PSI, 4, 2, 4) == pytest.approx(comm.ddp_bytes(PSI, 4, 4))


def test_communication_over_compute_is_3900_over_tokens_and_25_percent_at_15600():
    assert comm.communication_to_compute(39e12, 10e9, 1.0) == close(3900)
    assert comm.tokens_for_share(39e12, 10e9, 0.25) == close(15_600)


def test_exposed_communication_gives_78_percent_at_4096_tokens_and_93_accumulating_4():
    compute = 1.0  # a micro-batch of 4096 tokens
    communication = comm.communication_to_compute(39e12, 10e9, 4096)
    once = time.ddp_step_seconds(compute, 1, communication)
    four = time.ddp_step_seconds(compute, 4, communication)
    assert time.efficiency(compute, once) == pytest.approx(0.78, abs=0.005)
    assert time.efficiency(4 * compute, four) == pytest.approx(0.93, abs=0.005)


def test_ddp_step_without_overlap_adds_all_communication():
    assert time.ddp_step_seconds(1.0, 4, 0.5, overlap=False) == 4.5
    assert time.ddp_step_seconds(1.0, 4, 0.5) == 4.0
    assert time.ddp_step_seconds(1.0, 4, 0.5, last_bucket=0.1) == 4.1


def test_scaling_efficiency_is_the_same_from_times_and_from_rates():
    assert time.efficiency(1.0, 1.25) == close(0.8)
    assert time.efficiency_from_rates(4 * 80.0, 100.0, 4) == close(0.8)


def test_tensor_parallel_all_reduces_128_mib_each_and_16_gib_a_micro_batch_over_32_layers():
    assert comm.tensor_parallel_all_reduce_bytes(4, 4096, 4096) == 128 * 2**20
    assert comm.tensor_parallel_bytes(4, 4096, 4096, 32) == 16 * 2**30


def test_pipeline_bubble_of_4_stages_is_43_and_8_6_percent_or_75_and_9_4_against_useful_time():
    assert time.bubble_share(4, 4) == close(0.4286)
    assert time.bubble_share(4, 32) == close(0.0857)
    assert time.bubble_over_useful(4, 4) == close(0.75)
    assert time.bubble_over_useful(4, 32) == close(0.0938)
    assert time.bubble_over_useful(4, 4, interleave=3) == close(0.25)


# ---- compute --------------------------------------------------------------------------------------------------------


def test_6n_mfu_of_7b_at_2m_tokens_in_8_5_s_on_64_is_15_6_percent():
    # 2M is 2·10^6 tokens; the sheet rounds 15.61
    assert model_flops_utilization(6 * 7e9, 2e6 / 8.5, 989e12, 64) == pytest.approx(0.156, abs=0.0005)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("a100", 312), ("h100", 989), ("h200", 989), ("l40s", 362), ("rtx4090", 165), ("rtx4080", 97.5)],
)
def test_dense_bf16_peaks_are_the_datasheets(name, teraflops):
    assert DEVICES[name].peak_flops == teraflops * 1e12


def test_full_recomputation_costs_about_30_percent():
    assert pytest.approx(1.30, abs=0.05) == RECOMPUTE_FACTOR


# ---- running for weeks ----------------------------------------------------------------------------------------------


def test_30_days_over_64_nodes_fail_every_11_25_h():
    assert running.mean_time_between_failures(30 * 24, 64) == 11.25


def test_best_checkpoint_interval_for_2_min_and_11_h_is_51_min():
    assert running.checkpoint_interval_seconds(120, 11 * 3600) / 60 == pytest.approx(51, abs=0.5)


def test_a_straggler_is_slower_than_1_15_times_the_median():
    assert running.is_straggler(1.16, 1.0)
    assert not running.is_straggler(1.14, 1.0)


def test_learning_rate_grows_by_k_for_sgd_and_by_its_root_for_adam():
    assert running.scaled_learning_rate(0.1, 4, "sgd") == pytest.approx(0.4)
    assert running.scaled_learning_rate(0.1, 4, "adamw") == pytest.approx(0.2)


def test_communication_is_good_below_20_and_the_bottleneck_above_40_percent():
    assert [running.judge_communication(share) for share in (0.19, 0.3, 0.41)] == [
        "good",
        "acceptable",
        "the bottleneck",
    ]
