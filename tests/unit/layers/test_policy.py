"""``hetero_policy`` replaces only the parallel linear layers; lack of memory is recognized and foreseen."""

import copy

import pytest
import torch
import transformers
from colossalai.shardformer.policies import auto_policy
from colossalai.shardformer.policies.base_policy import Policy
from torch.distributed import DistBackendError

from colossal_hetero.colossalai_support.accelerator import is_out_of_memory
from colossal_hetero.layers import hetero_policy
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy
from colossal_hetero.layers.transport import check_room


class OwnPolicy(Policy):
    """A user's own. Colossal-AI's policies cannot be imported with a newer transformers."""

    config_sanity_check = preprocess = module_policy = postprocess = lambda self: None


def test_the_given_policy_and_colossalais_table_stay_as_they_are() -> None:
    """That linear layers are replaced, and only these, is in the training of each family."""
    given, table = OwnPolicy(), copy.deepcopy(auto_policy._POLICY_LIST)
    policy = hetero_policy(given)
    assert isinstance(policy, OwnPolicy) and policy is not given and type(given) is OwnPolicy
    assert type(policy).__name__ == "HeteroOwnPolicy" and type(policy) is type(hetero_policy(OwnPolicy()))
    assert table == auto_policy._POLICY_LIST
    sizes = dict(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if not IS_NEWER_THAN_COLOSSALAI:
        assert not type(auto_policy.get_autopolicy(model)).__name__.startswith("Hetero")
    # Models of a newer transformers keep its forward pass.
    assert isinstance(hetero_policy(model), TransformersPolicy) == IS_NEWER_THAN_COLOSSALAI


def test_lack_of_memory_is_told_from_other_errors() -> None:
    nccl = ("Failed to CUDA calloc 6291456 bytes: out of memory", "unhandled error\nCuda failure 2 'out of memory'")
    assert all(is_out_of_memory(DistBackendError(words)) for words in nccl)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(DistBackendError("NCCL error: remote process exited or there was a network error"))


@pytest.mark.parametrize(("more_bytes", "more_work"), [(40, 0.0), (20, 0.5), (0, 1.0)])
def test_an_iteration_that_would_not_fit(more_bytes: int, more_work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 100 bytes for this process, of which 60 were in use at most, 40 of them for activations."""
    found = dict(mem_get_info=(30, 1000), memory_reserved=70, max_memory_allocated=60, memory_allocated=20)
    found |= dict(get_per_process_memory_fraction=1.0)  # which older versions of torch do not have
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value, raising=False)
    gpu = torch.device("cuda", 0)
    check_room(gpu, more_bytes, more_work)
    with pytest.raises(RuntimeError, match="an iteration would need 101 bytes, the GPU has 100") as error:
        check_room(gpu, more_bytes + 1, more_work)
    assert is_out_of_memory(error.value)
    check_room(torch.device("cpu"), 2**60, 1.0)  # is not asked
