"""lit_gpt_dist trains GPT models on one to many devices so that the run is provably the same run on any of them."""

__version__ = "0.1.0"
