"""What Colossal-AI and this package keep of a world beyond torch's groups."""

from __future__ import annotations

import os

import torch

from ...accelerator import get_accelerator, quiet_import
from ...cpu.point_to_point import forget_messages

with quiet_import():
    from colossalai.cluster import DistCoordinator
    from colossalai.context.singleton_meta import SingletonMeta
    from colossalai.shardformer.layer.utils import Randomizer
    from colossalai.tensor.d_tensor.api import clear_layout_converter
    from colossalai.utils import set_seed

from .world import World

__all__ = ["LaunchedState"]


class LaunchedState:
    """The state in which ``colossalai.launch`` leaves a process, for one world after the other.

    Args:
        host: machine of the store.
        port: port of the store.
        seed: of the random numbers of Python, numpy and torch.
    """

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        self._launcher_places = "LOCAL_RANK" in os.environ
        self._seed: int | None = seed

    def enter(self, world: World) -> None:
        """Set what a launcher and ``colossalai.launch`` set. The seed and the device are set in the first world only.

        A launcher's LOCAL_RANK says which device of the node this process has, so it stays. Without it, LOCAL_RANK is
        the number of the members of this node that have a lower rank.
        """
        os.environ.update(self._address, RANK=str(world.rank), WORLD_SIZE=str(world.size))
        if not self._launcher_places:
            node = world.nodes[world.rank]
            os.environ["LOCAL_RANK"] = str(world.nodes[: world.rank].count(node))
            os.environ["LOCAL_WORLD_SIZE"] = str(world.nodes.count(node))
        if self._seed is not None:
            if get_accelerator().support_set_device:
                get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
            set_seed(self._seed)
            self._seed = None
        torch._dynamo.config.optimize_ddp = world.size > 1

    def leave(self) -> None:
        """Forget ranks, groups and messages of the world before."""
        SingletonMeta._instances.pop(DistCoordinator, None)
        Randomizer.reset_index()
        clear_layout_converter()
        forget_messages()
