"""Fits of alpha and bandwidth per level: together, and for each operation and path by itself."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.calibrate.apply import calibrated_fabric, with_calls, with_fits
from planner.calibrate.levels import Transfer, fit_transfers
from planner.calibrate.runs import Measured, check_calibration, check_run
from planner.constants import MESSAGE_ISSUE_S
from planner.cost.algorithms import is_possible
from planner.cost.collectives import collective_terms, legal_methods
from planner.cost.rates import achieved_bytes_per_s, calls_of
from planner.errors import InvalidInputError
from planner.layout.groups import Group, lay_group
from planner.plan import Calibration, CallFit, CallPath, Collective, LevelFit, Method, Plan
from planner.planning import make_plan
from planner.resolving import build_problem, resolve
from planner.topology.fabric import CallLevels, Fabric, Level
from tests.unit.problems import fabric
from tests.unit.test_fit import local, synthetic_run, with_timing

HOST = Level("loopback", "loopback", 4, 1.3e9, 800e-6, "test")
NET = Level("leaf", "ethernet", 16, 50e6, 400e-6, "test")
PRIOR = fabric(16, library="gloo", levels=(HOST, NET))
# What the cluster is really like: a network of an eighth of the prior, hosts as fast.
TRUE = ((120e-6, 1.6e9), (250e-6, 6.25e6))
TRUE_ISSUE_S = 8e-6
SIZES = tuple(8**k for k in range(3, 9))  # 512 bytes to 16 MiB
TRANSFERS: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)


def group(degree: int, stride: int = 1, on: Fabric = PRIOR) -> Group:
    return lay_group(on, np.array([degree]), np.array([stride]))


INSIDE, WHOLE = group(4), group(16)


def fit_calls(prior: Fabric, transfers: Sequence[Transfer]) -> tuple[Fabric, list[CallFit]]:
    """Return the prior with what is fitted to the transfers, and the fits of the calls."""
    levels, calls = fit_transfers([replace(one, fabric=prior) for one in transfers])
    return with_fits(prior, levels, calls, source="test"), calls


def paths(op: Collective) -> list[CallPath]:
    return sorted({method.path for method in legal_methods(PRIOR, "executor", op)})


CALLS = [(op, path) for op in TRANSFERS for path in paths(op)]
# One hop and all posts: in the time of a call of a direct exchange nothing tells them apart.
ONLY_DIRECT: tuple[Collective, CallPath] = ("all_to_all", "library")


def with_levels(
    op: Collective,
    path: CallPath,
    figures: Sequence[tuple[float, float]],
    on: Fabric = PRIOR,
    *,
    issue_s: float = TRUE_ISSUE_S,
) -> Fabric:
    """Return the fabric on which calls of ``op`` by ``path`` see (alpha, bytes/s) per level."""
    levels = tuple(
        replace(level, alpha_s=alpha_s, bytes_per_s=rate, measured=True)
        for level, (alpha_s, rate) in zip(on.levels, figures, strict=True)
    )
    return replace(on, calls=(*on.calls, CallLevels(op, path, levels, issue_s)))


def timed(
    on: Fabric,
    op: Collective,
    path: CallPath,
    groups: Iterable[Group] = (INSIDE, WHOLE),
    *,
    noise: float = 0.0,
) -> list[Transfer]:
    """Return every possible method of a path at every size, as ``on`` prices it, and noise."""
    rng = np.random.default_rng(0)
    found = []
    for one in groups:
        for method in legal_methods(on, "executor", op):
            if method.path != path or not is_possible(op, method, one)[0]:
                continue
            for size in SIZES:
                column = np.array([float(size)])
                seconds = float(collective_terms(op, method, on, one, column).total_s()[0])
                seconds *= 1 + noise * rng.standard_normal()
                found.append(Transfer(PRIOR, op, method, one, column, seconds))
    return found


def assert_close(
    fits: Sequence[LevelFit], figures: Sequence[tuple[float, float]], tolerance: float
) -> None:
    for fit, (alpha_s, rate) in zip(fits, figures, strict=True):
        assert fit.alpha_s == pytest.approx(alpha_s, rel=tolerance), fit.level
        assert fit.bytes_per_s == pytest.approx(rate, rel=tolerance), fit.level


@pytest.mark.parametrize(("op", "path"), [call for call in CALLS if call != ONLY_DIRECT])
def test_what_made_the_timings_comes_back(op: Collective, path: CallPath) -> None:
    true = with_levels(op, path, TRUE)
    fitted, [call] = fit_calls(PRIOR, timed(true, op, path))
    assert (call.op, call.path) == (op, path)
    assert_close(call.levels, TRUE, 0.05)
    assert calls_of(fitted, op, path).issue_s == call.issue_s
    seen = [(level.alpha_s, level.bytes_per_s) for level in calls_of(fitted, op, path).levels]
    assert seen == [(fit.alpha_s, fit.bytes_per_s) for fit in call.levels]


def test_a_direct_exchange_alone_gives_its_seconds_back() -> None:
    transfers = timed(with_levels(*ONLY_DIRECT, TRUE), *ONLY_DIRECT)
    fitted, _ = fit_calls(PRIOR, transfers)
    for one in transfers:
        terms = collective_terms(one.op, one.method, fitted, one.group, one.size_bytes)
        assert terms.total_s()[0] == pytest.approx(one.seconds, rel=0.05)


def test_posting_messages_is_fitted_where_some_are_posted_at_once() -> None:
    """Pairwise waits for each message, the direct exchange does not."""
    true = with_levels("all_to_all", "executor", TRUE)
    _, [call] = fit_calls(PRIOR, timed(true, "all_to_all", "executor"))
    assert call.issue_s == pytest.approx(TRUE_ISSUE_S, rel=0.05)
    none_posted = with_levels("all_gather", "library", TRUE)
    _, [call] = fit_calls(PRIOR, timed(none_posted, "all_gather", "library"))
    assert call.issue_s == pytest.approx(MESSAGE_ISSUE_S["gloo"].value)


def test_posts_that_take_seconds_are_refused_by_name() -> None:
    true = with_levels("all_to_all", "executor", TRUE, issue_s=5.0)
    with pytest.raises(InvalidInputError, match=r"posting a message of all_to_all by executor"):
        fit_calls(PRIOR, timed(true, "all_to_all", "executor"))


def test_a_fit_that_says_nothing_of_posts_leaves_the_prior() -> None:
    fit = CallFit(op="all_to_all", path="executor", levels=(local_fit(1e-5),))
    prior = fabric(4, library="gloo", levels=(HOST,))
    seen = calls_of(with_calls(prior, [fit]), "all_to_all", "executor")
    assert seen.issue_s == calls_of(prior, "all_to_all", "executor").issue_s
    assert seen.levels[0].alpha_s == 1e-5


def test_what_was_fitted_before_has_no_part_in_a_fit() -> None:
    true = with_levels("all_reduce", "library", TRUE)
    transfers = timed(true, "all_reduce", "library")
    far = tuple((100 * alpha_s, rate / 100) for alpha_s, rate in TRUE)
    before = with_levels("all_reduce", "library", far)
    again = [replace(one, fabric=before) for one in transfers]
    assert fit_transfers(again) == fit_transfers(transfers)


@pytest.mark.parametrize("path", ["library", "executor", "shm"])
def test_noise_of_3_percent_moves_nothing_by_10(path: CallPath) -> None:
    true = with_levels("all_reduce", path, TRUE)
    _, [call] = fit_calls(PRIOR, timed(true, "all_reduce", path, noise=0.03))
    assert_close(call.levels, TRUE, 0.1)


def test_no_operation_is_derived_from_another() -> None:
    slow = tuple((5 * alpha_s, rate / 3) for alpha_s, rate in TRUE)
    both = with_levels("all_reduce", "library", TRUE)
    both = with_levels("reduce_scatter", "library", slow, both)
    ops: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
    transfers = [one for op in ops for one in timed(both, op, "library")]
    fitted, calls = fit_calls(PRIOR, transfers)
    assert [call.op for call in calls] == list(ops)
    assert_close(calls[0].levels, TRUE, 0.02)
    assert_close(calls[1].levels, slow, 0.02)
    pooled = calls_of(fitted, "all_gather", "library").levels  # between both
    assert TRUE[1][0] < pooled[1].alpha_s < slow[1][0]


def test_a_level_behind_a_slower_one_keeps_its_prior() -> None:
    """Calls of the whole group say nothing of how fast a host is inside."""
    true = with_levels("all_reduce", "library", TRUE)
    transfers = [t for t in timed(true, "all_reduce", "library", [WHOLE]) if t.method[0] == "ring"]
    _, [call] = fit_calls(PRIOR, transfers)
    host, net = call.levels
    assert host.bytes_per_s == pytest.approx(achieved_bytes_per_s(HOST), rel=0.01)
    assert net.bytes_per_s == pytest.approx(TRUE[1][1], rel=0.02)


def test_a_level_that_the_prior_hides_is_found_to_be_the_slowest() -> None:
    """The prior has hosts as the narrowest; in truth the network is."""
    prior = replace(PRIOR, levels=(replace(HOST, bytes_per_s=50e6), replace(NET, bytes_per_s=1e9)))
    transfers = timed(with_levels("all_reduce", "library", TRUE), "all_reduce", "library", [WHOLE])
    _, [call] = fit_calls(prior, transfers)
    assert call.levels[1].bytes_per_s == pytest.approx(TRUE[1][1], rel=0.05)


def test_a_prior_without_latency_is_a_start_too() -> None:
    prior = replace(PRIOR, levels=(replace(HOST, alpha_s=0.0), NET))
    transfers = timed(with_levels("all_reduce", "library", TRUE), "all_reduce", "library")
    _, [call] = fit_calls(prior, transfers)
    assert_close(call.levels, TRUE, 0.05)
    levels, _ = fit_transfers([replace(one, fabric=prior) for one in transfers])
    assert_close(levels, TRUE, 0.05)


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_one_disturbed_call_moves_little(factor: float) -> None:
    first, *others = timed(with_levels("all_reduce", "executor", TRUE), "all_reduce", "executor")
    wild = replace(first, seconds=factor * first.seconds)
    _, [call] = fit_calls(PRIOR, [wild, *others])
    assert_close(call.levels, TRUE, 0.1)


@pytest.mark.parametrize("path", ["executor", "shm"])
def test_a_path_that_was_measured_alone_says_what_others_would_take(path: CallPath) -> None:
    """Its priors are factors on the level, which is what all calls together are fitted for."""
    slow = replace(
        PRIOR,
        levels=tuple(
            replace(level, alpha_s=7 * level.alpha_s, bytes_per_s=level.bytes_per_s / 5)
            for level in PRIOR.levels
        ),
    )
    fitted, _ = fit_calls(PRIOR, timed(slow, "all_reduce", path))
    for found, true in zip(
        calls_of(fitted, "all_gather", "library").levels, slow.levels, strict=True
    ):
        assert found.alpha_s == pytest.approx(true.alpha_s, rel=0.05)
        assert found.bytes_per_s == pytest.approx(achieved_bytes_per_s(true), rel=0.05)


def test_runs_on_fewer_levels_count_for_those_they_have() -> None:
    """A job on one host, and one on four: the host's level is one and the same."""
    host = replace(PRIOR, num_gpus=4, levels=(HOST,))
    true_host = replace(
        host, levels=(replace(HOST, alpha_s=TRUE[0][0], bytes_per_s=TRUE[0][1], measured=True),)
    )
    inside = group(4, on=host)
    small = [
        Transfer(
            host,
            "all_reduce",
            Method("ring"),
            inside,
            column := np.array([float(size)]),
            float(
                collective_terms("all_reduce", Method("ring"), true_host, inside, column).total_s()[
                    0
                ]
            ),
        )
        for size in SIZES
    ]
    true = with_levels("all_reduce", "library", TRUE)
    large = [t for t in timed(true, "all_reduce", "library", [WHOLE]) if t.method[0] == "ring"]
    levels, [call] = fit_transfers([*small, *large])
    assert [level.num_points for level in levels] == [len(small) + len(large), len(large)]
    assert_close(call.levels, TRUE, 0.05)


