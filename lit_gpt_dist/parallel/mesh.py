"""The device mesh and who shares data on it: the one place that knows. Knows nothing of models."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Axes over which ranks see different windows. Every other axis (tensor, context, pipeline) splits one window's work.
DATA_AXES = ("replicate", "shard")


def build_mesh(device_type: str, **degrees: int) -> DeviceMesh:
    """Mesh over all ranks with named axes, in the order given, e.g. ``build_mesh("cuda", replicate=2, shard=4)``.

    The device type is named, not guessed: with gloo on a machine that has a GPU the mesh must stay on the CPU.
    """
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def data_coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """(data rank of this process, number of data ranks): position among the ranks that see different windows."""
    rank, ranks = 0, 1
    for axis in mesh.mesh_dim_names or ():
        if axis in DATA_AXES:
            rank = rank * mesh[axis].size() + mesh[axis].get_local_rank()
            ranks *= mesh[axis].size()
    return rank, ranks
