"""A training to plan: big on eight H100s."""

from lit_gpt_dist.model.config import preset
from lit_gpt_dist.planner.hardware import DEVICES, link_by_name
from lit_gpt_dist.planner.job import Job

H100 = DEVICES["h100"]
NVLINK = link_by_name("nvlink", H100)
PCIE = link_by_name("pcie4", H100)


def job(size="big", **changes) -> Job:
    fields = dict(devices=8, link=NVLINK, global_batch=512, micro_batch=16)
    return Job(preset(size, context=1024, vocab_size=50_304), H100, **{**fields, **changes})
