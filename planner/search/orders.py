"""In which orders the axes of a layout are worth laying over the ranks.

Megatron's usual order, tp-cp-ep-dp-pp, keeps data-parallel ranks of a stage together; the other,
tp-cp-ep-pp-dp, keeps the stages of a replica together: sends between stages stay in a node, and
gradients cross it.
"""

from planner.layout.candidates import DP_OUTERMOST, RANK_ORDERS
from planner.plan import RankOrder
from planner.topology.fabric import Fabric

__all__ = ["rank_orders"]


def rank_orders(
    fabric: Fabric, *, tp: int, cp: int, dp: int, pp: int, held: RankOrder | None
) -> list[int]:
    """Return the orders to try, as indices into ``RANK_ORDERS``.

    Data parallelism outermost is tried where it lies otherwise than the usual order, and without
    context parallelism: the gradients' dp x cp ranks would be no arithmetic progression (runs of
    cp, a replica apart), and Megatron-LM refuses it. What experts need besides is a rule.

    Args:
        fabric: Where it runs.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        dp: Data-parallel degree.
        pp: Pipeline-parallel degree.
        held: The order asked for: then it is tried even where the fabric makes no difference.
    """
    differs = pp > 1 and dp > 1 and cp == 1
    if held is not None:
        index = RANK_ORDERS.index(held)
        return [index] if differs or index != DP_OUTERMOST else []
    usual = RANK_ORDERS.index("tp-cp-ep-dp-pp")
    return [usual, DP_OUTERMOST] if differs and _lies_otherwise(fabric, tp) else [usual]


def _lies_otherwise(fabric: Fabric, tp: int) -> bool:
    """Return whether any group of dp or pp can have two members in a unit below the top.

    Both step by tp ranks at least, so a unit holds one of each where it is below two steps. In a
    mesh it also matters who is joined.
    """
    return any(
        level.unit_size >= 2 * tp
        for level in fabric.levels
        if level is not fabric.levels[-1] or level.mesh is not None
    )
