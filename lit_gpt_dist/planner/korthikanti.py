"""Activation formulas of the literature, by name. For this project's own model see ``activations``.

s sequence, b micro-batch, h width, a heads, L layers, t tensor-parallel degree; 16-bit values throughout.
"""


def rough_activation_bytes(
    layers: int, batch: int, sequence: int, width: int, bytes_per_element: float = 14.0
) -> float:
    """L·b·s·h·c with c about 14 (10–20): an order of magnitude, no more."""
    return layers * batch * sequence * width * bytes_per_element


def border_activation_bytes(layers: int, batch: int, sequence: int, width: int) -> float:
    """With full recomputation only the layer borders stay, 2 bytes an element."""
    return rough_activation_bytes(layers, batch, sequence, width, 2.0)


def layer_activation_bytes(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    flash: bool = False,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """One layer's activations (Korthikanti et al. 2022, equations 1, 2 and 4).

    s·b·h·(34 + 5·a·s/h); tensor parallel s·b·h·(10 + 24/t + 5·a·s/(h·t)); with sequence parallelism all of it over t.
    Flash attention and selective recomputation both remove the second term.
    """
    scores = 0.0 if flash else 5.0 * heads * sequence / width
    linear = 34.0 / tensor if sequence_parallel else 10.0 + 24.0 / tensor
    return sequence * batch * width * (linear + scores / tensor)
