"""Contracts with Colossal-AI and torch: each private name that this package uses is there, with its parameters, and
calls are in the order that it relies on. A version that moved something is told here, and not where a run fails.

A new use of a private name needs a line in ``names.txt``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

from colossal_hetero import doctor
from colossal_hetero.colossalai_support import gpu_over_gloo
from colossal_hetero.data_parallel import busy_timer
from colossal_hetero.elastic import rendezvous
from colossal_hetero.profiling import local_collectives
from tests.support.paths import REPOSITORY
from tests.unit.contracts import reading
from tests.unit.contracts.reading import definitions

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in sources of others
PACKAGE = REPOSITORY / "colossal_hetero"
HYBRID = "colossalai.booster.plugin.hybrid_parallel_plugin"
AMP = "colossalai.amp.naive_amp.mixed_precision_optimizer"
ZERO = "colossalai.zero.low_level.LowLevelZeroOptimizer"

ORDERS = {
    f"{HYBRID}.HybridParallelPlugin.__init__": "ProcessGroupMesh PipelineStageManager OneForwardOneBackwardSchedule",
    f"{HYBRID}.HybridParallelPlugin.configure": "HybridParallelModule HybridParallelAMPOptimizer setup_distributed",
    f"{HYBRID}.HybridParallelPlugin.execute_pipeline": "forward_backward_step sync_shared_params sync_dp_grads",
    f"{HYBRID}.HybridParallelNaiveOptimizer.step": "_compute_grad_norm _clip_grad_norm step",
    f"{AMP}.MixedPrecisionOptimizer.step": "should_skip_step _compute_grad_norm _unscale_and_clip_grads step",
    f"{ZERO}.__init__": "_sanity_checks GradientStore _create_master_param_current_rank _attach_reduction_hook",
    f"{ZERO}.backward": "pre_backward backward _reduce_grad",
    f"{ZERO}.backward_by_grad": "pre_backward_by_grad backward _reduce_grad",
    f"{ZERO}.step": (
        "should_skip_step get_partitioned_gradients_by_param_id _compute_grad_norm _unscale_and_clip_grads step "
        "all_gather_into_flat_tensor_nd"
    ),
    "colossalai.shardformer.shard.sharder.ModelSharder.shard": "_preprocess _release_unheld_layers _postprocess",
    "colossalai.pipeline.schedule.OneForwardOneBackwardSchedule.run_forward_backward": "load_batch forward_step",
    "torch.distributed.distributed_c10d._new_group_with_tag": "sorted _new_process_group_helper",
}
"""By function: calls in the order that methods and classes of this package rely on, which it puts in their place."""

UNSPELLED = {
    *("LinearWithAsyncCommunication", "MatmulWithAsyncCommunication", "DistCrossEntropy", "RingAttention"),
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
    "__init__",
}
"""Names that the package finds by their kind or puts together."""


def contracts() -> dict[str, dict[str, list[str] | None]]:
    """Names by owner, each with its parameters if they matter."""
    text = re.sub(r"^#.*$", "", Path(__file__).with_name("names.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, dict[str, list[str] | None]] = {}
    for owner, names in re.findall(r"^(\S+):((?:.|\n(?=\s))*)", text, re.MULTILINE):
        each = re.findall(r"(\w+)(\(.*?\))?", names)
        found[owner] = {name: re.findall(r"\w+", given) if given else None for name, given in each}
    return found


CONTRACTS = contracts()


def use_of(owner: str, name: str) -> str:
    """Where this package uses a name, in words."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    naming = [path for path, text in texts.items() if re.search(rf"\b{name}\b", text)]
    close = [path for path in naming if owner.rpartition(".")[2] in texts[path]]
    words = (f"{path.relative_to(REPOSITORY)} ({texts[path].splitlines()[0][3:]} …)" for path in (close or naming)[:3])
    return f"used by {', '.join(words)}"