def test_fits_of_other_fabrics_levels_are_left_out() -> None:
    [fit] = fit_calls(PRIOR, timed(PRIOR, "all_gather", "shm"))[1]
    elsewhere = [level.model_copy(update={"level": "rail"}) for level in fit.levels]
    assert with_calls(PRIOR, [fit.model_copy(update={"levels": tuple(elsewhere)})]).calls == ()


# ------------------------------------------------------------------------------- into a plan


def calibration(favoured: CallPath) -> Calibration:
    """Return one of local-gloo on which one path is a hundred times as fast as the others."""
    calls = tuple(
        CallFit(op=op, path=path, levels=(local_fit(hop_s),), issue_s=hop_s)
        for op in TRANSFERS
        for path in paths(op)
        for hop_s in (1e-5 if path == favoured else 1e-3,)
    )
    return Calibration(
        id=f"by {favoured}",
        topology="local-gloo",
        levels=(local_fit(1e-3),),
        calls=calls,
        compute_scale=1,
        optimizer_scale=1,
        host_overhead_s=0,
        residual=0.01,
        run_hashes=(),
    )


def local_fit(alpha_s: float) -> LevelFit:
    return LevelFit(
        level="loopback", alpha_s=alpha_s, bytes_per_s=1e4 / alpha_s, num_points=9, residual=0.01
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(resolve(local()))


@pytest.mark.parametrize("favoured", ["library", "executor", "shm"])
def test_a_plan_takes_the_path_that_was_measured_to_be_fast(favoured: CallPath) -> None:
    made = calibration(favoured)
    read = Calibration.model_validate_json(made.model_dump_json())
    assert read == made
    again = make_plan(resolve(local()), read)
    chosen = {m for choice in again.collectives for m in choice.methods() if choice.op in TRANSFERS}
    assert {method.path for method in chosen} == {favoured}
    on = calibrated_fabric(build_problem(resolve(local())).fabric, read)
    for choice in again.collectives:
        lying = lay_group(on, np.array([choice.group_size]), np.array([1]))
        size = np.array([float(choice.size_bytes)])
        method = Method(choice.algorithm, choice.path)
        seconds = collective_terms(choice.op, method, on, lying, size).total_s()[0]
        assert choice.predicted_s == pytest.approx(float(seconds))


@pytest.fixture(scope="module")
def measured(plan: Plan) -> Measured:
    return Measured(build_problem(resolve(local())), plan, synthetic_run(plan))


def checked(measured: Measured, op: Collective, method: Method) -> None:
    run = with_timing(
        measured.run,
        axis="dp_cp",
        op=op,
        algorithm=method.algorithm,
        path=method.path,
        group_size=4,
    )
    check_run(replace(measured, run=run))


@pytest.mark.parametrize("op", TRANSFERS)
def test_runs_may_time_every_legal_method(measured: Measured, op: Collective) -> None:
    for method in legal_methods(measured.problem.fabric, "executor", op):
        checked(measured, op, method)


@pytest.mark.parametrize(
    ("op", "method"),
    [
        ("all_reduce", Method("tree")),
        ("all_reduce", Method("hierarchical", "executor")),
        ("all_gather", Method("copy_engine", "mori")),
        ("all_gather", Method("tree", "executor")),
        ("all_to_all", Method("copy_engine", "shm")),
        ("broadcast", Method("pairwise", "executor")),
    ],
    ids=str,
)
def test_other_methods_are_refused_by_name(
    measured: Measured, op: Collective, method: Method
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        checked(measured, op, method)
    assert f"is {str(method)!r}; {op} has " in str(refused.value)
    assert str(refused.value.where).endswith("collectives[5].algorithm")


def test_a_calibration_with_a_path_that_has_no_price_is_refused_by_name() -> None:
    unknown = calibration("shm").calls[0].model_copy(update={"path": "mori"})
    bad = calibration("shm").model_copy(update={"calls": (unknown,)})
    with pytest.raises(InvalidInputError, match=r"all_reduce by mori, which has no price"):
        check_calibration(bad, "local-gloo")
