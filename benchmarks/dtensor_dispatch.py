"""CPU seconds that torch's tensor parallelism spends outside products and collectives.

    python benchmarks/dtensor_dispatch.py

The same decoder layers forward and backward, plain and as DTensors over a group of two whose
collectives do nothing (torch's fake backend), on so few tokens that compute hardly counts. The
difference over the DTensor modules called is ``DTENSOR_DISPATCH_S`` in ``planner/constants.py``.
Process time is taken, so that other load on the machine matters little.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from train_gpt import CONFIG, GPT, GPTConfig

from executor.decoder import DecoderNames
from executor.mesh import RankGroup
from executor.parallel.tensor import shard_weights
from planner.cost.work import DTENSOR_MODULES_PER_LAYER

REPEATS = 30
TOKENS = 8


def main() -> None:
    """Print the overhead per layer and per module call."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    config = GPTConfig.from_file(CONFIG)
    plain, sharded = GPT(config).float(), GPT(config).float()
    group = RankGroup(ranks=(0, 1), index=0, process_group=dist.group.WORLD)
    shard_weights(sharded, group, DecoderNames())
    # alternately, so that drift hits both
    differences = [cpu_s(sharded) - cpu_s(plain) for _ in range(REPEATS)]
    per_layer = statistics.median(differences) / config.num_hidden_layers
    calls = 3 * DTENSOR_MODULES_PER_LAYER  # forward once, backward twice
    print(f"{per_layer * 1e3:.2f} ms per layer and micro-batch, forward and backward")
    print(f"{per_layer / calls * 1e3:.3f} ms for each of {calls} module passes")
    dist.destroy_process_group()


def cpu_s(model: torch.nn.Module) -> float:
    """Return CPU seconds of one forward and backward through the layers."""
    hidden = torch.randn(1, TOKENS, 256, requires_grad=True)
    start = time.process_time()
    x = hidden
    for layer in model.layers:  # type: ignore[union-attr]  # a ModuleList
        x = layer(x)
    x.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return time.process_time() - start


if __name__ == "__main__":
    main()