@pytest.mark.parametrize("owner", CONTRACTS)
def test_names_are_there(owner: str) -> None:
    try:
        there = definitions(resolve_name(owner))
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{owner} is gone ({error}): {use_of(*owner.rsplit('.', 1))}")
    for name, given in CONTRACTS[owner].items():
        assert name in there, f"{owner}.{name} is gone: {use_of(owner, name)}"
        if given is not None:
            names, needed = reading.parameters(there[name])
            is_same = [each for each in names if each in given] == given and needed <= set(given)
            assert is_same, f"{owner}.{name} takes {names}, and no longer {given}: {use_of(owner, name)}"


@pytest.mark.parametrize("function", ORDERS)
def test_calls_are_in_order(function: str) -> None:
    owner, _, name = function.rpartition(".")
    found = reading.calls(definitions(resolve_name(owner))[name])
    rest = iter(found)
    for call in ORDERS[function].split():
        assert call in rest, f"{function} calls {' '.join(found)}, and no longer {ORDERS[function]} in this order"


def test_overrides_take_what_their_parents_take() -> None:
    for kind, name, own, theirs in reading.overrides():
        (names, needed), (expected, _) = reading.parameters(own), reading.parameters(theirs)
        passes_on = own.args.vararg is not None or own.args.kwarg is not None
        assert needed <= set(expected), f"{kind}.{name} needs {needed - set(expected)}, which its parent does not have"
        assert passes_on or set(expected) <= set(names), f"{kind}.{name} lacks {set(expected) - set(names)}"


def test_every_private_name_has_a_contract() -> None:
    missing = {use for use in reading.uses() if not has_contract(*use[1:])}
    words = (f"{module} uses {name} of {owner or 'an object'}" for module, owner, name in sorted(missing))
    assert not missing, "names.txt lacks\n" + "\n".join(words)


def test_the_rendezvous_handles_every_action_of_torch() -> None:
    files = [path.name for path in PACKAGE.rglob("*.py") if "dynamic_rendezvous" in path.read_text(encoding="utf-8")]
    ends = {_Action.SYNC, _Action.FINISH, _Action.ERROR_CLOSED, _Action.ERROR_TIMEOUT}
    assert (files, set(_Action)) == (["rendezvous.py"], ends | set(rendezvous._CHANGES))


def test_every_collective_of_training_is_replaced_and_watched() -> None:
    """Under another name, one rank's trial would wait for the others, and waiting would count as work."""
    callers = ("distributed.fsdp._runtime_utils", "distributed.fsdp._flat_param", "nn.modules._functions")
    texts = [Path(resolve_name(f"torch.{caller}").__file__ or "").read_text(encoding="utf-8") for caller in callers]
    kinds = "all_gather|all_reduce|broadcast|reduce_scatter|all_to_all"
    called = {name for text in texts for name in re.findall(rf"\bdist\.((?:{kinds})\w*)\(", text)}
    assert len(called) > 3
    for known in (local_collectives._NAMES, busy_timer.COLLECTIVES, doctor.COLLECTIVES):
        assert called <= set(known)
    assert called - {"all_reduce", "broadcast"} <= set(gpu_over_gloo.OUTPUTS)  # Gloo has these two on GPUs


def test_every_contract_is_used() -> None:
    words = {word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    unused = [f"{owner}.{name}" for owner in CONTRACTS for name in set(CONTRACTS[owner]) - words - UNSPELLED]
    assert not unused, f"remove from names.txt: {', '.join(unused)}"


def has_contract(owner: str, name: str) -> bool:
    """True if a contract is about this name of this owner, or about something inside of it."""
    if any(f"{each}.".startswith(f"{owner}.{name}.") for each in (*CONTRACTS, *ORDERS)):
        return True
    owners = [kind_of(each) for each in CONTRACTS if name in CONTRACTS[each]]
    if not owner or kind_of(owner) in owners:
        return bool(owners)
    kind = kind_of(owner)
    if isinstance(kind, ModuleType):
        return False
    if kind.__module__ in ("builtins", "collections"):  # a dict of torch
        return has_contract(*owner.rsplit(".", 1))
    return any(kind in each.__mro__ or each in kind.__mro__ for each in owners if isinstance(each, type))


@cache
def kind_of(owner: str) -> Any:
    """The module or the class with this name, or the class of the object with this name."""
    found = resolve_name(owner)
    return found if isinstance(found, type | ModuleType) else type(found)
